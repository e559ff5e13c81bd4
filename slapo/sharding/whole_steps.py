"""Steps of optimizers that need full tensors, while each rank holds a part.

AdamW and SGD are elementwise, so a step on a slice is the slice of the step. Muon (Jordan et al.,
2024) orthogonalizes a full matrix, LAMB (You et al., 2020) takes the norm of a tensor, and
Adafactor (Shazeer and Stern, 2018) takes means of rows and columns. For these, each tensor has an
owner among the ranks that hold its parts. The owner gathers the parameter and its gradient, steps,
and scatters the result. Each rank thus does the work and holds the state of some tensors.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from slapo.agreement import communication_device, gathered, on_every_rank
from slapo.errors import SlapoError
from slapo.logger import get_logger
from slapo.sharding.groups import GroupHandle, handle_of
from slapo.sharding.slice_tensor import Box, boxes_of
from slapo.sharding.slicing import ShardSpec, is_sharded, local_part
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost

logger = get_logger("slapo")

#: Reach of a step: each element depends on itself, on the full tensor, or on other tensors too.
ELEMENT, TENSOR, MODEL = range(3)

#: Updates that differ by less differ by rounding; 8-bit optimizers round a lot.
_TOLERANCE = 0.05


# --- the reach of a step -------------------------------------------------------------------------
def reach_of_steps(optimizer: Optimizer) -> dict[Parameter, int]:
    """Determine the reach of each parameter's step by trial on small tensors."""
    found: dict[Parameter, int] = {}
    for stepper in steppers_of(optimizer):
        closure = inspect.signature(stepper.step).parameters.get("closure")
        for group in stepper.param_groups:
            try:
                # LBFGS and others that evaluate the model have dot products of all its gradients.
                is_required = closure is not None and closure.default is closure.empty
                reach = MODEL if is_required else _reach(stepper, group)
            except Exception as error:
                reach = ELEMENT
                logger.warning(
                    "%s could not be tested on small tensors (%s: %s); its steps are assumed to be "
                    "elementwise, as slices require",
                    type(stepper).__name__,
                    type(error).__name__,
                    error,
                )
            found.update(dict.fromkeys(group["params"], reach))
    return found


def steppers_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that do the steps: those in its attributes, or else the optimizer itself."""
    values = [v for value in vars(optimizer).values() for v in _items(value)]
    inner = dict.fromkeys(value for value in values if isinstance(value, Optimizer))
    return [each for one in inner for each in steppers_of(one)] or [optimizer]


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else (value,)


def _reach(optimizer: Optimizer, group: dict[str, Any]) -> int:
    # Steps on small random tensors with the options of the group. If another tensor with large
    # gradients changes a tensor's update, the step couples tensors. If a tensor's halves, stepped
    # separately, differ from the whole, the step needs full tensors. Slices may be along any axis;
    # the first and the last stand for all.
    reach = ELEMENT
    held = group["params"]
    device = next((p.device for p in held), torch.device("cpu"))
    for dims in sorted({p.dim() for p in held if p.dim()}):
        generator = torch.Generator().manual_seed(dims)
        shape = (2, *(32, 16, 3, 3, 3)[:dims])
        value, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
        # Halves of different scale, and a gradient that jumps, reveal norms and clipping.
        for tensor, factor in zip((value, *gradients), (1, 1, 10, 1), strict=True):
            tensor.mul_(factor)[:, : shape[1] // 2] *= 4
            tensor[..., : shape[-1] // 2] *= 3
        first, second = (
            (value[i].to(device), [g[i].to(device) for g in gradients]) for i in range(2)
        )
        (alone,) = _updates(optimizer, group, [first])
        # A step without changes would look elementwise.
        if not alone.any():
            raise SlapoError("step() changes nothing")
        other = (second[0], [g * 50 for g in second[1]])
        if _differ(_updates(optimizer, group, [first, other])[0], alone):
            return MODEL
        for axis in {0, dims - 1}:
            halves = zip(*(t.chunk(2, axis) for t in (first[0], *first[1])), strict=True)
            parts = [_updates(optimizer, group, [(v, g)])[0] for v, *g in halves]
            if _differ(torch.cat(parts, axis), alone):
                reach = TENSOR
    return reach


def _updates(
    optimizer: Optimizer,
    group: dict[str, Any],
    tensors: Sequence[tuple[Tensor, list[Tensor]]],
) -> list[Tensor]:
    """Changes of other tensors after steps of one group, one gradient of each for every step."""
    params = [Parameter(value.clone()) for value, _ in tensors]
    # Hide the gradients of parameters that the optimizer also holds elsewhere.
    hidden = [(param, param.grad) for param in group["params"]]
    for param, _ in hidden:
        param.grad = None
    group, before = {**group, "params": params}, dict(optimizer.__dict__)
    lr = group.get("lr")
    if lr is not None:  # zero at the start of a warm-up
        group["lr"] = torch.full_like(lr, 0.01) if isinstance(lr, Tensor) else 0.01
    # No copy of the optimizer: it may own memory that is freed with the first copy.
    step: Any = type(optimizer).step
    step = step.__wrapped__ if hasattr(step, "hooked") else step  # without hooks
    optimizer.param_groups, optimizer.state = [group], defaultdict(dict)
    try:
        for number in range(len(tensors[0][1])):
            for param, (_, gradients) in zip(params, tensors, strict=True):
                param.grad = gradients[number].clone()
            step(optimizer)
    finally:
        # A step may have set any attribute.
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
        for param, gradient in hidden:
            param.grad = gradient
    return [p.detach() - value for p, (value, _) in zip(params, tensors, strict=True)]


def _differ(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() > _TOLERANCE * wanted.norm())


# --- optimizers that users create for a model without an engine ----------------------------------
_WATCHED: weakref.WeakKeyDictionary[nn.Module, GroupHandle] = weakref.WeakKeyDictionary()
_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooks: list[Any] = []


def watch_optimizers(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Check the first step of every optimizer that holds slices of the model."""
    if slices_of(module):
        _WATCHED[module] = handle_of(group)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.update((optimizer, *steppers_of(optimizer)))
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for module, handle in list(_WATCHED.items()):
        slices = held.keys() & slices_of(module).keys()
        if slices:
            if handle.group is not None:
                others = {*dist.get_process_group_ranks(handle.group)} - {dist.get_rank()}
                refuse_shared_steps(optimizer, others)
            reach = reach_of_steps(optimizer)
            if MODEL in reach.values():
                raise error_of_coupled_steps(optimizer)
            # FSDP2's shards of a slice are also on ranks outside of the schedule's group.
            shares = any(is_sharded(held[key]) for key in slices)
            step_on_wholes(optimizer, module, reach, dist.group.WORLD if shares else handle.group)


def refuse_shared_steps(optimizer: Optimizer, others: Collection[int]) -> None:
    """Raise if the optimizer shares its steps with `others`, the ranks with other parameters."""
    peers = getattr(optimizer, "process_group", None)  # of ZeroRedundancyOptimizer
    foreign = set() if peers is None else {*dist.get_process_group_ranks(peers)} & {*others}
    if foreign:
        raise SlapoError(
            f"{type(optimizer).__name__} shares its steps with ranks {sorted(foreign)}, which hold "
            'other slices or stages; pass it process_group=mesh["dp"].get_group()'
        )


def error_of_coupled_steps(optimizer: Optimizer) -> SlapoError:
    """Error for an optimizer whose steps couple tensors of different ranks."""
    return on_every_rank(
        SlapoError(
            f"{type(optimizer).__name__} computes the step of a tensor from other tensors too, but "
            "each rank has only some of them; pass an optimizer that steps on each tensor "
            'separately, or keep tensors whole: tp=1, pp=1, data_parallel="fsdp"'
        )
    )


# --- full tensors for a step ---------------------------------------------------------------------
def step_on_wholes(
    optimizer: Optimizer,
    module: nn.Module,
    reach: Mapping[Parameter, int],
    group: dist.ProcessGroup | None,
) -> None:
    """Run steps of reach TENSOR on full tensors. A collective over the ranks of `group`.

    The parts of each tensor are distributed over these ranks.
    """
    specs = slices_of(module)
    held = [
        param
        for param, found in reach.items()
        if found == TENSOR and (id(param) in specs or is_sharded(param))
    ]
    if group is None or group.size() == 1 or not held:
        return
    steps = _WholeSteps(_split(held, [specs.get(id(p)) for p in held], group), group)
    optimizer.register_step_pre_hook(steps.gather)
    optimizer.register_step_post_hook(steps.scatter)
    logger.info(
        "%s needs whole tensors: for each step, each of %d tensors is gathered on one of "
        "%d ranks, which holds its state",
        type(optimizer).__name__,
        len(held),
        group.size(),
    )


def slices_of(module: nn.Module) -> dict[int, ShardSpec]:
    """Specs of a model's sliced parameters, by id."""
    return {
        id(part._parameters[name]): spec
        for part in map(innermost, module.modules())
        for name, spec in shards_of(part).items()
        if spec.world_size > 1 and part._parameters.get(name) is not None
    }


@dataclass
class _Split:
    """A parameter whose parts are on several ranks."""

    #: this rank's part
    part: Parameter
    whole: torch.Size
    #: for each rank, the places of its parts in the full tensor
    boxes: list[list[Box]]
    owner: int


def _split(
    params: Sequence[Parameter], specs: Sequence[ShardSpec | None], group: dist.ProcessGroup
) -> list[_Split]:
    """Exchange the places of all parts, and assign full tensors to owners, largest first."""
    own = [boxes_of(param, spec) for param, spec in zip(params, specs, strict=True)]
    every, loads, found = gathered(own, group), [0] * group.size(), {}
    wholes = [s.full_shape if s else p.shape for p, s in zip(params, specs, strict=True)]
    for i in sorted(range(len(params)), key=lambda i: -wholes[i].numel()):
        owner = loads.index(min(loads))
        loads[owner] += wholes[i].numel()
        found[i] = _Split(params[i], wholes[i], [boxes[i] for boxes in every], owner)
    return [found[i] for i in range(len(params))]


class _WholeSteps:
    """Hooks around an optimizer's step that swap in full tensors and swap them out again."""

    def __init__(self, tensors: list[_Split], group: dist.ProcessGroup) -> None:
        self._tensors, self._handle = tensors, handle_of(group)
        self._rank, self._ranks = group.rank(), range(group.size())
        # Parts of all dtypes travel in one buffer.
        self._dtype = functools.reduce(torch.promote_types, (t.part.dtype for t in tensors))
        #: during a step: tensors with a gradient, and this rank's full tensors by their parts
        self._stepped: list[_Split] = []
        self._wholes: dict[Parameter, Parameter] = {}
        #: the optimizer's groups, and their previous parameters
        self._groups: list[dict[str, Any]] = []
        self._params: list[list[Parameter]] = []

    @torch.no_grad()
    def gather(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pre-step hook: gather parameters and gradients on their owners."""
        # The first argument is the optimizer.
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise SlapoError(
                f"{type(optimizer).__name__}.step() got a closure, which cannot run while the step "
                "gathers the tensors of a sharded model; compute the gradients before step()"
            )
        # A tensor is stepped if any rank has a gradient for its part: with FSDP2 or unused experts,
        # ranks may differ, and all have to exchange the same tensors.
        present = torch.tensor([int(t.part.grad is not None) for t in self._tensors])
        group = self._handle.group
        present = present.to(communication_device(group))
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
        self._stepped = [t for t, n in zip(self._tensors, present.tolist(), strict=True) if n]
        for tensor in self._stepped:
            if tensor.owner == self._rank:
                local = local_part(tensor.part.detach())
                whole = self._wholes[tensor.part] = Parameter(local.new_empty(tensor.whole))
                whole.grad = torch.empty_like(whole)
        self._exchange(lambda part: part, lambda whole: whole, to_owners=True)
        self._exchange(_gradient, lambda whole: whole.grad, to_owners=True)
        # The optimizer steps on the full tensors of this rank, on none of the parts, and as usual
        # on parameters that are not split.
        parts = dict.fromkeys(tensor.part for tensor in self._stepped)
        self._groups = [g for stepper in steppers_of(optimizer) for g in stepper.param_groups]
        self._params = [one["params"] for one in self._groups]
        for one in self._groups:
            others = (self._wholes.get(p) if p in parts else p for p in one["params"])
            one["params"] = [param for param in others if param is not None]
        _move_state(optimizer, self._wholes)

    @torch.no_grad()
    def scatter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Post-step hook: return its part of the new values to every rank."""
        _move_state(optimizer, {whole: part for part, whole in self._wholes.items()})
        for one, params in zip(self._groups, self._params, strict=True):
            one["params"] = params
        self._exchange(lambda part: part, lambda whole: whole, to_owners=False)
        self._stepped, self._wholes, self._groups, self._params = [], {}, [], []

    def _exchange(
        self,
        local: Callable[[Parameter], Tensor],
        whole: Callable[[Parameter], Any],
        to_owners: bool,
    ) -> None:
        """Send parts to the owners, or back, in one collective."""
        # For each rank: this rank's parts of tensors it owns, and its parts of this rank's tensors.
        mine = [
            [
                box.of_local(held)
                for t in self._stepped
                if t.owner == rank
                for held in [local_part(local(t.part).detach())]
                for box in t.boxes[self._rank]
            ]
            for rank in self._ranks
        ]
        theirs = [
            [
                box.of_whole(whole(self._wholes[t.part]))
                for t in self._stepped
                if t.owner == self._rank
                for box in t.boxes[rank]
            ]
            for rank in self._ranks
        ]
        sent, received = (mine, theirs) if to_owners else (theirs, mine)
        device = self._tensors[0].part.device
        sizes = [[sum(t.numel() for t in part) for part in parts] for parts in (sent, received)]
        outgoing = torch.empty(sum(sizes[0]), dtype=self._dtype, device=device)
        incoming = torch.empty(sum(sizes[1]), dtype=self._dtype, device=device)
        for there, here in _places(outgoing, sent):
            there.copy_(here)
        dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0], group=self._handle.group)
        for there, here in _places(incoming, received):
            here.copy_(there)


def _places(buffer: Tensor, parts: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of each tensor's view of a flat buffer, and the tensor."""
    flat = list(itertools.chain.from_iterable(parts))
    pieces = buffer.split([tensor.numel() for tensor in flat]) if flat else ()
    for piece, tensor in zip(pieces, flat, strict=True):
        yield piece.view(tensor.shape), tensor


def _gradient(part: Parameter) -> Tensor:
    return torch.zeros_like(part) if part.grad is None else part.grad


def _move_state(optimizer: Optimizer, others: Mapping[Parameter, Parameter]) -> None:
    for stepper in steppers_of(optimizer):
        for old, new in others.items():
            if old in stepper.state:
                stepper.state[new] = stepper.state.pop(old)
