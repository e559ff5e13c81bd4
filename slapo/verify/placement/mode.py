"""A dispatch mode that follows placements through every operation."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo.random import get_rng_tracker
from slapo.sharding.groups import group_rank, group_size, share_of
from slapo.sharding.steps import PAD, PART, SHARE, SUM_SHARED, Step

# Imports register rules, including those of products.
from slapo.verify.placement import einsum_rules as einsum_rules
from slapo.verify.placement import row_order
from slapo.verify.placement.call import (
    RULES,
    Call,
    Rule,
    by_rule,
    memory_of,
    name_of,
    run,
    tensors_in,
)
from slapo.verify.placement.place import (
    MASKED,
    OWN,
    WHOLE,
    Fault,
    NoRule,
    Origin,
    Place,
    PlacementViolation,
    Stop,
    of_spec,
    own_draws,
    place_of,
    put_place,
    share_of_whole,
    sliced,
)
from slapo.verify.placement.pointwise import (
    DRAWS,
    is_constant,
    is_pointwise,
    of_wholes,
    others_whole,
    pointwise,
)
from slapo.verify.placement.raw_collectives import group_in, raw_collective
from slapo.verify.placement.reduction_rules import ATTENTION, attention
from slapo.verify.placement.replicated_shards import followed, is_shared
from slapo.verify.placement.sizes import ANY, OperationLog, Shape
from slapo.verify.placement.view_rules import VIEWS, through_memory

_READ = "Python reads a value that differs between ranks"


class PlaceMode(OperationLog):
    """Assign a placement to every tensor, and stop at the first invalid operation."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, alone: OperationLog
    ) -> None:
        super().__init__(model)
        self.group = group
        self.rank, self.ranks = group_rank(group), group_size(group)
        #: number of operations so far, and the placements that the last one returned
        self.calls = 0
        self.returned: list[Place] = []
        #: module -> shapes of its views in one process, in order
        self._views: defaultdict[str, deque[Shape]] = defaultdict(deque)
        for each in alone.operations:
            self._views[each.path] += (part[2] for part in each.parts if part[0] in VIEWS)
        #: memory -> its tensors that are known to be constant
        self._constants: dict[int, list[weakref.ref[Tensor]]] = {}
        #: autograd's sequence number of a view -> placement of its input
        self._places_of_views: dict[int, Place] = {}

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation, and set the placements of its results."""
        self.calls += 1
        tensors = tensors_in((args, kwargs))
        places = [place_of(tensor) for tensor in tensors]
        name = name_of(func)
        call = Call(func, name, args, kwargs, tensors, [], places, self.rank, self.ranks)
        if name in DRAWS or (name.startswith(ATTENTION) and "backward" not in name):
            call.draws_own = self._draws_own(call)
        try:
            out = run(func, args, kwargs)
        except (RuntimeError, IndexError) as error:
            stop = self.stop(name, tensors, places, PlacementViolation(str(error)))
            stop.fits = False
            raise stop from error
        call.outs = tensors_in(out)
        # Rules of views choose among several dimensions, and need both facts before they run.
        if name in VIEWS or name.startswith("slice"):
            self._compare_view(call)
        self._settle(call)
        pairs = zip(tensors, places, strict=True)
        on_one = any(place.is_slice and tensor.shape[place.dim] == 1 for tensor, place in pairs)
        self.note(func, args, kwargs, out, self._whole_shape, on_one)
        return out

    def read(self, name: str, tensor: Tensor) -> None:
        """Raise if Python reads the values of a slice or a partial sum."""
        place = place_of(tensor)
        if not self.quiet and not place.is_whole:
            raise self.stop(name, [tensor], [place], PlacementViolation(_READ))
        super().read(name, tensor)

    # --- placements --------------------------------------------------------------------------
    def _settle(self, call: Call) -> None:
        try:
            if call.name == "_local_scalar_dense" and not call.places[0].is_whole:
                raise PlacementViolation(_READ)
            found = _places_of(call)
            if any(out is tensor for out in call.outs for tensor in call.tensors):
                self._check_in_place(call, found)
        except PlacementViolation as misfit:
            raise self.stop(call.name, call.tensors, call.places, misfit) from None
        self.returned = [self.with_origin(call, place) for place in found]
        for out, place in zip(call.outs, self.returned, strict=False):
            if any(out is tensor for tensor in call.tensors):
                self._forget_constants(out)
            put_place(out, place)
            if place.uniform or place.is_zero:
                self._constants.setdefault(memory_of(out), []).append(weakref.ref(out))

    def _forget_constants(self, written: Tensor) -> None:
        """Drop the constant mark of tensors in the memory of a written tensor."""
        for tensor in self._constants_at(memory_of(written)):
            put_place(tensor, replace(place_of(tensor), uniform=frozenset(), is_zero=False))
        self._constants.pop(memory_of(written), None)

    def with_origin(self, call: Call, place: Place) -> Place:
        """Add the origin of a placement; a replicated tensor keeps its latest origin."""
        if place.origin is not None or place.kind == MASKED:
            return place
        # A report names the operation that made a partial sum, not the many that passed it on.
        origins = [p.origin for p in call.places if p.kind == place.kind and p.origin is not None]
        if origins:
            return replace(place, origin=max(origins, key=lambda origin: origin.number))
        if place.is_whole:
            return place
        origin, owner = self._origin_here(call.name), self._owner(call)
        return replace(place, origin=origin if owner is None else replace(origin, path=owner))

    def _origin_here(self, operation: str) -> Origin:
        path, in_backward = self.paths.now()
        return Origin(operation, path, in_backward, self.calls)

    def _owner(self, call: Call) -> str | None:
        """Module of a parameter that the graph of another module uses, or None."""
        owners = [p.origin.path for p in call.places if p.origin and p.origin.operation == "shard"]
        return owners[-1] if owners and self.paths.in_graph() else None

    def _check_in_place(self, call: Call, found: list[Place]) -> None:
        """Raise for an in-place write that would invalidate the placements of untracked views."""
        for out, place in zip(call.outs, found, strict=False):
            at = next((i for i, t in enumerate(call.tensors) if t is out), None)
            if at is None or call.places[at].same(place):
                continue
            before = call.places[at]
            others = [t for t in self._constants_at(memory_of(out)) if t is not out]
            # A view that is not known as constant keeps the placement that it was given, which the
            # write would make wrong: the storage has more users then than there are tensors to
            # correct.
            if not _may_become(before, place) or _users(out) > len(others) + 1:
                raise PlacementViolation(
                    f"it writes a tensor that is {place} into one that is {before}; create a new "
                    "tensor instead"
                )
            for other in others:
                self._write_through(out, place, other)

    def _write_through(self, written: Tensor, place: Place, other: Tensor) -> None:
        """Give a constant tensor the placement of a write through one of its views."""
        lies = through_memory(place, written, other)
        if lies is None or not _may_become(place_of(other), lies):
            raise PlacementViolation(
                f"it writes a tensor that is {place} into a part of one of shape "
                f"{tuple(other.shape)} that is {place_of(other)}; create a new tensor instead"
            )
        put_place(other, lies)

    def _constants_at(self, memory: int) -> list[Tensor]:
        found = (ref() for ref in self._constants.get(memory, []))
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())

    def stop(
        self,
        operation: str,
        tensors: Iterable[Tensor],
        places: Iterable[Place],
        wrong: PlacementViolation,
        step: Step | None = None,
    ) -> Stop:
        """Create the exception that ends the run."""
        pairs = zip(tensors, places, strict=True)
        return Stop(wrong, operation, self.paths.now(), pairs, step)

    # --- steps -------------------------------------------------------------------------------
    def carry_out(
        self,
        step: Step,
        function: Callable[..., Tensor],
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        **arguments: Any,
    ) -> Tensor:
        """Check a tensor-parallel step against its input, and run it without communication."""
        if not self.is_watching():
            return function(tensor, group, **arguments)
        place = place_of(tensor)
        # Steps for masked tokens and for 1/n of a tensor have no group; a shared slice has a group
        # of its own.
        other = step.gives == MASKED or step in (SHARE, SUM_SHARED)
        wrong = None if other else self._other_ranks(group)
        why = "" if wrong else self._wrong_for(step, place, tensor, arguments)
        wrong = PlacementViolation(why) if why else wrong
        if wrong is not None:
            raise self.stop(step.name, [tensor], [place], wrong, step)
        given = self._given_by(step, tensor, arguments)
        given = row_order.given_by(step, place, given)
        with self.unseen():
            # In real processes the other ranks run the check too, but stop at errors of their own:
            # a collective could wait for them forever.
            if step.communicates:
                result = self._alone(step, tensor, arguments)
            else:
                result = function(tensor, group, **arguments)
        self.calls += 1
        put_place(result, replace(given, origin=self._origin_here(step.name)))
        return result

    def _other_ranks(self, group: dist.ProcessGroup | None) -> PlacementViolation | None:
        if self.ranks == 1:
            return None
        theirs, ours = map(dist.get_process_group_ranks, (group, self.group))
        if theirs == ours:
            return None
        why = f"it runs over ranks {theirs}, but the group of the schedule is {ours}"
        return PlacementViolation(why, Fault.GROUP)

    def _wrong_for(
        self, step: Step, place: Place, tensor: Tensor, arguments: dict[str, Any]
    ) -> str:
        if step == PAD:
            part = of_spec(arguments["spec"])
            # If several ranks hold a part, each computes a summand of its gradient.
            part = replace(part, is_part=part.copies > 1)
            fits = place.is_slice and place.dim == part.dim and place.is_cut_as(part)
            return "" if fits else f"the gradient of {part} is {place}"
        axis, total = arguments.get(step.takes_along), arguments.get("total")
        if step == SUM_SHARED:
            return (
                ""
                if place.is_part
                else f"{step.name} takes a part of a tensor that ranks share, not {place}"
            )
        if place.is_slice and place.copies > 1:
            return f"{step.name} of a slice that several ranks hold: this is {place}"
        if place.order and step not in row_order.STEPS:
            return f"{step.name} of a tensor that is {place}"
        if place.kind != step.takes and not (step.takes == "partial" and place.is_zero):
            wanted = {"partial": "a partial sum", "shard": "slices", "replicate": "a whole tensor"}
            return f"{step.name} takes {wanted[step.takes]}, and this is {place}"
        if axis is not None and place.dim != axis % tensor.ndim:
            return f"{step.name} along axis {axis} of a tensor that is {place}"
        if place.is_slice and place.blocks and not row_order.may_shuffle(step, place):
            return f"{step.name} would concatenate the ranks' blocks: this is {place}"
        if axis is not None and place.is_slice:
            size = place.whole_size(tensor.shape[axis], self.ranks)
            if total not in (None, size) or (total is None and place.share is not None):
                return f"its slices are uneven, {size} in all, but total={total}; pass total={size}"
        return ""

    def _given_by(self, step: Step, tensor: Tensor, arguments: dict[str, Any]) -> Place:
        if step == PART:
            return of_spec(arguments["spec"])
        if step.gives == "shard":
            axis = arguments[step.gives_along]
            size = tensor.shape[axis]
            own = share_of(size, self.rank, self.ranks)[1]
            return sliced(axis % tensor.ndim, share=share_of_whole(own, size, self.ranks))
        if step.gives == MASKED:
            start, count = arguments["start"], arguments["count"]
            share = share_of_whole(count, arguments["total"], self.ranks)
            return Place(MASKED, rows=(start, count), share=share)
        if step == SUM_SHARED:
            return replace(place_of(tensor), is_part=False)
        return WHOLE if step.gives == "replicate" else Place(step.gives)

    def _alone(self, step: Step, tensor: Tensor, arguments: dict[str, Any]) -> Tensor:
        """A result of the right shape with arbitrary values, without communication."""
        with torch.no_grad():
            result = tensor.clone(memory_format=torch.contiguous_format)
            if step.gives_along:
                axis = arguments[step.gives_along]
                own = share_of(result.shape[axis], self.rank, self.ranks)
                result = result.narrow(axis, *own).contiguous()
            if step.takes_along:
                axis = arguments[step.takes_along]
                total = arguments.get("total") or result.shape[axis] * self.ranks
                times = -(-total // result.shape[axis])
                result = torch.cat([result] * times, axis).narrow(axis, 0, total).contiguous()
            return result

    def collective(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Handle a collective that the model, or a user's hook, calls directly."""
        tensors = tensors_in((args, kwargs))
        places = [place_of(tensor) for tensor in tensors]
        group = group_in((*args, *kwargs.values()))
        try:
            wrong = None if group is None else self._other_ranks(group)
            if wrong is not None:
                raise wrong
            with self.unseen():
                return raw_collective(func, args, kwargs, tensors, places)
        except PlacementViolation as misfit:
            raise self.stop(func.overloadpacket.__name__, tensors, places, misfit) from None

    # --- random numbers and sizes ----------------------------------------------------------------
    def _draws_own(self, call: Call) -> bool:
        """Return True if the operation draws this rank's own values for a use not yet known."""
        name, places = call.name, call.places
        if name.startswith(ATTENTION) and not call.get("dropout_p"):
            return False
        if name in ("bernoulli", "dropout", "native_dropout") and call.get("p") == 0:
            return False
        # Values for slices must come from this rank's own state, or all ranks drop the same
        # elements; values for replicated tensors from the common one, or the ranks diverge.
        is_slice = any(place.is_slice for place in places)
        is_forked = get_rng_tracker().is_forked
        blank = next((p.blank_of for p in places if p.blank_of is not None), None)
        if is_slice == is_forked and blank is None:
            return False
        pairs = zip(call.tensors, places, strict=True)
        # Drawn by shape alone, as by `torch.rand(n)`: right if it meets slices, which the
        # operations that use it decide.
        if is_forked and all(p.is_zero or is_constant(t, p) for t, p in pairs) and blank is None:
            return True
        if blank is not None:
            why, fault = "random numbers for a partial sum", Fault.DRAWS_FOR_PARTIAL
            wrong = PlacementViolation(why, fault)
        elif is_slice:
            why = "random numbers for a slice are drawn from the state that all ranks share"
            wrong = PlacementViolation(why, Fault.SAME_DRAWS)
        else:
            wrong = own_draws()
        raise self.stop(name, call.tensors, places, wrong)

    def _compare_view(self, call: Call) -> None:
        """Set a view's one-process shape, or the placement of its input in the forward pass."""
        path, in_backward = self.paths.now()
        if in_backward:
            call.of_gradient_of = self._places_of_views.get(self.paths.number())
            return
        # A node has its number before it runs; a view without a node follows the last one.
        self._places_of_views.setdefault(self.paths.number(), call.places[0])
        if call.name in VIEWS:
            call.shape_in_one_process = self._find_in_one_process(call, path)

    def _find_in_one_process(self, call: Call, path: str) -> Shape | None:
        own, shapes = tuple(call.outs[0].shape), self._views[path]
        # Some views may be missing here, such as the repetition of a head if each rank has its own.
        for _ in range(len(shapes)):
            shapes.rotate(-1)  # rotated, because a module may run again with the same views
            pairs = [*zip(shapes[-1], own, strict=False)]
            is_longer = [whole > size for whole, size in pairs if whole != size]
            if len(shapes[-1]) == len(own) and is_longer in ([], [True]):
                return shapes[-1]
        return None

    def _whole_shape(self, tensor: Tensor) -> Shape:
        place = place_of(tensor)
        # A head that several ranks hold is repeated on each rank, for that rank's queries only.
        is_one = place.copies > 1 and {*place.blocks_in(tensor.shape[place.dim])} == {1}
        if place.kind == OWN or is_one:
            return (ANY,) * tensor.ndim
        if place.is_slice:
            sizes = list(tensor.shape)
            sizes[place.dim] = place.whole_size(sizes[place.dim], self.ranks)
            return tuple(sizes)
        constant = {*place.uniform, *(dim for dim, _ in place.runs)}
        constant |= {dim for dim, size in enumerate(tensor.shape) if size == 1}
        return tuple(ANY if d in constant else n for d, n in enumerate(tensor.shape))


def _users(tensor: Tensor) -> int:
    """Number of tensors with this memory, without the storage object created here."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def _may_become(before: Place, place: Place) -> bool:
    """Return True if a constant may be partly overwritten by a tensor of this placement."""
    return before.is_zero or (place.is_slice and place.dim in before.uniform)


def _places_of(call: Call) -> list[Place]:
    """Placements of the results; rules apply unless all inputs are replicated."""
    if row_order.is_shuffled(call.places):
        there = _places_of(replace(call, places=row_order.in_order(call.places)))
        return row_order.followed(call, _rule(call), there)
    if call.draws_own:
        return [Place(OWN)] * len(call.outs)
    if all(place.is_whole for place in call.places):
        return of_wholes(call)
    if _is_linear(call):
        return [call.places[0]] * len(call.outs)
    if is_shared(call):
        return followed(call, _rule(call))
    return by_rule(_rule(call), call)


def _is_linear(call: Call) -> bool:
    """Return True for the derivative of a partial gradient with otherwise replicated inputs."""
    is_derivative = call.name.endswith(("_backward", "_backward_data"))
    return is_derivative and call.places[0].is_partial and others_whole(call.places)


def _rule(call: Call) -> Rule:
    if call.name in RULES:
        return RULES[call.name]
    if call.name.startswith(ATTENTION):
        return attention
    if is_pointwise(call):
        return pointwise
    raise NoRule(
        f"no rule covers {call.func} for a tensor that is not replicated; register one with "
        "slapo.register_place_rule"
    )
