"""Low-rank adapters around a layer, as PEFT puts them in: they are split with it.

A layer ``y = W x`` becomes ``W x + s B A x`` (Hu et al., "LoRA: Low-Rank Adaptation of Large
Language Models", 2021). Where ranks hold rows of ``W``, they hold those of ``B``, and each computes
a part of the gradient of ``A``. Where they hold columns of ``W``, they hold those of ``A``, whose
small output is reduced as that of ``W``; then all of ``B`` acts on the sum.
"""

from __future__ import annotations

from torch import nn

from slapo.node import Node
from slapo.sharding.state import layout_of, shards_of
from slapo.wrapper import innermost


def base_of(sch: Node) -> Node:
    """The layer within adapters; the node itself if there are none."""
    return sch["base_layer"] if _is_adapted(innermost(sch.mod)) else sch


def adapters_of(sch: Node) -> list[tuple[Node, Node]]:
    """The first and the second matrix of each adapter of a layer; none if it is not adapted."""
    module = innermost(sch.mod)
    if not _is_adapted(module):
        return []
    names = list(innermost(module.lora_A)._modules)  # type: ignore[arg-type]
    if not names or getattr(module, "lora_variant", None):
        raise ValueError(
            f"{sch.path!r} has adapters of {type(module).__name__} that are not two matrices of "
            "LoRA, and only these are split with their layer; take one rank for tensor "
            "parallelism, and more for data parallelism"
        )
    return [(sch[f"lora_A.{name}"], sch[f"lora_B.{name}"]) for name in names]


def reduces_within(sch: Node) -> bool:
    """Return whether the layer within adapters makes a partial sum, as the adapters do then."""
    output = layout_of(innermost(base_of(sch).mod)).output
    return base_of(sch) is not sch and output is not None and output.kind == "partial"


def is_split_without_adapters(module: nn.Module) -> bool:
    """Return whether adapters were put around a layer that was split before."""
    if not _is_adapted(module):
        return False
    matrices = [*module.lora_A.modules(), *module.lora_B.modules()]  # type: ignore[union-attr]
    base = innermost(module.base_layer)  # type: ignore[arg-type]
    return bool(shards_of(base)) and not any(shards_of(innermost(m)) for m in matrices)


def _is_adapted(module: nn.Module) -> bool:
    return all(name in module._modules for name in ("base_layer", "lora_A", "lora_B"))
