"""State that sharding leaves on a module, in one object that goes wherever the module goes.

A slice says by attributes that it is one (``orig_shape``), and so do tagged parameters; hooks sum
gradients. Torch keeps neither: a copied parameter has no attributes, an unpickled one no hooks, and
``load_state_dict(assign=True)`` puts other tensors in. The object below knows what every tensor of
its module carries, and gives it back in all of these cases.
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
    """How the tensors of one module lie across the ranks, and what was changed for it."""

    #: handle of the ranks
    group: GroupHandle
    #: tensor name -> how it is sliced
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    #: attribute -> its value before sharding
    sizes: dict[str, Any] = field(default_factory=dict)
    #: of the bare module, before any sync
    layout: Layout = field(default_factory=Layout)
    #: on the module, in order
    syncs: tuple[KnownSync, ...] = ()
    #: parameter name -> attributes that follow it
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: of a module that adds its bias after a reduction: see :mod:`slapo.sharding.partial`
    reducers: tuple[Any, ...] = ()
    bias_part: Any = None
    #: true if tokens of other ranks are taken out
    masks_vocabulary: bool = False
    #: tensors that carry attributes: copies of this object find their copies by them
    _carriers: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Tag the tensors of a copied or unpickled module, which carry nothing yet."""
        refuse_replicas()
        self.__dict__.update(state)
        for name, tensor in self._carriers.items():
            forget_hook(tensor)
            self._dress(name, tensor)

    def snapshot(self) -> Sharding:
        """A copy that later changes of this one do not reach, over the same tensors."""
        new = object.__new__(type(self))  # copy.copy would dress the tensors again
        for name, value in vars(self).items():
            new.__dict__[name] = dict(value) if isinstance(value, dict) else value
        return new

    def tag(self, module: nn.Module, name: str, key: str, value: Any) -> None:
        """Let a parameter of the module carry an attribute, wherever it goes."""
        self.tags[name] = {**self.tags.get(name, {}), key: value}  # snapshots have the old one
        self.attach(module, name)

    def attach(self, module: nn.Module, *names: str) -> None:
        """Give the tensors that the module has now what they are to carry; or some of them."""
        carrying = {**self.specs, **self.tags}
        for name in (name for name in names or carrying if name in carrying):
            tensor: Tensor | None = module._parameters.get(name)
            tensor = module._buffers.get(name) if tensor is None else tensor
            if tensor is not None:
                if tensor.is_leaf:  # else one of a functional call, which goes again
                    self._carriers[name] = tensor
                self._dress(name, tensor)

    def is_attached_to(self, module: nn.Module) -> bool:
        """Return whether the module's tensors are those that carry what is known here."""
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
    """The sharding state of `module` itself; None if there is none."""
    found: Sharding | None = module.__dict__.get(SHARDING)
    return found


def shards_of(module: nn.Module) -> Mapping[str, ShardSpec]:
    """Tensor name -> spec, for the sharded tensors of `module` itself."""
    state = sharding_of(module)
    return {} if state is None else state.specs


def layout_of(module: nn.Module) -> Layout:
    """The layout of `module` together with its syncs; an empty one when nothing is known."""
    state = sharding_of(module)
    return Layout() if state is None else around(state.layout, state.syncs)


def syncs_of(module: nn.Module) -> tuple[KnownSync, ...]:
    """The syncs on `module`, in order."""
    state = sharding_of(module)
    return () if state is None else state.syncs


def copy_shards(source: nn.Module, target: nn.Module) -> None:
    """Note on `target`, which has the same tensors, how they are sliced."""
    state = sharding_of(source)
    if state is not None and state.specs:
        new = make_sharding(target, state.group.group)
        new.specs, new.sizes, new.layout = dict(state.specs), dict(state.sizes), state.layout
        new.attach(target)


def move_syncs(source: nn.Module, target: nn.Module) -> None:
    """Note the syncs of `source` on `target`, to which its hooks go."""
    state = sharding_of(source)
    if state is not None and state.syncs:
        new = make_sharding(target, state.group.group)
        new.syncs = (*state.syncs, *new.syncs)


def make_sharding(module: nn.Module, group: dist.ProcessGroup | None) -> Sharding:
    """The state of `module`, new where there is none."""
    state = sharding_of(module)
    if state is None:
        refuse_replicas()
        state = module.__dict__[SHARDING] = Sharding(handle_of(group))
        module.register_load_state_dict_post_hook(attach_after_loading)
        module.register_state_dict_post_hook(place_slices)
    return state


@functools.cache
def refuse_replicas() -> None:
    """From now on DDP raises where ranks that it takes for replicas hold slices of its model."""
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
            f"DistributedDataParallel takes the ranks {both} for replicas, over which this model "
            "is sharded, and would give all of them the slices of the first; pass it the "
            "process_group of the data-parallel ranks, such as mesh.get_group('dp'), or let "
            "slapo.build(sch, target='torch', mesh=mesh) do it"
        )


def attach_after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """A hook: ``load_state_dict(assign=True)`` has put other tensors in."""
    bare = innermost(module)
    state = sharding_of(bare)
    if state is not None:
        from slapo.sharding.slice_tensor import unwrapped  # for state dicts only

        for name, param in bare._parameters.items():
            bare._parameters[name] = unwrapped(param)
        state.attach(bare)


def place_slices(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook: slices in a state dict know their place in the whole."""
    from slapo.sharding.slice_tensor import place_in_state_dict  # for state dicts only

    for name, spec in shards_of(innermost(module)).items():
        place_in_state_dict(state_dict, prefix + name, spec)
