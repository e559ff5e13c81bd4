"""What a caller of a recipe may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("uniform", "head")
ATTENTION = ("auto", "eager", "sdpa", "flash", "xformers")


@dataclass(frozen=True)
class Options:
    """Options of :func:`slapo.model_schedule.apply_schedule`, which says what each does."""

    fp16: bool = False
    bf16: bool = False
    attn_op_name: str | None = "auto"
    ckpt_ratio: float = 0.0
    checkpoint_method: str = "uniform"
    pipeline_cuts: int | Sequence[Any] | None = None
    bcast_input: bool = False
    delay_init: bool = True
    disable_fuse_bias_gelu: bool = True
    sequence_parallel: bool = False
    kernels: bool = True
    compile: bool = False
    parallel_vocabulary: bool = True
    gather_logits: bool = True
    fused_loss: bool = False
    check: bool = True
    example_inputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{each.name} is {value!r}; pass True or False")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; pass one of them")
        if not (self.disable_fuse_bias_gelu or self.kernels):
            raise ValueError("disable_fuse_bias_gelu=False needs the GELU of kernels=True")
        ratio = self.ckpt_ratio
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not is_number or not 0 <= ratio <= 1:
            raise ValueError(f"ckpt_ratio is {ratio!r}; pass a share of the layers, from 0 to 1")
        _check_choice("checkpoint_method", self.checkpoint_method, METHODS)
        if self.attn_op_name is not None:
            _check_choice("attn_op_name", self.attn_op_name, ATTENTION)
        if self.pipeline_cuts is not None:
            self._check_cuts()
        given = self.example_inputs
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"example_inputs is a {type(given).__name__}; pass a dictionary, of the names of "
                "the forward's arguments"
            )

    def _check_cuts(self) -> None:
        cuts = self.pipeline_cuts
        if isinstance(cuts, (bool, str)) or not isinstance(cuts, (int, Sequence)):
            raise TypeError(
                f"pipeline_cuts is {cuts!r}; pass the number of stages, or a list of the numbers "
                "of layers after which a stage ends"
            )
        apart = {
            "compile": "stages are cut out of a trace, into which a compiled layer lets none look",
            "fused_loss": "the engine computes the loss of a pipeline: give build() a loss_fn",
            "bcast_input": "the engine hands inputs to the first stage",
        }
        for name, why in apart.items():
            if getattr(self, name):
                raise ValueError(f"{name}=True with pipeline_cuts: {why}; leave {name} out")

    def asked(self) -> dict[str, Any]:
        """What differs from the defaults."""
        pairs = ((each.name, getattr(self, each.name), each.default) for each in fields(self))
        return {name: value for name, value, default in pairs if value != default}


def _check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; pass one of {list(known)}")
