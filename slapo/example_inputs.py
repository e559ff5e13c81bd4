"""Example inputs of a model or of one of its layers, created from sizes and the model's config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slapo.errors import TraceError

#: Default sizes: odd, prime and distinct, so that no dimension is mistaken for another.
BATCH = 3
LENGTH = 13
DECODER_LENGTH = 11

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
#: Pairs of inputs that a model accepts one of, but not both.
_ALTERNATIVES = (("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds"))


def text_config(config: Any) -> Any:
    """Return the config of the language model, which multimodal configs nest."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True)
class _Sizes:
    """Sizes and dtype read by the builders of single inputs."""

    module: nn.Module
    config: Any
    batch: int = BATCH
    length: int = LENGTH
    decoder_length: int = DECODER_LENGTH
    dtype: torch.dtype | None = None

    def read(self, *names: str, default: int) -> int:
        """Return the first of `names` that the config has, directly or in its text part."""
        for config in (self.config, getattr(self.config, "text_config", None)):
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, int):
                    return value
        return default

    def ones(self, length: int | None = None) -> Tensor:
        return torch.ones(self.batch, self.length if length is None else length, dtype=torch.long)

    def classes(self) -> Tensor:
        return torch.zeros(self.batch, dtype=torch.long)

    def zeros(self, *shape: int) -> Tensor:
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        dtype = self.dtype or next(floats, torch.get_default_dtype())
        return torch.zeros(self.batch, *shape, dtype=dtype)

    def states(self, *names: str, length: int | None = None) -> Tensor:
        """Hidden states; `names` are alternative config names of their size."""
        hidden = self.read(*names, "hidden_size", "n_embd", "d_model", default=32)
        return self.zeros(length or self.length, hidden)

    @property
    def main_input(self) -> str:
        return getattr(self.module, "main_input_name", "input_ids")

    @property
    def takes_waveforms(self) -> bool:
        return self.main_input == "input_values" and hasattr(self.config, "conv_stride")


def _image(sizes: _Sizes) -> Tensor:
    vision = getattr(sizes.config, "vision_config", None) or sizes.config
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return sizes.zeros(getattr(vision, "num_channels", 3), height, width)


def _sound(sizes: _Sizes) -> Tensor:
    """A spectrogram of the fixed size that the config has, or a waveform."""
    bins, frames = (getattr(sizes.config, name, None) for name in ("num_mel_bins", "max_length"))
    if bins and frames:
        return sizes.zeros(frames, bins)
    # Backward through the convolutions: the smallest waveform that gives `length` frames.
    samples = sizes.length
    kernels, strides = (getattr(sizes.config, f"conv_{name}", ()) for name in ("kernel", "stride"))
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        samples = (samples - 1) * stride + kernel
    return sizes.zeros(samples)


def _spectrogram(sizes: _Sizes) -> Tensor:
    """Whisper's spectrogram: bins first, two frames for each position of the encoder."""
    frames = 2 * sizes.read("max_source_positions", default=1500)
    return sizes.zeros(sizes.read("num_mel_bins", default=80), frames)


def _mask(sizes: _Sizes) -> Tensor:
    return sizes.ones(_sound(sizes).size(1) if sizes.takes_waveforms else None)


def _labels(sizes: _Sizes) -> Tensor:
    """Labels of the shape that the head's loss expects."""
    head, problem = type(sizes.module).__name__, getattr(sizes.config, "problem_type", None)
    if head.endswith(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")):
        if problem == "multi_label_classification":
            return sizes.zeros(sizes.read("num_labels", default=2))
        return sizes.zeros() if problem == "regression" else sizes.classes()
    has_decoder = "decoder_input_ids" in inspect.signature(sizes.module.forward).parameters
    return sizes.ones(sizes.decoder_length if has_decoder else None)


#: Parameter of forward -> builder of its example input.
_BUILDERS: dict[str, Callable[[_Sizes], Tensor]] = {
    "input_ids": _Sizes.ones,
    "attention_mask": _mask,
    "token_type_ids": lambda sizes: torch.zeros_like(sizes.ones()),
    "position_ids": lambda sizes: torch.arange(sizes.length).repeat(sizes.batch, 1),
    "inputs_embeds": lambda sizes: sizes.states("embedding_size"),
    "decoder_input_ids": lambda sizes: sizes.ones(sizes.decoder_length),
    "decoder_attention_mask": lambda sizes: sizes.ones(sizes.decoder_length),
    "decoder_inputs_embeds": lambda sizes: sizes.states(
        "embedding_size", length=sizes.decoder_length
    ),
    "encoder_hidden_states": lambda sizes: sizes.states("cross_attention_hidden_size"),
    "encoder_attention_mask": _Sizes.ones,
    "pixel_values": _image,
    "input_values": _sound,
    "input_features": _spectrogram,
    "labels": _labels,
    "next_sentence_label": _Sizes.classes,
    "sentence_order_label": _Sizes.classes,
    "start_positions": _Sizes.classes,
    "end_positions": _Sizes.classes,
}


def example_inputs(
    module: nn.Module,
    constants: Collection[str] = (),
    config: Any = None,
    *,
    batch: int = BATCH,
    length: int = LENGTH,
    decoder_length: int = DECODER_LENGTH,
    labels: bool = False,
    every_mask: bool = False,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> dict[str, Tensor]:
    """Create inputs by name: the main input, its mask, and decoder tokens if there is a decoder.

    `constants` are parameters of forward that are not inputs; if examples are known for all others,
    these are the inputs. A model derives decoder tokens from `labels`. `every_mask` adds a decoder
    mask, which a call without padding does not need.
    """
    parameters = inspect.signature(module.forward).parameters
    sizes = _Sizes(
        module, config or getattr(module, "config", None), batch, length, decoder_length, dtype
    )
    for name in constants:
        if name not in parameters:
            raise KeyError(f"forward has no parameter {name!r}; it has {', '.join(parameters)}")
    chosen = _left_open(parameters, constants) if constants else []
    if not chosen:
        main = sizes.main_input
        if main not in _BUILDERS or main not in parameters:
            raise TraceError(
                f"cannot create example inputs for {type(module).__name__}, whose main input is "
                f"{main!r} in Transformers' models; pass example_inputs="
            )
        wanted = [main, *(["decoder_input_ids"] if not labels else ["labels"])]
        if "input_ids" in parameters:
            wanted += ["input_ids"] if main == "pixel_values" else []
        # Without a mask, Transformers looks for packed sequences in the position ids.
        if "input_ids" in parameters or sizes.takes_waveforms:
            wanted += ["attention_mask"]
        chosen = [name for name in parameters if name in wanted and name not in constants]
        chosen += ["labels"] if labels and "labels" not in chosen else []
    mask = "decoder_attention_mask"
    if every_mask and "decoder_input_ids" in chosen and mask in parameters and mask not in chosen:
        chosen.append(mask)
    device = device or next((p.device for p in module.parameters()), None)
    return {name: _BUILDERS[name](sizes).to(device) for name in chosen}


def _left_open(parameters: Mapping[str, Any], constants: Collection[str]) -> list[str]:
    """Return the parameters that are not constants, if examples are known for all of them."""
    left = [n for n, p in parameters.items() if n not in constants and p.kind not in _STARRED]
    if not all(name in _BUILDERS for name in left):
        return []
    for preferred, other in _ALTERNATIVES:
        if preferred in left and other in left:
            left.remove(other)
    return left


def inputs_of_layer(
    module: nn.Module, constants: Collection[str], config: Any = None
) -> dict[str, Any]:
    """Create the inputs, by name, of a stand-alone layer or attention of Transformers.

    It gets ``hidden_states`` of shape (batch, length, hidden) and, if it takes them, rotary
    embeddings; no mask.
    """
    parameters = inspect.signature(module.forward).parameters
    taken = parameters.keys() - set(constants)
    needed = {
        name
        for name in taken
        if parameters[name].default is inspect.Parameter.empty
        and parameters[name].kind not in _STARRED
    }
    configs = (m.config for m in module.modules() if getattr(m, "config", None) is not None)
    config = config if config is not None else next(configs, None)
    is_layer = type(module).__module__.startswith("transformers.") and config is not None
    known = {"hidden_states", "position_embeddings", "attention_mask"}
    if not is_layer or "hidden_states" not in needed or needed - known:
        raise TraceError("it has no example inputs; pass example_inputs")
    sizes = _Sizes(module, config)
    states = sizes.states()
    heads = sizes.read("num_attention_heads", "num_heads", default=1)
    angles = sizes.zeros(LENGTH, sizes.read("head_dim", default=states.size(-1) // heads))
    made = {"hidden_states": states, "position_embeddings": (angles, angles.clone())}
    device = next((p.device for p in module.parameters()), None)
    made = tree_map_only(Tensor, lambda tensor: tensor.to(device), made)
    return {**dict.fromkeys(needed), **{name: made[name] for name in made if name in taken}}
