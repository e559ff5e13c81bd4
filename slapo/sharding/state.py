"""Sharding state of a module, in one object that moves with the module.

Slices are marked by an attribute (``orig_shape``), tagged parameters by theirs, and hooks sum
gradients. Torch keeps neither: copied parameters lose attributes, unpickled ones lose hooks, and
``load_state_dict(assign=True)`` replaces tensors. The object below records the marks of every
tensor of its module and restores them in all of these cases.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slapo.errors import SlapoError
from slapo.hooks import SHARDING
from slapo.sharding.groups import GroupHandle, common_ranks, handle_of, neighbors
from slapo.sharding.layout import KnownSync, Layout, around
from slapo.sharding.slicing import ShardSpec
from slapo.sharding.tags import SHARERS, apply_tags, forget_hook
from slapo.wrapper import innermost


@dataclass
class Sharding:
    """Layout of one module's tensors over the ranks, and the changes made for it."""

    #: handle of the ranks
    group: GroupHandle
    #: tensor name -> its slice
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    #: tensor name -> the part that this rank computes with, of a tensor that it holds in full
    used: dict[str, ShardSpec] = field(default_factory=dict)
    #: attribute -> its value before sharding
    sizes: dict[str, Any] = field(default_factory=dict)
    #: layout of the bare module, before any sync
    layout: Layout = field(default_factory=Layout)
    #: syncs on the module, in order
    syncs: tuple[KnownSync, ...] = ()
    #: parameter name -> attributes that follow it
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: for a module that adds its bias after a reduction: see :mod:`slapo.sharding.partial`
    reducers: tuple[Any, ...] = ()
    bias_part: Any = None
    #: true if tokens of other ranks are masked
    masks_vocabulary: bool = False
    #: tensors with attributes: a copy of this object refers to the copied tensors here
    _carriers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore attributes and hooks on the tensors of a copied or unpickled module."""
        # An unpickled model may be the first sharded one of its process.
        refuse_replicas()
        self.__dict__.update(state)
        for name, tensor in self._carriers.items():
            forget_hook(tensor)
            self._dress(name, tensor)

    def snapshot(self) -> Sharding:
        """A copy over the same tensors, unaffected by later changes of this object."""
        new = object.__new__(type(self))  # copy.copy would tag the tensors again
        for name, value in vars(self).items():
            new.__dict__[name] = dict(value) if isinstance(value, dict) else value
        return new

    def tag(self, module: nn.Module, name: str, key: str, value: Any) -> None:
        """Attach an attribute to a parameter and to every tensor that replaces it."""
        self.tags[name] = {**self.tags.get(name, {}), key: value}  # snapshots share the old dict
        self.attach(module, name)

    def attach(self, module: nn.Module, *names: str) -> None:
        """Set the recorded attributes on the module's present tensors, or on the named ones."""
        carrying = {**self.specs, **self.tags}
        for name in (name for name in names or carrying if name in carrying):
            tensor: Tensor | None = module._parameters.get(name)
            tensor = module._buffers.get(name) if tensor is None else tensor
            if tensor is not None:
                if tensor.is_leaf:  # others belong to a functional call and are temporary
                    self._carriers[name] = tensor
                self._dress(name, tensor)

    def is_attached_to(self, module: nn.Module) -> bool:
        """Return True if the module still holds the tensors with the attributes."""
        return all(
            module._parameters.get(name, tensor) is tensor
            and (name not in self.specs or hasattr(tensor, "orig_shape"))
            for name, tensor in self._carriers.items()
        )

    def _dress(self, name: str, tensor: Tensor) -> None:
        if name in self.specs:
            tensor.orig_shape = self.specs[name].full_shape  # type: ignore[attr-defined]
        tags = dict(self.tags.get(name, {}))
        group, spec = self.group.group, self.specs.get(name)
        if spec is not None and spec.copies > 1 and group is not None:
            tags[SHARERS] = GroupHandle(neighbors(group, spec.copies))
        if tags:
            apply_tags(tensor, tags, group)


def sharding_of(module: nn.Module) -> Sharding | None:
    """The sharding state of `module` itself, or None."""
    found: Sharding | None = module.__dict__.get(SHARDING)
    return found


def shards_of(module: nn.Module) -> Mapping[str, ShardSpec]:
    """Tensor name -> spec, for the sharded tensors of `module` itself."""
    state = sharding_of(module)
    return {} if state is None else state.specs


def layout_of(module: nn.Module) -> Layout:
    """The layout of `module` with its syncs; empty if unknown."""
    state = sharding_of(module)
    return Layout() if state is None else around(state.layout, state.syncs)


def syncs_of(module: nn.Module) -> tuple[KnownSync, ...]:
    """The syncs on `module`, in order."""
    state = sharding_of(module)
    return () if state is None else state.syncs


def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Record on `target`, which holds the same tensors, how they are sliced."""
    state = sharding_of(source)
    if state is not None and state.specs:
        new = make_sharding(target, state.group.group)
        new.specs, new.sizes, new.layout = dict(state.specs), dict(state.sizes), state.layout
        new.attach(target)


def move_syncs(source: nn.Module, target: nn.Module) -> None:
    """Record the syncs of `source` on `target`, which takes over its hooks."""
    state = sharding_of(source)
    if state is not None and state.syncs:
        new = make_sharding(target, state.group.group)
        new.syncs = (*state.syncs, *new.syncs)


def make_sharding(module: nn.Module, group: dist.ProcessGroup | None) -> Sharding:
    """Return the state of `module`, and create it if necessary."""
    state = sharding_of(module)
    if state is None:
        refuse_replicas()
        state = module.__dict__[SHARDING] = Sharding(handle_of(group))
        module.register_load_state_dict_post_hook(attach_after_loading)
        module.register_state_dict_post_hook(place_slices)
    return state


@functools.cache
def refuse_replicas() -> None:
    """Make DDP raise, from now on, if it would replicate a model over the ranks that shard it."""
    make: Any = DistributedDataParallel.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def refusing(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if dist.is_initialized():
            _check_replicas(given["module"], given.get("process_group"), given.get("device_mesh"))
        make(*args, **kwargs)

    DistributedDataParallel.__init__ = refusing  # type: ignore[method-assign]


def _check_replicas(model: nn.Module, group: dist.ProcessGroup | None, mesh: Any) -> None:
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group) if mesh is None else mesh.mesh.flatten().tolist()
    states = map(sharding_of, map(innermost, model.modules()))
    both = next((b for s in states if s and (b := common_ranks(s.group, ranks))), None)
    if both:
        raise SlapoError(
            f"DistributedDataParallel would treat the ranks {both} as replicas, but this model is "
            "sharded over them, and all would get the slices of the first; pass it the "
            "process_group of the data-parallel ranks, such as mesh.get_group('dp'), or let "
            "slapo.build(sch, target='torch', mesh=mesh) do it"
        )


def attach_after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Hook that restores attributes after ``load_state_dict(assign=True)`` replaced tensors."""
    bare = innermost(module)
    state = sharding_of(bare)
    if state is not None:
        from slapo.sharding.slice_tensor import unwrapped  # late: only for state dicts

        for name, param in bare._parameters.items():
            bare._parameters[name] = unwrapped(param)
        state.attach(bare)


def place_slices(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook that gives the slices in a state dict their place in the full tensor."""
    from slapo.sharding.slice_tensor import place_in_state_dict  # late: only for state dicts

    for name, spec in shards_of(innermost(module)).items():
        place_in_state_dict(state_dict, prefix + name, spec)
