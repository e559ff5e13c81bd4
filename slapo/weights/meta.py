"""Models without memory: parameters created on the ``meta`` device."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo.errors import SlapoError
from slapo.hooks import remove_pre_hooks
from slapo.weights.provenance import FOLDER


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Create modules whose parameters have a shape but no memory.

    :func:`slapo.build` materializes them later; each rank creates only its part. Parameters that a
    model ties in its constructor stay tied. Transformers' ``from_pretrained(folder)`` records the
    folder, and :func:`slapo.build` reads from it the parts of each rank. With options that change
    values, such as quantization, it loads at once. So does ``load_state_dict(assign=True)``.

    Parameters
    ----------
    enable
        False has no effect.
    include_buffers
        True puts buffers on ``meta`` too. By default they are computed as usual, which keeps tables
        such as rotary frequencies correct.

    Examples
    --------
    >>> with init_empty_weights():
    ...     model = nn.Linear(5_000, 5_000)
    >>> model.weight.device
    device(type='meta')
    """
    if not enable:
        yield
        return
    patched = {"register_parameter": _empty_parameter, "load_state_dict": _loading}
    if include_buffers:
        patched["register_buffer"] = _empty_buffer
    originals = {name: getattr(nn.Module, name) for name in patched}
    for name, wrapper in patched.items():
        setattr(nn.Module, name, wrapper(originals[name]))
    try:
        with _remembering_folders():
            yield
    finally:
        for name, original in originals.items():
            setattr(nn.Module, name, original)


def _empty_parameter(register: Any) -> Any:
    # A parameter that is registered twice is tied: both places get one empty parameter.
    empties: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta or _is_loaded(param):
            return
        if id(param) not in empties:
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            empties[id(param)] = (param, empty)
        module._parameters[name] = empties[id(param)][1]

    return register_parameter


#: Arguments of ``from_pretrained`` that are also supported on meta.
_OPTIONS = ("dtype", "torch_dtype", "attn_implementation")

#: Arguments of ``from_pretrained`` about where to find files, which are already local.
_PLACES = (
    *("revision", "code_revision", "trust_remote_code", "adapter_kwargs", "local_files_only"),
    *("token", "cache_dir", "force_download", "use_safetensors", "low_cpu_mem_usage"),
)


@contextmanager
def _remembering_folders() -> Iterator[None]:
    # A program that has not imported Transformers can have no model of it.
    cls: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if cls is None:
        yield
        return
    load = cls.__dict__["from_pretrained"]

    def from_pretrained(made: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        model = None if args or name is None else _from_folder(made, Path(name), kwargs)
        return load.__func__(made, name, *args, **kwargs) if model is None else model

    cls.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        cls.from_pretrained = load


def _from_folder(cls: Any, folder: Path, given: dict[str, Any]) -> Any:
    """Return the model of a folder on meta, or None if Transformers must load it."""
    options, config = dict(given), given.get("config")
    options.pop("config", None)
    if not (folder / "config.json").is_file() or isinstance(config, (str, Path)):
        return None
    if config is None:
        config, options = cls.config_class.from_pretrained(
            folder, return_unused_kwargs=True, **options
        )
    # Options such as device_map or quantization_config change what is loaded.
    if any(options[name] for name in options.keys() - {*_OPTIONS, *_PLACES}):
        return None
    if getattr(config, "quantization_config", None) is not None:
        return None
    options = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    dtype = options.pop("torch_dtype", options.pop("dtype", "auto"))
    # The caller may make other models from the config.
    config = copy.deepcopy(config)
    config.name_or_path = str(folder)
    model = cls._from_config(config, dtype=config.dtype if dtype == "auto" else dtype, **options)
    vars(model)[FOLDER] = str(folder.absolute())
    # As from_pretrained() returns it.
    return model.eval()


#: Active calls of ``load_state_dict``.
_loads: list[nn.Module] = []


def _loading(load: Any) -> Any:
    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _loads.append(module)
        try:
            return load(module, *args, **kwargs)
        finally:
            _loads.pop()

    return load_state_dict


def _is_loaded(param: nn.Parameter) -> bool:
    """Return True for values of a checkpoint, which Transformers marks."""
    return bool(_loads) or getattr(param, "_is_hf_initialized", False)


def _empty_buffer(register: Any) -> Any:
    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        empty = tensor.to("meta") if tensor is not None else None
        register(module, name, empty, persistent=persistent)

    return register_buffer


def refuse_calls(model: nn.Module) -> None:
    """Make calls of a model on meta raise an error with the fix, until :func:`allow_calls`.

    Some would otherwise fail deep inside torch, and others return a result without values.
    """
    if any(param.is_meta for param in model.parameters()):
        allow_calls(model)
        model.register_forward_pre_hook(_refuse_values, with_kwargs=True)


def allow_calls(model: nn.Module) -> None:
    """Undo :func:`refuse_calls`."""
    remove_pre_hooks(model, lambda hook: hook is _refuse_values)


def _refuse_values(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Tracers and shape inference call with fake tensors or with meta tensors.
    plain = [t for t in pytree.tree_leaves((args, kwargs)) if type(t) is torch.Tensor]
    if all(tensor.is_meta for tensor in plain):
        return
    empty = [name for name, param in module.named_parameters() if param.is_meta]
    if empty:
        raise SlapoError(
            f"{type(module).__name__} was called before initialization: {empty[:3]} are on meta; "
            "call the model returned by slapo.build(sch)"
        )
