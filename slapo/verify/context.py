"""The context manager."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slapo.agreement import (
    gathered,
    has_peers,
    is_broken_collective,
    is_on_every_rank,
    same_on_all_ranks,
)
from slapo.build import check_shards
from slapo.errors import SlapoError, VerificationError
from slapo.history import Record
from slapo.logger import get_logger
from slapo.primitives.base import find_primitive
from slapo.random import get_rng_tracker
from slapo.schedule import Schedule
from slapo.sharding.steps import carried_by
from slapo.utils.calls import as_call, refuse_batch
from slapo.verify.locate import Comparison, amount, contains, recorded, running_in, sizes_kept
from slapo.verify.origins import Origins
from slapo.verify.peers import Peers
from slapo.verify.setting import (
    SEED,
    Outcome,
    backward,
    copy_model,
    fresh_input,
    full_tensors,
    gathered_gradients,
    gradient_of,
    in_mode,
    random_states_kept,
)
from slapo.verify.tensors import (
    constants_in,
    difference,
    other_tensors,
    places,
    rtol_for,
    scale_of,
    tensors_in,
)
from slapo.weights.materialize import materialize
from slapo.wrapper import innermost

#: Gradients far below the largest are rounding of sums that cancel: they are compared on this
#: fraction of the largest one's scale.
_GRADIENT_FLOOR = 1e-2

logger = get_logger()


class Verify:
    """Check that the schedule inside a ``with`` block does not change what the model computes.

    On entry the module is copied. On exit both run on the same inputs, weights and random state,
    forward and backward; outputs, and parameter gradients gathered from all ranks, must agree.
    The model's weights, gradients, buffers, mode and random states are left as they were.

    Parameters
    ----------
    sch
        The schedule whose module is verified; any node.
    example_inputs
        A tensor, a tuple of positional arguments or a dict of keyword arguments. All ranks use
        those of rank 0.
    device
        Where to run; by default where the model is, for a model on ``meta`` where it would be
        built.
    eval_mode
        Run in eval mode, else in train mode. In train mode random masks must be the same on both
        sides, which they are not under tensor parallelism.
    enable
        False does nothing.
    loss_fn
        Output -> scalar to differentiate. By default the product of every output tensor with fixed
        random numbers.
    rtol
        Largest difference relative to the largest value of a tensor; by default that of its dtype
        (2e-5 for float32, 3e-2 for bfloat16).

    Raises
    ------
    VerificationError
        On every rank, naming the first module whose output differs, or the parameter whose
        gradient does, and the primitives applied there.

    Examples
    --------
    >>> import torch, slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    >>> with Verify(sch, torch.ones(2, 4)):
    ...     _ = sch["0"].decompose()
    >>> try:
    ...     with Verify(sch, torch.ones(2, 4)):
    ...         _ = sch["1"].replace(nn.ReLU())
    ... except slapo.VerificationError as error:
    ...     print(str(error)[:47])
    Verify: the output differs, first at '1' (ReLU)
    """

    def __init__(
        self,
        sch: Schedule,
        example_inputs: Any,
        device: torch.device | str | None = None,
        eval_mode: bool = True,
        enable: bool = True,
        loss_fn: Callable[[Any], Tensor] | None = None,
        rtol: float | None = None,
    ) -> None:
        if not isinstance(sch, Schedule):
            raise TypeError(
                f"Verify takes a schedule, got {type(sch).__name__}; pass what "
                "slapo.create_schedule(model) returned"
            )
        self.sch = sch
        self.args, self.kwargs = as_call(example_inputs)
        refuse_batch(innermost(sch.mod), self.args)
        self.device = torch.device(device) if device is not None else None
        self.eval_mode, self.enable = eval_mode, enable
        self.loss_fn, self.rtol = loss_fn, rtol

    # --- the block ---------------------------------------------------------------------------
    def __enter__(self) -> Verify:
        if self.enable:
            if self.sch.world_size > 1 and not has_peers(self.sch.group):
                raise SlapoError(
                    f"Verify compares numbers of {self.sch.world_size} ranks, but this group is a "
                    "fake one, whose other ranks do not exist; verify in real processes: torchrun "
                    "--nproc-per-node 2, over gloo where there is no GPU, or pass enable=False"
                )
            self.peers = Peers(self.sch.group)
            self.start = len(self.sch.history)
            self.reference = copy_model(self.sch)
            self.origins = Origins(self.sch, self.reference)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.enable and error is not None:
                self.peers.tell(error)
            elif self.enable:
                with self.peers.told():
                    self._check_primitives()
                    self._verify()
        finally:
            self.__dict__.pop("reference", None)
            self.__dict__.pop("origins", None)

    def _records(self) -> list[Record]:
        return self.sch.history[self.start :]

    def _check_primitives(self) -> None:
        for record in self._records():
            primitive = find_primitive(record.primitive)
            if primitive is not None and not primitive.is_verifiable():
                raise SlapoError(
                    f"Verify cannot run a model after {record}; apply it after the verified block"
                )

    # --- the comparison ----------------------------------------------------------------------
    def _verify(self) -> None:
        self.peers.meet("block")
        check_shards(self.sch)
        group, device = self.sch.group, self._pick_device()
        self._materialize_reference(device)
        self.reference.to(device)
        self._move_inputs(device)
        full = full_tensors(self.reference, group)
        values = self.origins.values(full, device)
        with ExitStack() as stack:
            stack.enter_context(random_states_kept(self.sch.rank))
            stack.enter_context(other_tensors(self.sch.mod, values, group))
            stack.enter_context(in_mode(self.sch.mod, not self.eval_mode))
            stack.enter_context(in_mode(self.reference, not self.eval_mode))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(carried_by(self.peers.carry_out))
            wanted = self._run_original()
            self.peers.meet("original")
            given = self._run_scheduled()
            self.peers.meet("forward")
            self._compare_outputs(given.output, wanted.output)
            backward(wanted.output, self.loss_fn)
            self._backward_scheduled(given)
            self.peers.meet("backward")
            self._compare_gradients(given.inputs, wanted.inputs)
            self._compare_buffers()

    def _materialize_reference(self, device: torch.device) -> None:
        """Values for a copy on meta, by the way that the whole model would initialise it."""
        own: Any = getattr(self.reference, "_init_weights", None)
        top: Any = getattr(self.sch.get_top_schedule().mod, "_init_weights", None)
        init = True if own is not None or top is None else top
        materialize(self.reference, init, self.sch.group, device)

    def _pick_device(self) -> torch.device:
        if self.device is not None:
            return self.device
        tensors = [*self.reference.parameters(), *self.reference.buffers()]
        real = [t.device for t in tensors if not t.is_meta]
        if real:
            return real[0]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        gloo = self.sch.group is not None and dist.get_backend(self.sch.group) == "gloo"
        return accelerator if accelerator is not None and not gloo else torch.device("cpu")

    def _move_inputs(self, device: torch.device) -> None:
        def move(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(device).clone()
            if self.sch.group is not None and self.sch.world_size > 1:
                dist.broadcast(moved, dist.get_global_rank(self.sch.group, 0), self.sch.group)
            return moved.requires_grad_(tensor.requires_grad)

        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        shapes = [(tuple(t.shape), t.dtype) for t in leaves if isinstance(t, Tensor)]
        # Of other sizes, the broadcast would end the process.
        same_on_all_ranks(
            "Verify: example_inputs",
            (shapes, str(spec)),
            self.sch.group,
            "pass inputs of one shape on all ranks; the values are those of rank 0",
        )
        self.args, self.kwargs = pytree.tree_map_only(Tensor, move, (self.args, self.kwargs))

    def _run(self, model: nn.Module) -> Outcome:
        """Run on the same inputs and random states each time."""
        tracker = get_rng_tracker()
        states = tracker.get_states()
        torch.manual_seed(SEED)
        inputs: list[Tensor] = []
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: fresh_input(tensor, inputs), (self.args, self.kwargs)
        )
        try:
            return Outcome(model(*args, **kwargs), inputs)
        finally:
            tracker.set_states(states)

    def _run_original(self) -> Outcome:
        try:
            return self._run(self.reference)
        except Exception as error:
            if is_broken_collective(error) or is_on_every_rank(error):
                raise
            names = list(inspect.signature(self.reference.forward).parameters)
            raise SlapoError(
                f"Verify: the original model fails on the example_inputs with "
                f"{type(error).__name__}: {error}; pass what its forward takes: {names}"
            ) from error

    def _run_scheduled(self) -> Outcome:
        with self._explained(""):
            return self._run(self.sch.mod)

    def _backward_scheduled(self, outcome: Outcome) -> None:
        with self._explained("the backward pass of "):
            backward(outcome.output, self.loss_fn)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Name the module in which the block fails, and what was applied there."""
        try:
            yield
        except Exception as error:
            if is_broken_collective(error) or is_on_every_rank(error):
                raise  # the fault is another rank's
            path = running_in(error, self.sch.mod)
            module = self.sch.mod.get_submodule(path or "")
            where = f" in {path!r} ({type(module).__name__})" if path else ""
            full = ".".join(filter(None, (self.sch.path, path)))
            raise VerificationError(
                f"Verify: {what}the scheduled model fails with {type(error).__name__}{where}: "
                f"{error}; {self._applied(path or '')}"
                f"{sizes_kept(module, full, self._records(), self.sch.world_size)}"
            ) from error

    def _of_all_ranks(self, value: Any) -> list[Any]:
        alone = self.sch.group is None or self.sch.world_size == 1
        return [value] if alone else gathered(value, self.sch.group)

    def _agree(self, condition: bool) -> bool:
        """Whether a condition holds on any rank."""
        return any(self._of_all_ranks(condition))

    def _largest(self, value: float) -> float:
        """The largest of the ranks' values: all of them tell the same."""
        return max(self._of_all_ranks(value))

    def _compare_outputs(self, given: Any, wanted: Any) -> None:
        left, right = dict(tensors_in(given)), dict(tensors_in(wanted))
        if not any(tensor.numel() for tensor in right.values()) and self.loss_fn is None:
            raise SlapoError(
                f"Verify: the output of the original, a {type(wanted).__name__}, holds no number "
                "that could be compared; pass example_inputs that are not empty, a loss_fn that "
                "makes one of the output, or verify a node below that returns tensors, in a tuple, "
                "a dict or a dataclass"
            )
        same_kind = type(given) is type(wanted) and left.keys() == right.keys()
        same_kind = same_kind and dict(constants_in(given)) == dict(constants_in(wanted))
        worst = 0.0
        for name in left.keys() & right.keys():
            limit = rtol_for(right[name], self.rtol) * scale_of(right[name])
            error = difference(left[name], right[name])
            worst = max(worst, error if error > limit else 0.0)
        if not self._agree(worst > 0.0 or not same_kind):
            return
        if not same_kind:
            raise VerificationError(
                f"Verify: the output is a {type(given).__name__} with {list(left)} and "
                f"{dict(constants_in(given))}, the original's a {type(wanted).__name__} with "
                f"{list(right)} and {dict(constants_in(wanted))}"
            )
        pairs = [(left[name], right[name]) for name in left]
        shapes = [amount(0.0, 0.0, *both) for both in pairs if both[0].shape != both[1].shape]
        raise VerificationError(self._explain_output(self._largest(worst), shapes))

    def _explain_output(self, worst: float, shapes: list[str]) -> str:
        found = self._runs(gradients=False).first_output()
        if found is None:
            how = shapes[0] if shapes else f" by {worst:.3g}"
            return f"Verify: the output differs{how}; {self._applied('')}"
        hint = (
            f" (the last partial sum before it is the output of {found.suspect!r})"
            if found.suspect
            else ""
        )
        return (
            f"Verify: the output differs, first at {found.path!r} "
            f"({type(found.module).__name__}){found.amount}{hint}; "
            f"{self._applied(found.path, found.suspect)}"
        )

    def _explain_gradient(self) -> str | None:
        found = self._runs(gradients=True).first_gradient()
        if found is None:
            return None
        user = f", which {found.suspect!r} sends back," if found.suspect else ""
        return (
            f"Verify: outputs agree, but the gradient of the output of {found.path!r} "
            f"({type(found.module).__name__}){user} differs{found.amount.removeprefix(',')}; "
            f"{self._applied(found.suspect or found.path)}"
        )

    def _runs(self, gradients: bool) -> Comparison:
        """Run both models again, and note what each module gives."""
        runs = []
        for model in (self.reference, self.sch.mod):
            with recorded(model) as run:
                outcome = self._run(model)
                if gradients:
                    backward(outcome.output, self.loss_fn)
            runs.append(run)
        return Comparison(runs[0], runs[1], self.sch.group, self.rtol, self._agree, self._largest)

    def _compare_gradients(self, inputs: list[Tensor], expected: list[Tensor]) -> None:
        wanted = gathered_gradients(self.reference, self.sch.group)
        given = self.origins.gradients()
        lost = sorted(name for name in wanted if name not in given)
        if lost:
            logger.warning(
                "Verify: gradients of %s are not compared: the modules that took their place do "
                "not say by weight_sources() where they went",
                lost,
            )
        for index, (mine, theirs) in enumerate(zip(inputs, expected, strict=True)):
            if theirs.grad is not None:
                name = f"<input {index}>"
                wanted[name] = theirs.grad
                given[name] = gradient_of(mine)
        floor = _GRADIENT_FLOOR * max((scale_of(g) for g in wanted.values()), default=0.0)
        failures = []
        for name, grad in wanted.items():
            found = given.get(name)
            if found is None:
                continue
            limit = rtol_for(grad, self.rtol) * max(scale_of(grad), floor)
            error = difference(found, grad)
            if error > limit:
                failures.append((name, error, limit))
        # Those of the first rank that has some, so that all ranks tell the same.
        failures = next(filter(None, self._of_all_ranks(failures)), [])
        if not failures:
            return
        explained = self._explain_gradient()
        if explained is not None:
            raise VerificationError(explained)
        name, error, limit = failures[-1]  # the last in the model is the first in the backward
        raise VerificationError(
            f"Verify: outputs agree, but the gradient of {name!r} differs by {error:.3g} where "
            f"{limit:.3g} is allowed{self._that_differ([n for n, *_ in failures])}; "
            f"{self._applied(name.rpartition('.')[0])}"
        )

    def _that_differ(self, names: list[str]) -> str:
        """All of them, and what whole parameters may lack."""
        shown = ", ".join(map(repr, names[:6])) + (" and others" if names[6:] else "")
        listed = f" (so do {len(names)} in all: {shown})" if names[1:] else ""
        whole = {p.name for p in places(self.sch.mod) if p.spec is None}
        if self.sch.world_size == 1 or not whole.intersection(names):
            return listed
        path, _, leaf = next(n for n in reversed(names) if n in whole).rpartition(".")
        return (
            f"{listed}; a whole parameter of which each rank sees a part only, of the tokens or "
            f'the heads, wants sch["{path}"].annotate("{leaf}", "partial_grad", True)'
        )

    def _compare_buffers(self) -> None:
        """Running statistics and the like after the run."""
        wanted = full_tensors(self.reference, self.sch.group)
        differing = []
        for place in places(self.sch.mod):
            if isinstance(place.tensor, nn.Parameter) or place.name not in wanted:
                continue
            mine = place.tensor
            mine = place.spec.gather(mine, self.sch.group) if place.spec is not None else mine
            limit = rtol_for(mine, self.rtol) * scale_of(wanted[place.name])
            error = difference(mine, wanted[place.name])
            if error > limit:
                differing.append((place.name, error, limit))
        differing = next(filter(None, self._of_all_ranks(differing)), [])
        if not differing:
            return
        name, error, limit = differing[0]
        raise VerificationError(
            f"Verify: outputs agree, but the buffer {name!r} differs by {error:.3g} after the run "
            f"where {limit:.3g} is allowed; {self._applied(name.rpartition('.')[0])}"
        )

    def _applied(self, *paths: str | None) -> str:
        """Records of the block at some modules and below them, or else above them."""
        prefix = f"{self.sch.path}." if self.sch.path else ""
        full = [(prefix + path).rstrip(".") for path in paths if path is not None]
        records = self._records()
        below = [r for r in records if any(contains(path, r.path) for path in full)]
        above = [r for r in records if any(contains(r.path, path) for path in full)]
        chosen = below or above or records
        if not chosen:
            return "no primitive was applied in the block"
        lines = "\n  ".join(str(r) for r in chosen[:8])
        return f"primitives applied there:\n  {lines}"
