"""Materialization of parameters and buffers on ``meta``; each rank creates only its part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slapo.errors import SlapoError
from slapo.sharding.slicing import is_sharded
from slapo.sharding.state import sharding_of
from slapo.sharding.tags import apply_tags, new_parameter, tags_of
from slapo.weights.holdings import box_of_share
from slapo.weights.load import Loader
from slapo.weights.pieces import index_of
from slapo.weights.slots import Slot, exchanged, own_slots
from slapo.wrapper import innermost

#: Keeps a range of the new tensors on this rank; tensors with the given ids have no values yet.
Divide = Callable[[list[Tensor], Collection[int]], None]

#: Fills the tensors of one module in place.
InitFn = Callable[[nn.Module, str], Any]


def materialize(
    model: nn.Module,
    init_weights: bool | Callable[..., Any] = True,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    only: Collection[int] | None = None,
    loader: Loader | None = None,
    among: dist.ProcessGroup | None = None,
    seed: int | None = None,
    share: Divide | None = None,
) -> None:
    """Create tensors on ``meta`` one module at a time; tensors with values keep them.

    A tensor is created with its full shape, initialized, broadcast over the group and then sliced.
    Only one module is in memory in addition to this rank's part. Values in `loader` are read
    instead. Tensors sharded by FSDP2 keep only the local shard; `among` are then the ranks with
    shards. `seed` makes each module's random values independent of other modules, as ranks of a
    pipeline create different parts. `share` is called with each module's new tensors and keeps a
    range of them; the loader fills that range later for tensors with the given ids.
    """
    if (init_weights is False and loader is None) or not has_meta_tensors(model):
        return
    initialize = [] if init_weights is False else _resolve(model, init_weights)
    device = device or default_device(group)
    if loader is not None:
        loader.made.clear()  # left over from a failed build
    worker = _Materializer(
        model, initialize, group, device, only, loader, among or group, seed, share
    )
    for path, module in _post_order(model):
        worker.visit(path, module)
    worker.finish()


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of `model` has no value yet."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of new tensors: the accelerator, if the group communicates there."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # New tensors are broadcast over the group, and gloo's collectives run on the CPU.
    on_gpu = group is None or dist.get_backend(group) != "gloo"
    return found if found is not None and on_gpu else torch.device("cpu")


def _resolve(model: nn.Module, init_weights: bool | Callable[..., Any]) -> list[InitFn]:
    """Return the ways to initialize a module, the preferred one first."""
    if callable(init_weights):
        return [_with_path(init_weights)]
    if init_weights is not True:
        raise TypeError(
            f"init_weights must be True, False or a function of a module, got {init_weights!r}"
        )
    owners = {
        path: module
        for path, module in model.named_modules()
        if callable(getattr(module, "_init_weights", None))
    }
    # _init_weights() of Transformers skips classes that it does not know, which _reset then fills.
    return [lambda module, path: _by_owner(owners, module, path), _reset] if owners else [_reset]


def _by_owner(owners: dict[str, Any], module: nn.Module, path: str) -> None:
    """Initialize a module by the nearest enclosing model."""
    while path not in owners:
        if not path:
            return
        path = path.rpartition(".")[0]
    owners[path]._init_weights(module)


def _with_path(function: Callable[..., Any]) -> InitFn:
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    if len(required) >= 2:
        return function
    return lambda module, path: function(module)


def _reset(module: nn.Module, path: str) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _post_order(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[Any]:
    """Yield children before parents, in the order of ``Module.apply``; shared modules once."""
    seen = set() if seen is None else seen
    if id(model) in seen:
        return
    seen.add(id(model))
    for name, child in model._modules.items():
        if child is not None:
            yield from _post_order(child, f"{path}.{name}" if path else name, seen)
    yield path, innermost(model)


@dataclass
class _Materializer:
    """Replaces tensors on ``meta`` module by module, tied ones in all places at once."""

    model: nn.Module
    initialize: list[InitFn]
    group: dist.ProcessGroup | None
    device: torch.device
    only: Collection[int] | None
    loader: Loader | None
    among: dist.ProcessGroup | None
    seed: int | None
    share: Divide | None
    place: int = 0
    new: dict[int, Tensor] = field(default_factory=dict)
    keep: list[Tensor] = field(default_factory=list)  # ids stay valid while the tensors live
    #: ids of new tensors: initialized ones, and ones in the folder
    created: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    fresh: list[Tensor] = field(default_factory=list)
    #: id of a sharded tensor -> its full form, on meta
    wholes: dict[int, Tensor] = field(default_factory=dict)

    def visit(self, path: str, module: nn.Module) -> None:
        """Initialize the module's own tensors, then those that it initializes in descendants."""
        self.place += 1
        if self.seed is None:
            self._visit(path, module)
        else:
            self._visit_seeded(path, module, self.seed)
        if self.share is not None and self.fresh:
            self.wholes.update((id(new), _on_meta(new)) for new in self.fresh)
            self.share(self.fresh, self.loaded)
        self.fresh.clear()

    def _visit_seeded(self, path: str, module: nn.Module, seed: int) -> None:
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            # `place` counts all modules of the model in one order, so a module draws the same
            # values on whichever rank it is created.
            torch.manual_seed(seed + self.place)
            self._visit(path, module)

    def _visit(self, path: str, module: nn.Module) -> None:
        self._adopt_tied(module)
        self._read(module)
        own = {slot for slot in own_slots(module) if self._is_wanted(slot.tensor)}
        below = self._written_below(path, module)
        if (own or below) and self.initialize:
            self._initialize(path, module, own | below)

    def _read(self, module: nn.Module) -> None:
        if self.loader is None:
            return
        for slot in own_slots(module):
            if self._is_wanted(slot.tensor) and self.loader.has(slot):
                if self.share is not None and isinstance(slot.tensor, nn.Parameter):
                    # `share` keeps a range of it; only the bytes of this range are read, by
                    # Loader.fill().
                    new = self._put(slot, torch.empty_like(slot.tensor, device=self.device))
                else:
                    new = self._put(slot, self.loader.value_of(slot, self.device))
                    self.loader.made.add(id(new))
                self.loaded.add(id(new))

    def _is_wanted(self, tensor: Tensor) -> bool:
        return tensor.is_meta and (self.only is None or id(tensor) in self.only)

    def _adopt_tied(self, module: nn.Module) -> None:
        for slot in own_slots(module):
            if id(slot.tensor) in self.new:
                _keep(slot, self.new[id(slot.tensor)])

    def _written_below(self, path: str, module: nn.Module) -> set[Slot]:
        """Return the descendants' tensors that the module itself initializes (scaled residuals)."""
        below = [
            slot
            for m in map(innermost, module.modules())
            if m is not module
            for slot in own_slots(m)
            if id(slot.tensor) in self.created
        ]
        if not below:
            return set()
        # A dry run on meta tensors shows which descendants the module writes, at no cost in memory.
        # GPT-2 scales the projections of its residual branches in this way.
        written, places = _WriteProbe(), [*below, *own_slots(module), *self._read_below(module)]
        with exchanged(places, self._full, False), written, torch.no_grad(), _full_sizes([module]):
            storages = {_storage(slot.tensor): slot for slot in below}
            self.initialize[0](module, path)
        return {storages[s] for s in written.storages if s in storages}

    def _read_below(self, module: nn.Module) -> list[Slot]:
        """Return the loaded tensors of descendants, which no initialization may write."""
        inner = (m for m in map(innermost, module.modules()) if m is not module)
        return [slot for m in inner for slot in own_slots(m) if id(slot.tensor) in self.loaded]

    def _initialize(self, path: str, module: nn.Module, wanted: set[Slot]) -> None:
        # Everything that the initialization might write is exchanged, and only `wanted` is kept:
        # values of a folder and of earlier modules stay.
        places = {*own_slots(module), *wanted, *self._read_below(module)}
        owners = list(dict.fromkeys(slot.owner for slot in places))

        def make(slot: Slot) -> Tensor:
            return _like(slot.tensor, _blank_like(self._full(slot), self.device))

        with exchanged(places, make, False), torch.no_grad(), _full_sizes(owners):
            left = self._try_ways(path, module, wanted)
            values = {slot: slot.tensor for slot in wanted}
        if left:
            why = "the given init_weights does not set them; let it"
            if self.initialize[-1] is _reset:
                why = (
                    "neither its reset_parameters nor the model's _init_weights sets them; pass "
                    "init_weights=fn(module, path) to build"
                )
            raise SlapoError(
                f"{path!r} ({type(module).__name__}) cannot initialize "
                f"{sorted(slot.leaf for slot in left)}: {why}"
            )
        # Ranks exchange values one by one, so all must use the same order of tensors.
        order = {id(innermost(m)): number for number, m in enumerate(module.modules())}
        for slot in sorted(values, key=lambda slot: (order[id(slot.owner)], slot.leaf)):
            self._install(slot, values[slot])

    def _full(self, slot: Slot) -> Tensor:
        """Return a meta tensor of the shape before sharding."""
        here = self.wholes.get(id(slot.tensor), slot.tensor)
        shape = slot.full_shape if here is slot.tensor or slot.spec is not None else here.shape
        return _like(here, torch.empty(shape, dtype=here.dtype, device="meta"))

    def _try_ways(self, path: str, module: nn.Module, wanted: set[Slot]) -> set[Slot]:
        left = wanted
        for way in self.initialize:
            with _WriteProbe() as seen:
                way(module, path)
            left = {slot for slot in left if _is_blank(slot.tensor, seen.storages)}
            if not left:
                break
        return left

    def _install(self, slot: Slot, full: Tensor) -> None:
        value = full.detach()
        if self.among is not None and dist.get_world_size(self.among) > 1:
            # Ranks may have drawn different numbers before; all take the first rank's values.
            dist.broadcast(value, dist.get_global_rank(self.among, 0), group=self.among)
        local = slot.spec.slice(value) if slot.spec is not None else value
        if is_sharded(slot.tensor):
            # clone(): a view would keep the full tensor in memory.
            local = local[index_of(box_of_share(slot.tensor))].clone()
        self.created.add(id(self._put(slot, local)))

    def _put(self, slot: Slot, local: Tensor) -> Tensor:
        """Replace a meta tensor by this rank's part."""
        replaced = slot.tensor
        old = self.wholes.get(id(replaced), replaced)
        local = new = _like_share(old, local) if is_sharded(old) else local
        if isinstance(old, nn.Parameter):
            new = new_parameter(local, old)
            apply_tags(new, {}, self.group)
        else:
            new.__dict__.update(tags_of(old))
        self.new[id(replaced)] = new
        self.keep.append(replaced)
        self.fresh.append(new)
        _keep(slot, new)
        return new

    def finish(self) -> None:
        """Check that every tensor has values, unless nothing initializes them."""
        for _, module in _post_order(self.model):
            self._adopt_tied(module)
        left = [
            name
            for name, t in (*self.model.named_parameters(), *self.model.named_buffers())
            if self._is_wanted(t)
        ]
        if left and self.initialize:
            raise SlapoError(
                f"{left[:5]} are still on meta; their modules are not registered as children. "
                "Initialize them by hand and build with init_weights=False"
            )


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a meta copy with the same tags."""
    blank = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return new_parameter(blank, tensor)
    blank.__dict__.update(tags_of(tensor))
    return blank


def _like_share(old: Any, local: Tensor) -> Tensor:
    """Return a DTensor of this rank's values."""
    from torch.distributed.tensor import DTensor  # takes a second to import

    return DTensor.from_local(
        local,
        old.device_mesh,
        old.placements,
        # run_check would communicate over the mesh.
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )


# --- tensors of a module ---------------------------------------------------------------------
def _keep(slot: Slot, tensor: Tensor) -> None:
    """Store a tensor permanently; it carries the sharding marks from now on."""
    slot.put(tensor)
    state = sharding_of(slot.owner)
    if state is not None:
        state.attach(slot.owner, slot.leaf)


def _like(old: Tensor, new: Tensor) -> Tensor:
    """Return `new`, as a parameter with the same flags if `old` is one."""
    is_parameter = isinstance(old, nn.Parameter)
    return nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new


def _blank_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of values that no initialization leaves: NaN, or the smallest integer."""
    blank = torch.empty_like(tensor, device=device)
    if blank.is_floating_point() or blank.is_complex():
        return blank.fill_(float("nan"))
    return blank.fill_(_sentinel(blank.dtype))


def _sentinel(dtype: torch.dtype) -> int:
    return 1 if dtype is torch.bool else torch.iinfo(dtype).min


def _is_blank(tensor: Tensor, written: set[int]) -> bool:
    if tensor.is_meta:
        return True
    if tensor.dtype in (torch.bool, torch.uint8):
        # Every value of these dtypes is plausible, so only recorded writes count.
        return _storage(tensor) not in written
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    # All, not any: the smallest integer may be a valid element. Empty tensors count as set.
    return bool((tensor == _sentinel(tensor.dtype)).all()) and tensor.numel() > 0


@contextmanager
def _full_sizes(modules: list[nn.Module]) -> Iterator[None]:
    """Restore the module sizes from before sharding within the block, such as ``out_features``."""
    present = []
    for module in modules:
        state = sharding_of(module)
        for name, value in state.sizes.items() if state is not None else ():
            present.append((module, name, module.__dict__[name]))
            module.__dict__[name] = value
    try:
        yield
    finally:
        for module, name, value in present:
            module.__dict__[name] = value


class _WriteProbe(TorchDispatchMode):
    """Dispatch mode that records the written storages."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            # Schemas mark in-place and out= operands, as normal_() and copy_() of initializations
            # have.
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.storages.add(_storage(value))
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    # Views of a tensor count as the tensor. data_ptr() would not do, as it is 0 for all meta
    # tensors.
    return tensor.untyped_storage()._cdata
