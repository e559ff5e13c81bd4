"""Inputs to trace a module with: made from a config, or taken from a run of the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from slapo.errors import TraceError
from slapo.graph.trace.hf import caches_off, is_pretrained, no_results_kept
from slapo.graph.trace.leaves import attributes_kept, generators_kept
from slapo.graph.trace.nests import map_leaves
from slapo.graph.trace.surroundings import one_device, told_once
from slapo.graph.trace.torch_private import FakeTensorMode

#: Positional and keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

#: Sizes of the examples: odd, prime, and all different, so that none is taken for another.
BATCH = 3
LENGTH = 13
DECODER_LENGTH = 11


@dataclass(frozen=True)
class _Facts:
    """What the builders need to know."""

    module: nn.Module
    config: Any
    has_decoder: bool

    def read(self, *names: str, default: int) -> int:
        """The first of `names` that the config has, here or in its text part."""
        for config in (self.config, getattr(self.config, "text_config", None)):
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, int):
                    return value
        return default

    def zeros(self, *shape: int) -> Tensor:
        """Zeros of the dtype that the parameters have."""
        floating = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return torch.zeros(shape, dtype=next(floating, torch.get_default_dtype()))

    def states(self, *names: str, length: int = LENGTH) -> Tensor:
        """Hidden states; `names` are further names of their size."""
        hidden = self.read(*names, "hidden_size", "n_embd", "d_model", default=32)
        return self.zeros(BATCH, length, hidden)

    @property
    def main_input(self) -> str:
        """The name that the model gives for it."""
        return getattr(self.module, "main_input_name", "input_ids")

    @property
    def is_waveform_model(self) -> bool:
        """True if the main input is a row of samples."""
        return self.main_input == "input_values" and hasattr(self.config, "conv_stride")


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def _picture(facts: _Facts) -> Tensor:
    vision = getattr(facts.config, "vision_config", None) or facts.config
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return facts.zeros(BATCH, getattr(vision, "num_channels", 3), height, width)


def _sound(facts: _Facts) -> Tensor:
    """A spectrogram of the fixed size that the config names, or a waveform."""
    bins, frames = (getattr(facts.config, name, None) for name in ("num_mel_bins", "max_length"))
    if bins and frames:
        return facts.zeros(BATCH, frames, bins)
    samples = LENGTH
    kernels, strides = (getattr(facts.config, f"conv_{name}", ()) for name in ("kernel", "stride"))
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = (samples - 1) * stride + kernel
    return facts.zeros(BATCH, samples)


def _spectrogram(facts: _Facts) -> Tensor:
    """Whisper's: bins first, two frames for each position of the encoder."""
    frames = 2 * facts.read("max_source_positions", default=1500)
    return facts.zeros(BATCH, facts.read("num_mel_bins", default=80), frames)


def _labels(facts: _Facts) -> Tensor:
    """Labels of the shape that the head's loss expects."""
    head, problem = type(facts.module).__name__, getattr(facts.config, "problem_type", None)
    if head.endswith(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")):
        if problem == "multi_label_classification":
            return facts.zeros(BATCH, facts.read("num_labels", default=2))
        return facts.zeros(BATCH) if problem == "regression" else _class_labels(facts)
    return _ones(BATCH, DECODER_LENGTH if facts.has_decoder else LENGTH)


def _class_labels(facts: _Facts) -> Tensor:
    return torch.zeros(BATCH, dtype=torch.long)


#: Parameter of forward -> builder of an example for it.
BUILDERS: dict[str, Callable[[_Facts], Tensor]] = {
    "input_ids": lambda facts: _ones(BATCH, LENGTH),
    "attention_mask": lambda facts: _ones(
        *(_sound(facts).shape if facts.is_waveform_model else (BATCH, LENGTH))
    ),
    "token_type_ids": lambda facts: torch.zeros_like(_ones(BATCH, LENGTH)),
    "position_ids": lambda facts: torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous(),
    "inputs_embeds": lambda facts: facts.states("embedding_size"),
    "decoder_input_ids": lambda facts: _ones(BATCH, DECODER_LENGTH),
    "decoder_attention_mask": lambda facts: _ones(BATCH, DECODER_LENGTH),
    "decoder_inputs_embeds": lambda facts: facts.states("embedding_size", length=DECODER_LENGTH),
    "encoder_hidden_states": lambda facts: facts.states("cross_attention_hidden_size"),
    "encoder_attention_mask": lambda facts: _ones(BATCH, LENGTH),
    "pixel_values": _picture,
    "input_values": _sound,
    "input_features": _spectrogram,
    "labels": _labels,
    "next_sentence_label": _class_labels,
    "sentence_order_label": _class_labels,
    "start_positions": _class_labels,
    "end_positions": _class_labels,
}

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

#: Names of which one stands for another: with both, a model would refuse its inputs.
_ALTERNATIVES = (
    ("input_ids", "inputs_embeds"),
    ("decoder_input_ids", "decoder_inputs_embeds"),
)


def example_inputs(
    module: nn.Module,
    concrete_args: Mapping[str, Any] | None = None,
    config: Any = None,
    every_mask: bool = False,
) -> dict[str, Tensor]:
    """Dummy inputs for a Hugging Face model, by name.

    Parameters
    ----------
    module
        A ``PreTrainedModel``.
    concrete_args
        Forward parameter -> value. These are no inputs. Inputs are the main one, the attention
        mask, and the decoder's tokens where the model has a decoder; or, if all other parameters
        are named here, exactly those that are left.
    config
        The config to read sizes from, by default the model's own.
    every_mask
        Whether the decoder has a mask too, which a model without padding is called without.

    Returns
    -------
    dict of str to Tensor
        On the device of the module. Sizes are primes that differ: batch 3, length 13 (11 for
        decoder inputs), except where the config fixes them.

    Raises
    ------
    TraceError
        If the module is no ``PreTrainedModel``, or its main input is of an unknown kind.
    KeyError
        If `concrete_args` names no parameter of forward.
    """
    if not is_pretrained(module):
        raise TraceError(
            f"no example inputs are known for a {type(module).__name__}, which is no Hugging Face "
            "PreTrainedModel; pass example_inputs="
        )
    config = config if config is not None else module.config
    names = list(inspect.signature(module.forward).parameters)
    facts = _Facts(module, config, "decoder_input_ids" in names)
    chosen = (
        _main_inputs(facts, names) if concrete_args is None else _open(facts, names, concrete_args)
    )
    mask = "decoder_attention_mask"
    if every_mask and "decoder_input_ids" in chosen and mask in names and mask not in chosen:
        chosen.append(mask)
    device = next((p.device for p in module.parameters()), None)
    return {name: BUILDERS[name](facts).to(device) for name in chosen}


def inputs_of_part(
    module: nn.Module, concrete_args: Mapping[str, Any], config: Any = None
) -> dict[str, Any]:
    """Dummy inputs for a layer or an attention of Hugging Face that stands alone, by name.

    Parameters
    ----------
    module
        What takes ``hidden_states`` of shape (batch, length, hidden), and maybe rotary embeddings
        and a mask, of which it gets none.
    concrete_args
        Forward parameter -> value; these are no inputs.
    config
        The config to read sizes from, by default that of the module or of one below it.

    Raises
    ------
    TraceError
        If its forward needs more than that, or nothing tells the size.
    """
    parameters = inspect.signature(module.forward).parameters
    taken = parameters.keys() - concrete_args.keys()
    needed = {
        name
        for name in taken
        if parameters[name].default is inspect.Parameter.empty
        and parameters[name].kind not in _STARRED
    }
    configs = (m.config for m in module.modules() if getattr(m, "config", None) is not None)
    config = config if config is not None else next(configs, None)
    is_part = type(module).__module__.startswith("transformers.") and config is not None
    known = {"hidden_states", "position_embeddings", "attention_mask"}
    if not is_part or "hidden_states" not in needed or needed - known:
        raise TraceError("there is nothing to run it with; pass example_inputs")
    facts = _Facts(module, config, False)
    states = facts.states()
    heads = facts.read("num_attention_heads", "num_heads", default=1)
    angles = facts.zeros(BATCH, LENGTH, facts.read("head_dim", default=states.size(-1) // heads))
    made: dict[str, Any] = {
        "hidden_states": states,
        "position_embeddings": (angles, angles.clone()),  # cosines and sines
    }
    device = next((p.device for p in module.parameters()), None)
    found = {name: tree_map(lambda t: t.to(device), made[name]) for name in made if name in taken}
    return {**dict.fromkeys(needed), **found}


def _main_inputs(facts: _Facts, names: list[str]) -> list[str]:
    main = facts.main_input
    if main not in BUILDERS:
        raise TraceError(
            f"no example is known for {main!r}, the main input of {type(facts.module).__name__}; "
            "pass example_inputs="
        )
    # Without a mask, Transformers looks for packed sequences in the positions.
    wanted = [main, "decoder_input_ids"]
    if "input_ids" in names:
        wanted += ["input_ids"] if main == "pixel_values" else []
    if "input_ids" in names or facts.is_waveform_model:
        wanted += ["attention_mask"]
    return [name for name in names if name in wanted]


def _open(facts: _Facts, names: list[str], concrete_args: Mapping[str, Any]) -> list[str]:
    """What stays an input when some parameters are constants.

    Who names all others leaves exactly the inputs open; who names a flag or two fixes these, and
    nothing else.
    """
    unknown = [name for name in concrete_args if name not in names]
    if unknown:
        raise KeyError(f"forward has no parameter {unknown[0]!r}; it has {', '.join(names)}")
    parameters = inspect.signature(facts.module.forward).parameters
    left = [n for n in names if n not in concrete_args and parameters[n].kind not in _STARRED]
    if not all(name in BUILDERS for name in left):
        return [name for name in _main_inputs(facts, names) if name not in concrete_args]
    for preferred, other in _ALTERNATIVES:
        if preferred in left and other in left:
            left.remove(other)
    return left


def with_constants(module: nn.Module, inputs: Inputs, constants: Mapping[str, Any]) -> Inputs:
    """A call with other values for some parameters, split as before.

    Raises
    ------
    TypeError
        If the arguments do not fit the signature.
    """
    signature = inspect.signature(module.forward)
    args, kwargs = list(inputs[0]), dict(inputs[1])
    names = [p.name for p in signature.parameters.values() if p.kind not in _STARRED]
    for name, value in constants.items():
        if name in names[: len(args)]:
            args[names.index(name)] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


class _ReachedError(Exception):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__("the module was called")
        self.inputs = inputs


def inputs_within(root: nn.Module, inputs: Inputs, module: nn.Module) -> Inputs:
    """Run `root` on fake tensors until it calls `module`; returns the arguments of that call.

    Raises
    ------
    TraceError
        If the run fails, or never calls the module.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError((args, kwargs))

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    handle = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with (
            generators_kept(),
            no_results_kept(),
            caches_off(root),
            told_once(),
            one_device(root),
            attributes_kept(root),
        ):
            args = tuple(map_leaves(value, fake) for value in inputs[0])
            kwargs = {name: map_leaves(value, fake) for name, value in inputs[1].items()}
            with mode:
                root(*args, **kwargs)
    except _ReachedError as reached:
        return reached.inputs
    except Exception as error:
        raise TraceError(
            f"a run of the whole model on fake tensors, to see how {type(module).__name__} is "
            f"called, failed with {type(error).__name__}: {error}; pass example_inputs"
        ) from error
    finally:
        handle.remove()
    raise TraceError(
        f"the model never calls this {type(module).__name__} on example inputs; pass example_inputs"
    )
