"""Forward pass in one process: the axes of every tensor, and its path through modules."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from slapo.derive.axes import Term, carve, cut, factors, fresh, keep_whole, size_of, unify
from slapo.derive.rules import MAKERS, AxisCall, Dims, apply_rule
from slapo.derive.sizes import Counted, Formula, Key, SizeUse, counted_attributes, is_of_torch
from slapo.graph.trace.leaves import attributes_kept, is_torch_leaf
from slapo.history import contains
from slapo.random import states_kept
from slapo.sharding.sync_hooks import SIZES
from slapo.utils.outputs import tensors_in as tensors_of_output
from slapo.verify.placement.call import memory_of, name_of, run, tensors_in
from slapo.verify.placement.fake_parameters import FakeParameters, standing_in
from slapo.verify.placement.paths import calls_followed
from slapo.verify.placement.run import eager
from slapo.weights.slots import slots
from slapo.wrapper import in_mode


@dataclass
class Value:
    """A tensor, or its view within a module, from entry to exit."""

    dims: Dims
    needs_grad: bool = False
    is_parameter: bool = False
    #: the operation in no_grad mode that made it from values that need a gradient
    unrecorded: Node | None = None


@dataclass(eq=False)
class ModuleCall:
    """One call of a module."""

    path: str
    module: nn.Module
    #: id of a tensor that is an argument -> its name
    arguments: dict[int, str] = field(default_factory=dict)
    #: true without children, and for torch's own layers, whose parts are no nodes of a schedule
    is_leaf: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_leaf = next(self.module.children(), None) is None or is_torch_leaf(self.module)


@dataclass
class Node:
    """An operation, or a tensor that enters or leaves a module."""

    #: ``"operation"``, ``"entry"`` or ``"exit"``
    kind: str
    #: operation: its name; entry: the argument, if the tensor itself is one; exit: ``"only"`` if
    #: the module returns nothing else
    name: str
    inputs: list[int]
    outputs: list[int]
    call: ModuleCall
    contracted: list[Term] = field(default_factory=list)


@dataclass
class Trace:
    """A forward pass: values by index, and nodes in execution order."""

    model: nn.Module
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    #: path of a parameter or buffer -> index of its value; tied ones share an index
    parameters: dict[str, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    #: integers that were passed as sizes, and the values of all counted attributes
    uses: list[SizeUse] = field(default_factory=list)
    attributes: dict[Key, int] = field(default_factory=dict)
    #: dimensions of arguments whose sizes a module read
    read: dict[Key, Term] = field(default_factory=dict)


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    heads: dict[str, int],
    gathering: frozenset[str],
) -> Trace:
    """Run a model forward on stand-ins for its weights, and follow its axes.

    `heads` maps a layer's path to the size of its last dimension, which is gathered after it.
    `gathering` has paths of modules that run on full tensors, whatever is sharded around them.
    """
    found, stand_ins = Trace(model), FakeParameters(model)
    mode = _Mode(found, heads, gathering)
    with ExitStack() as stack:
        if not model.training:
            stack.enter_context(in_mode(model, True))
        contexts: tuple[Any, ...] = (
            states_kept(0),
            attributes_kept(model),
            eager(),
            torch.enable_grad(),
            standing_in(model, stand_ins, None, whole=True),
        )
        for context in contexts:
            stack.enter_context(context)
        mode.add_parameters()
        found.attributes = stack.enter_context(counted_attributes(model))
        args, kwargs = tree_map(
            lambda leaf: stand_ins.given(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        mode.add_inputs((args, kwargs))
        contexts = (stand_ins.mode(), calls_followed(mode.follow), _Sizes(mode), mode)
        for context in contexts:
            stack.enter_context(context)
        output = model(*args, **kwargs)
        for _, tensor in tensors_of_output(output):
            number = mode.number(tensor)
            found.outputs.add(number)
            for term in found.values[number].dims:
                keep_whole(term, "an output of the model")
    return found


#: Operations whose result has the size of a tensor but none of its values.
_NO_VIEWS = MAKERS | {"rand_like", "randn_like"}


class _Mode(TorchDispatchMode):
    """Dispatch mode that gives every tensor its axes."""

    def __init__(self, found: Trace, heads: dict[str, int], gathering: frozenset[str]) -> None:
        super().__init__()
        self.found, self.heads, self.gathering = found, heads, gathering
        self.names: dict[int, str] = {}
        for path, module in found.model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # these take no hooks
                self.names.setdefault(id(module), path)
        self.running = [ModuleCall("", found.model)]
        #: id of a tensor -> index of its value; tensors are kept alive, so ids are unique
        self.numbers: dict[int, int] = {}
        self._held: list[Tensor] = []
        #: memory -> values that were written in place
        self._writes: defaultdict[int, list[int]] = defaultdict(list)

    # --- values ---------------------------------------------------------------------------------
    def add(self, tensor: Tensor, value: Value) -> int:
        """Add the value of a tensor, and return its index."""
        self.found.values.append(value)
        if id(tensor) not in self.numbers:
            self._held.append(tensor)
        self.numbers[id(tensor)] = len(self.found.values) - 1
        return self.numbers[id(tensor)]

    def number(self, tensor: Tensor) -> int:
        """Return the index of a tensor's value; tensors made elsewhere stay replicated."""
        if id(tensor) not in self.numbers:
            path = self.running[-1].path
            why = f"a tensor made outside the pass, used in {path!r}"
            self.add(tensor, Value([fresh(size, why) for size in tensor.shape]))
        # Written through other views since: their gradients pass on through this tensor too.
        last = self.numbers[id(tensor)]
        for written in self._writes.get(memory_of(tensor), ()) if self._writes else ():
            if written > last:
                self._write_through(tensor, written)
        number = self.numbers[id(tensor)]
        if tensor.requires_grad:
            self._record(number)
        return number

    def _record(self, number: int) -> None:
        """Mark a value and its inputs as needing gradients: a Function made it in no_grad mode."""
        value = self.found.values[number]
        node, value.unrecorded = value.unrecorded, None
        if node is not None:
            value.needs_grad = True
            for before in node.inputs:
                self._record(before)

    def dims(self, tensor: Tensor) -> Dims:
        return self.found.values[self.number(tensor)].dims

    def add_parameters(self) -> None:
        """Add all parameters and buffers, with one axis per dimension."""
        for slot in slots(self.found.model):
            tensor = slot.tensor
            if id(tensor) not in self.numbers:
                dims = [fresh(size) for size in tensor.shape]
                for axis, term in enumerate(dims):
                    term[0].name = f"{slot.name}:{axis}"
                self.add(tensor, Value(dims, tensor.requires_grad, is_parameter=True))
            self.found.parameters[slot.name] = self.number(tensor)

    def add_inputs(self, inputs: Any) -> None:
        """Add the inputs of the model, which stay replicated."""
        for tensor in tensors_in(inputs):
            dims = [fresh(size, "an input of the model") for size in tensor.shape]
            is_float = tensor.is_floating_point()
            self.found.inputs.add(self.add(tensor, Value(dims, needs_grad=is_float)))

    # --- operations -----------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        out = run(func, args, kwargs)
        tensors, outs = tensors_in((args, kwargs)), tensors_in(out)
        if not outs:
            return out
        inputs = [self.number(tensor) for tensor in tensors]
        values = [self.found.values[number] for number in inputs]
        call = AxisCall(
            func,
            name_of(func),
            args,
            kwargs,
            tensors,
            outs,
            [value.dims for value in values],
            [value.is_parameter for value in values],
        )
        found = self._by_rule(call)
        comes_of_some = call.name != "detach" and any(
            value.needs_grad or value.unrecorded for value in values
        )
        needs_grad = torch.is_grad_enabled() and comes_of_some
        # `F.linear` multiplies by a transposed weight, and packed weights are cut by views.
        is_view = len(values) == 1 and values[0].is_parameter and call.name not in _NO_VIEWS
        node = Node("operation", call.name, inputs, [], self.running[-1], call.contracted)
        for tensor, dims in zip(outs, found, strict=True):
            # Written in place: what the tensor had before has the same axes.
            is_written = id(tensor) in self.numbers
            if is_written:
                for before, after in zip(self.dims(tensor), dims, strict=True):
                    unify(before, after, call.name)
            is_float = tensor.is_floating_point() or tensor.is_complex()
            value = Value(dims, needs_grad and is_float, is_view)
            if is_float and comes_of_some and not needs_grad:
                value.unrecorded = node
            node.outputs.append(self.add(tensor, value))
            if is_written:
                self._writes[memory_of(tensor)].append(node.outputs[-1])
        self.found.nodes.append(node)
        return out

    def _write_through(self, tensor: Tensor, written: int) -> None:
        """Give a tensor a new value after a write in place through another view of its memory."""
        numbers = [self.numbers[id(tensor)], written]
        before, after = (self.found.values[number] for number in numbers)
        node = Node("operation", "copy", numbers, [], self.running[-1])
        needs_grad = before.needs_grad or after.needs_grad
        unrecorded = node if before.unrecorded or after.unrecorded else None
        node.outputs.append(self.add(tensor, Value(before.dims, needs_grad, unrecorded=unrecorded)))
        self.found.nodes.append(node)

    def _by_rule(self, call: AxisCall) -> list[Dims]:
        try:
            found = apply_rule(call)
            shapes = [[size_of(term) for term in dims] for dims in found]
            if shapes == [[*out.shape] for out in call.outs]:
                return found
            why = f"the axis rule for {call.name} gives the shapes {shapes}"
        except (ValueError, IndexError, TypeError) as error:  # a case that the rule does not handle
            why = f"the axis rule for {call.name} fails: {error}"
        return call.unknown(why)

    # --- modules --------------------------------------------------------------------------------
    def follow(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run a module between its entry and exit nodes."""
        path, around = self.names.get(id(module)), self.running[-1]
        if not path or (around.is_leaf and contains(around.path, path)):
            return call(module, *args, **kwargs)
        here = ModuleCall(path, module)
        entered = self._enter(here, args, kwargs)
        self.running.append(here)
        try:
            out = call(module, *args, **kwargs)
        finally:
            self.running.pop()
            inside = {key: self.numbers[key] for key in entered}
            # Outside, the tensor is the value from before again, unless the module wrote to it.
            self.numbers |= {key: old for key, (old, new) in entered.items() if inside[key] == new}
        outs = tensors_in(out)
        for tensor in outs:
            number = inside.get(id(tensor), self.number(tensor))
            value = self.found.values[number]
            dims = list(value.dims)
            if path in self.gathering:  # the output is sharded as the input was
                outside = [self.found.values[old].dims for old, _ in entered.values()]
                like = (o for o in outside if [size_of(term) for term in o] == [*tensor.shape])
                dims = list(next(like, dims))
            if path in self.heads and self.heads[path] == tensor.shape[-1]:
                dims[-1] = fresh(tensor.shape[-1], "gathered logits")
            new = self.add(tensor, Value(dims, value.needs_grad))
            name = "only" if len(outs) == 1 else ""
            self.found.nodes.append(Node("exit", name, [number], [new], here))
        return out

    def _enter(self, here: ModuleCall, args: Any, kwargs: Any) -> dict[int, tuple[int, int]]:
        """Give tensors new indices within a module; return id -> (index outside, index inside)."""
        # A value of its own within each module: gradients may be summed at an entry, so they differ
        # inside and outside of it.
        entered: dict[int, tuple[int, int]] = {}
        for name, argument in _named(here.module, args, kwargs):
            for tensor in tensors_in(argument):
                if id(tensor) in entered:
                    continue
                old = self.number(tensor)
                value = self.found.values[old]
                dims = value.dims
                if here.path in self.gathering:
                    dims = [fresh(size, f"whole in {here.path!r}") for size in tensor.shape]
                new = self.add(tensor, Value(dims, value.needs_grad))
                entered[id(tensor)] = (old, new)
                shown = name if tensor is argument else ""
                here.arguments[id(tensor)] = shown
                self.found.nodes.append(Node("entry", shown, [old], [new], here))
        return entered


def _named(module: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """Return the arguments of a module by name, including extra keyword arguments."""
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return [*((str(number), each) for number, each in enumerate(args)), *kwargs.items()]
    starred = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    further = bound.pop(starred[0], {}) if starred else {}
    return [*bound.items(), *further.items()]


# --- sizes ----------------------------------------------------------------------------------------
_SHAPED = {"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full"}
_MADE = {"zeros", "ones", "empty", "full"}


class _Sizes(TorchFunctionMode):
    """Function mode that records counted integers passed as sizes, and passes plain ones."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SIZES:
            return self._read(func(*args, **kwargs), args, kwargs)
        leaves = tree_leaves((args, kwargs))
        leaves += [each for s in leaves if isinstance(s, slice) for each in (s.start, s.stop)]
        if not any(isinstance(leaf, Counted) for leaf in leaves):
            return func(*args, **kwargs)
        before = self.mode.dims(args[0]) if args and isinstance(args[0], Tensor) else []
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        name = getattr(func, "__name__", str(func))
        for number, term in self._sizes(name, args, kwargs, out, before):
            if isinstance(number, Counted) and number > 0 and size_of(term) == number:
                path = self.mode.running[-1].path
                use = SizeUse(number.formula, tuple(term), name, path)
                self.mode.found.uses.append(use)
        return out

    def _read(self, found: Any, args: Any, kwargs: Any) -> Any:
        """Return a size, or all sizes, that a module reads off an argument, with formulas."""
        tensor, here = args[0], self.mode.running[-1]
        argument = here.arguments.get(id(tensor))
        if not argument or not tensor.is_floating_point() or is_of_torch(here.module):
            return found
        if not isinstance(found, torch.Size):
            return self._counted(here, argument, tensor, _argument(args, kwargs, 1, "dim"))
        # Not the batch.
        inner = [self._counted(here, argument, tensor, axis) for axis in range(1, len(found))]
        return torch.Size([*found[:1], *inner])

    def _counted(self, here: ModuleCall, argument: str, tensor: Tensor, axis: int) -> int:
        axis %= tensor.dim()
        key, size = (here.path, f"{argument}.shape[{axis - tensor.dim()}]"), tensor.shape[axis]
        term = self.mode.found.read.setdefault(key, self.mode.dims(tensor)[axis])
        # The formula stands for one size; a later call may bring another.
        return Counted(size, Formula(key=key)) if size_of(term) == size else size

    def _sizes(
        self, name: str, args: Any, kwargs: Any, out: Any, before: Dims
    ) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of an argument and the dimension whose size it is."""
        dims = self.mode.dims
        if name in _SHAPED or name in _MADE:
            rest = args if name in _MADE else args[1:]
            given = kwargs.get("size", kwargs.get("shape", rest))
            if given and isinstance(given[0], (tuple, list)):
                given = given[0]
            yield from zip(given, dims(out), strict=False)
        elif name == "unflatten":
            at = _argument(args, kwargs, 1, "dim") % len(before)
            yield from zip(_argument(args, kwargs, 2, "sizes"), dims(out)[at:], strict=False)
        elif name in ("split", "split_with_sizes"):
            default = kwargs.get("split_sizes", kwargs.get("split_size_or_sections"))
            given = args[1] if len(args) > 1 else kwargs.get("split_size", default)
            at = _argument(args, kwargs, 2, "dim", 0)
            given = given if isinstance(given, (tuple, list)) else [given] * len(out)
            yield from ((number, dims(each)[at]) for number, each in zip(given, out, strict=True))
        elif name == "repeat_interleave":
            at = _argument(args, kwargs, 2, "dim", 0)
            new = factors(dims(out)[at])[len(factors(before[at])) :]
            yield _argument(args, kwargs, 1, "repeats"), new
        elif name == "repeat":
            given = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            for number, term in zip(given, dims(out), strict=True):
                yield number, factors(term)[:1]
        elif name == "__getitem__":
            yield from _edges(args[1], before)
        elif name.startswith("conv"):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            (out_term, *_) = dims(args[1] if len(args) > 1 else kwargs["weight"])
            parts = carve(out_term, [groups, size_of(out_term) // groups])
            yield groups, parts[0] if parts else ()


def _edges(index: Any, before: Dims) -> Iterator[tuple[Any, Any]]:
    """Yield the starts and stops of slices, each with the dimension that it ends."""
    items = index if isinstance(index, tuple) else (index,)
    at = 0
    for number, item in enumerate(items):
        if item is Ellipsis:
            at = len(before) - sum(each is not None for each in items[number + 1 :])
            continue
        if isinstance(item, slice) and item.step in (None, 1):
            start, stop, total = item.start or 0, item.stop, size_of(before[at])
            for edge in (start, stop):
                if isinstance(edge, Counted) and 0 < edge < total:
                    yield edge, (cut(before[at], [int(edge), total - int(edge)]) or [()])[0]
            if isinstance(start, Counted) and isinstance(stop, Counted) and start < stop < total:
                sizes = [int(start), int(stop - start), total - int(stop)]
                yield stop - start, (cut(before[at], sizes) or [(), ()])[1]
        at += item is not None


def _argument(args: Any, kwargs: Any, number: int, name: str, default: Any = None) -> Any:
    return args[number] if len(args) > number else kwargs.get(name, default)


def _plain(value: Any) -> Any:
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return int(value) if isinstance(value, Counted) else value
