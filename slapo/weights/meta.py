"""Models without memory: parameters created on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo.errors import SlapoError
from slapo.hooks import remove_pre_hooks


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Create modules whose parameters have a shape and no memory.

    :func:`slapo.build` creates them later, each rank only its share. Parameters that a model ties
    while it is constructed stay tied. What is loaded inside the block, by ``from_pretrained`` or
    ``load_state_dict(assign=True)``, keeps its values.

    Parameters
    ----------
    enable
        False does nothing.
    include_buffers
        Put buffers on ``meta`` as well. Else they are computed as usual, which keeps tables such
        as rotary frequencies right.

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


#: Calls of ``load_state_dict`` that are under way.
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
    """True for values of a checkpoint; Transformers marks them."""
    return bool(_loads) or getattr(param, "_is_hf_initialized", False)


def _empty_buffer(register: Any) -> Any:
    def register_buffer(
        module: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        empty = tensor.to("meta") if tensor is not None else None
        register(module, name, empty, persistent=persistent)

    return register_buffer


def refuse_calls(model: nn.Module) -> None:
    """Let calls of a model without values say what to do, until :func:`allow_calls`.

    Some would fail deep inside of torch, others give a result without values.
    """
    if any(param.is_meta for param in model.parameters()):
        allow_calls(model)
        model.register_forward_pre_hook(_refuse_values, with_kwargs=True)


def allow_calls(model: nn.Module) -> None:
    """Undo :func:`refuse_calls`."""
    remove_pre_hooks(model, lambda hook: hook is _refuse_values)


def _refuse_values(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Tracers, and users who ask for shapes, call with fake tensors or with some on meta.
    plain = [t for t in pytree.tree_leaves((args, kwargs)) if type(t) is torch.Tensor]
    if all(tensor.is_meta for tensor in plain):
        return
    empty = [name for name, param in module.named_parameters() if param.is_meta]
    if empty:
        raise SlapoError(
            f"{type(module).__name__} was called before it has values: {empty[:3]} are on meta; "
            "call what slapo.build(sch) returns, which creates them"
        )
