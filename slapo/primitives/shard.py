"""``.shard(tensor_name, axis)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import nn

from slapo.logger import get_logger
from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called, check_own_tensor, with_adapters
from slapo.sharding.guards import refuse_clipping, refuse_methods
from slapo.sharding.shards import ShardPlan
from slapo.sharding.slicing import Cut, make_spec
from slapo.sharding.state import shards_of
from slapo.weights.slots import parameter_slot
from slapo.wrapper import innermost, is_adapted

logger = get_logger()


class ShardPrimitive(Primitive, name="shard"):
    """Keep this rank's slice of a parameter or buffer.

    ``weight of shape (out, in) --> weight of shape (out / world_size, in)`` for ``axis=0``

    The module's own sizes are adjusted (``out_features``, ``num_embeddings``, ...), and the slice
    stores the full shape as ``orig_shape``. A bias of a partial sum is added once. If the parameter
    is tied, the other modules that share it are sharded with it.

    Add the collectives with :meth:`Schedule.sync`.

    Parameters
    ----------
    tensor_name
        A parameter or buffer of the module itself.
    axis
        Axis to shard; negative values count from the end.
    blocks
        Number of equal blocks along the axis, each sharded separately: 3 for a packed query, key
        and value, whose heads then stay together. A sequence gives the sizes of unequal blocks.
    uneven
        Allow slices of different sizes if the world size does not divide the axis. Sizes are as in
        ``torch.chunk``: 25, 25, 25 and 22 for a vocabulary of 97.
    parts
        Maximum number of slices along the axis, such as the number of key and value heads. With
        more ranks than slices, neighboring ranks hold the same slice and its gradient is summed
        over them.

    Raises
    ------
    ValueError
        If there is no such tensor or axis; if the tensor is sharded already; if the world size does
        not divide the size and `uneven` is False; if a rank would hold nothing; or if a slice would
        change the result.

    Notes
    -----
    Column and row shards in pairs: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter
    Language Models Using Model Parallelism" (2019).

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Linear(4, 6))  # a world of one
    >>> sch.shard("weight", axis=0).mod.weight.orig_shape
    torch.Size([6, 4])
    """

    @staticmethod
    def apply(
        sch: Node,
        /,
        tensor_name: Annotated[str, "the name of one tensor; call shard() once for each"],
        axis: Annotated[int, "an axis of the tensor: 0, 1 or -1"],
        blocks: Annotated[int | Sequence[int], "the number of equal blocks, or their sizes"] = 1,
        uneven: bool = False,
        parts: Annotated[int | None, "such as the number of key and value heads"] = None,
    ) -> Node:
        if is_adapted(innermost(sch.mod)):
            return with_adapters(
                sch, lambda base: base.shard(tensor_name, axis, blocks, uneven, parts)
            )
        check_own_tensor(sch, tensor_name)
        check_called(sch, tensor_name)
        module = innermost(sch.mod)
        cut = Cut(axis, blocks, uneven, parts)
        if _confirms_tie(sch, module, tensor_name, cut):
            return sch
        _check_buffer(sch, module, tensor_name)
        plan = ShardPlan(module, tensor_name, cut, sch.group)
        if plan.defers_bias:
            check_called(sch)  # the module's own forward must treat its bias differently
        # All plans are made, and may refuse, before the first one is carried out.
        partners = _tied_plans(sch, module, tensor_name, cut)
        plan.carry_out()
        for name, partner in partners.items():
            partner.carry_out()
            sch.state.followed.add(name)
            logger.info("%s is tied to %s.%s and sharded with it", name, sch.path, tensor_name)
        sch.metadata.primitives["shard"][tensor_name] = plan.spec
        if sch.world_size > 1:
            from slapo.sharding.adapters import follow_adapters  # late: for several ranks only

            # Methods such as save_pretrained would write or read slices as if they were full
            # tensors.
            for node in (sch, *sch.ancestors()):
                refuse_methods(innermost(node.mod), module)
            refuse_clipping()
            follow_adapters()
        return sch


def _full_name(sch: Node, tensor_name: str) -> str:
    return f"{sch.model_path}.{tensor_name}" if sch.model_path else tensor_name


def _confirms_tie(sch: Node, module: nn.Module, tensor_name: str, cut: Cut) -> bool:
    """Return True if the call repeats, along the same axis, a shard made through a tied partner."""
    name = _full_name(sch, tensor_name)
    spec = shards_of(module).get(tensor_name)
    if spec is None or name not in sch.state.followed:
        return False
    if make_spec(spec.full_shape, cut, spec.rank, spec.world_size) != spec:
        raise ValueError(
            f"{tensor_name!r} is tied to {sorted(sch.state.ties.partners(name))} and was sharded "
            f"with it along axis {spec.axis} in blocks of {list(spec.blocks)}; it cannot be "
            f"sharded along axis {cut.axis} with blocks={cut.blocks} too; leave this call out, or "
            "shard both the same way"
        )
    sch.state.followed.discard(name)
    sch.metadata.primitives["shard"][tensor_name] = spec
    return True


def _check_buffer(sch: Node, module: nn.Module, tensor_name: str) -> None:
    """Raise for a buffer that other modules share, since only one of them would be sharded."""
    buffer = module._buffers.get(tensor_name)
    if buffer is None:
        return
    for path, other in sch.get_top_schedule().mod.named_modules():
        bare = innermost(other)
        shared = [n for n, b in bare._buffers.items() if b is buffer and bare is not module]
        # Wrappers share the table of their module.
        if shared and bare._buffers is not module._buffers:
            raise ValueError(
                f"{path}.{shared[0]} is the same buffer, and would stay whole; give each module "
                "its own buffer before you shard one"
            )


def _tied_plans(sch: Node, module: nn.Module, tensor_name: str, cut: Cut) -> dict[str, ShardPlan]:
    """Plans for the other modules that hold the same parameter, by the parameter's name there."""
    top = sch.get_top_schedule()
    plans: dict[str, ShardPlan] = {}
    # By table: a wrapper and its module share one, and the tensor must be sliced once.
    owners = {id(module._parameters)}
    for name in sorted(sch.state.ties.partners(_full_name(sch, tensor_name))):
        slot = parameter_slot(top.mod, name)
        if slot is None or id(slot.owner._parameters) in owners:
            continue
        owners.add(id(slot.owner._parameters))
        plans[name] = ShardPlan(innermost(slot.owner), slot.leaf, cut, sch.group)
    return plans
