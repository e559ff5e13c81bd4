"""Undeclared changes of the model's tensors within the block.

The runs compare both models with equal weights, so they do not check the weights themselves. Here
each rank compares its values, dtypes, ``requires_grad`` and names before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slapo.agreement import checksum, gathered, has_peers
from slapo.errors import SlapoError
from slapo.schedule import Schedule
from slapo.verify.finding import Finding
from slapo.verify.numeric.origins import Origins
from slapo.weights.slots import Slot, compiled_parameters, slots
from slapo.wrapper import innermost


class Change(NamedTuple):
    """One changed tensor."""

    #: name in the scheduled model; for a removed parameter, in the original
    name: str
    #: the change, as a predicate of the name
    what: str
    #: the fix
    advice: str


def finding_of(found: Sequence[Change]) -> Finding:
    """Describe the first change, and list the others of the same kind."""
    name, what, advice = found[0]
    alike = [other.name for other in found if other.advice == advice][1:]
    shown = ", ".join(map(repr, alike[:4])) + (", ..." if alike[4:] else "")
    more = f" (as do {len(alike)} more: {shown})" if alike else ""
    return Finding(f"{name!r} {what}{more}", name.rpartition(".")[0], advice=advice)


def changes(sch: Schedule, reference: nn.Module, origins: Origins) -> list[Change]:
    """Undeclared differences between a scheduled model and the copy, most severe first."""
    before = {slot.name: slot for slot in slots(reference)}
    now = slots(sch.mod)
    found = [*_gone(sch.mod, before, origins), *_new(now, origins), *_untied(now, before, origins)]
    for slot in now:
        names = origins.parts_of(slot)
        if names:
            pack = None if origins.is_kept(slot) else partial(_packed, slot, names, origins)
            found.extend(_changed(slot, [before[name] for name in names], pack))
    return found


def _packed(
    slot: Slot, names: Sequence[str], origins: Origins, values: Sequence[Tensor]
) -> Tensor | None:
    return origins.value(slot, dict(zip(names, values, strict=True)))


def _gone(model: nn.Module, before: dict[str, Slot], origins: Origins) -> Iterator[Change]:
    names = origins.names
    accounted: set[str] = set()
    for slot in slots(model):
        accounted.update(origins.parts_of(slot))
    accounted.update(names[id(p)] for p in compiled_parameters(model).values() if id(p) in names)
    # By tensor, because a parameter that is tied in the original is accounted for by any of its
    # names.
    kept = {id(before[name].tensor) for name in accounted if name in before}
    for name, slot in before.items():
        if isinstance(slot.tensor, nn.Parameter) and id(slot.tensor) not in kept:
            kept.add(id(slot.tensor))
            yield Change(
                name,
                "is a parameter of the original and is gone",
                f"{_holder(model, name)}, or make this change after the block",
            )


def _holder(model: nn.Module, name: str) -> str:
    """Advice for the module that replaced a parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    path = name.rpartition(".")[0]
    while path not in modules:
        path = path.rpartition(".")[0]
    kind = type(innermost(modules[path])).__name__
    where = f"{path!r} ({kind})" if path else "the module that replaced it"
    return f"declare where it went by weight_sources() of {where}"


def _new(now: Sequence[Slot], origins: Origins) -> Iterator[Change]:
    for slot in now:
        if isinstance(slot.tensor, nn.Parameter) and not origins.parts_of(slot):
            owner = type(slot.owner).__name__
            yield Change(
                slot.name,
                "is a parameter that the original does not have",
                f"declare its sources by weight_sources() of {owner}, or add it after the block",
            )


def _untied(now: Sequence[Slot], before: dict[str, Slot], origins: Origins) -> Iterator[Change]:
    tensors: dict[int, tuple[Slot, str]] = {}
    first: dict[int, Slot] = {}
    for slot in now:
        name = origins.original_name(slot)
        if name not in before or not isinstance(slot.tensor, nn.Parameter):
            continue
        original = before[name].tensor
        # One walk for both directions: an original parameter must have one tensor now, and a tensor
        # now must come from one original parameter.
        other = first.setdefault(id(original), slot)
        if other.tensor is not slot.tensor:
            yield Change(
                slot.name,
                f"was tied to {other.name!r} and no longer is",
                "schedule both sides of a tie the same way, or untie them before create_schedule",
            )
        known, known_name = tensors.setdefault(id(slot.tensor), (slot, name))
        if before[known_name].tensor is not original:
            yield Change(
                slot.name,
                f"is tied to {known.name!r} now, and was not before",
                "tie parameters before create_schedule",
            )


def _changed(
    slot: Slot, parts: Sequence[Slot], pack: Callable[[list[Tensor]], Tensor | None] | None
) -> Iterator[Change]:
    mine, theirs = slot.tensor, [part.tensor for part in parts]
    kind, *kinds = (
        "parameter" if isinstance(t, nn.Parameter) else "buffer" for t in (mine, *theirs)
    )
    if kind not in kinds:
        yield Change(slot.name, f"is a {kind} and was a {kinds[0]}", "keep its kind")
        return
    dtypes = sorted({str(tensor.dtype) for tensor in theirs})
    if str(mine.dtype) not in dtypes:
        said = f"has dtype {mine.dtype} and had {', '.join(dtypes)}"
        yield Change(slot.name, said, "convert the model before create_schedule or after the block")
        return
    needs_gradient = any(tensor.requires_grad for tensor in theirs)
    if mine.requires_grad != needs_gradient:
        yield Change(
            slot.name,
            "is frozen now" if needs_gradient else "needs a gradient now, and was frozen",
            f"set requires_grad_({needs_gradient}) on it, or freeze and unfreeze before "
            "create_schedule or after the verified block",
        )
    is_saved = _persistent(parts[0])
    if kind == "buffer" and _persistent(slot) != is_saved:
        yield Change(
            slot.name,
            f"is {'not ' if is_saved else ''}part of the state_dict now",
            f"register_buffer(..., persistent={is_saved})",
        )
    was_whole = all(part.spec is None for part in parts)
    # No values on meta. A packed tensor is made from full tensors, and a copy of a sharded model
    # holds slices only: its values are left to the runs.
    if any(tensor.is_meta for tensor in (mine, *theirs)) or not (pack is None or was_whole):
        return
    with torch.no_grad():
        values = [tensor.detach() for tensor in theirs]
        wanted = values[0] if pack is None else pack(values)
        if wanted is None:
            wanted = values[0]
        # Sharded within this block; slices from an earlier block are compared as they are.
        if slot.spec is not None and was_whole and wanted.shape == slot.full_shape:
            wanted = slot.spec.slice(wanted)
    if mine.shape != wanted.shape:
        said = f"has shape {tuple(mine.shape)} and had {tuple(wanted.shape)}"
        yield Change(slot.name, said, "keep the sizes of the replaced module")
    elif not _equal(mine.detach(), wanted.to(mine.device)):
        yield Change(
            slot.name,
            "has different values than on entry",
            "a schedule must not change weights: create a new module under "
            "slapo.init_empty_weights(), load the old one's state_dict into it, or give it "
            "weight_sources()",
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    # The second form is for NaN only, which `torch.equal` takes for different.
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _persistent(slot: Slot) -> bool:
    return slot.leaf not in slot.owner._non_persistent_buffers_set


def check_replicas(model: nn.Module, group: torch.distributed.ProcessGroup | None) -> None:
    """Raise on every rank if ranks hold different values of the original."""
    if group is None or not has_peers(group):
        return
    mine = {
        slot.name: int(checksum(slot.tensor))
        for slot in slots(model)
        if slot.spec is None and not slot.tensor.is_meta
    }
    ranks = torch.distributed.get_process_group_ranks(group)
    all_sums = gathered(mine, group)
    first = all_sums[0]
    for rank, sums in zip(ranks, all_sums, strict=True):
        wrong = next((name for name in first if sums.get(name, first[name]) != first[name]), None)
        if wrong is not None:
            raise SlapoError(
                f"Verify: {wrong!r} of the original has different values on rank {rank} and rank "
                f"{ranks[0]}; ranks of a tensor-parallel group must start from one model: call "
                "slapo.set_random_seed(seed) before you create the model, load one checkpoint on "
                "all of them, or broadcast the values of one"
            )
