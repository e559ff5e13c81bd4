"""PyTorch's own tensor-parallel styles on models of Transformers, as tables of paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmark.train_options import Refused


@dataclass(frozen=True)
class Plan:
    """What is split how.

    Parameters
    ----------
    layers
        Path of the list of layers.
    columns, rows
        Of linear modules in a layer, split by their outputs and inputs.
    embedding
        Split by rows; "" leaves it whole, as where a tied head has a bias of its own.
    head
        Split by columns, whose outputs are gathered.
    """

    layers: str
    columns: str
    rows: str
    embedding: str = ""
    head: str = ""


_DECODER = Plan(
    "model.layers",
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
    "self_attn.o_proj mlp.down_proj",
    "model.embed_tokens",
    "lm_head",
)
_ENCODER = "attention.self.query attention.self.key attention.self.value intermediate.dense"
_PLANS = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "bert": Plan("bert.encoder.layer", _ENCODER, "attention.output.dense output.dense"),
    "roberta": Plan("roberta.encoder.layer", _ENCODER, "attention.output.dense output.dense"),
}


def dtensor_plan(key: str) -> Plan:
    """The table of a family.

    Raises
    ------
    Refused
        If the styles do not fit its modules.
    """
    if key not in _PLANS:
        raise Refused(
            f"there is no plan of DTensor's styles for {key}: they take torch.nn.Linear whose "
            f"outputs are split by whole heads; there are {', '.join(_PLANS)}"
        )
    return _PLANS[key]


def parallelized(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Split a model over the ranks of a mesh of one dimension."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    split: dict[str, Any] = {path: ColwiseParallel() for path in plan.columns.split()}
    split |= {path: RowwiseParallel() for path in plan.rows.split()}
    layers: Any = model.get_submodule(plan.layers)
    for layer in layers:
        parallelize_module(layer, mesh, split)
    ends: dict[str, Any] = {}
    if plan.embedding:
        ends[plan.embedding] = RowwiseParallel(input_layouts=Replicate())
    if plan.head:
        ends[plan.head] = ColwiseParallel(output_layouts=Replicate())
    if ends:
        parallelize_module(model, mesh, ends)
    return model
