"""Origins of a new module's parameters, so that a replacement keeps the weights.

A module that replaces others may define ``weight_sources()``: for each of its parameters, the
originals' parameters that it consists of. For other cases it defines ``weights_from(originals)`` in
plain torch code, where `originals` has the parameters by name for each replaced module.

Each tensor carries the origin of its full form. ``create_schedule`` sets it to the tensor's own
name, and code that packs values packs origins too. Slicing is recorded elsewhere and applied on
request. Copies of tensors lose their origins, so ``build`` also stores these on the modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slapo.sharding.state import shards_of
from slapo.weights.slots import Slot, saved_slots
from slapo.wrapper import innermost

if TYPE_CHECKING:
    from slapo.weights.pieces import Pieced


# On a tensor: its name in the original model, or its pieces. It has no leading underscore, as such
# attributes are copied to the tensor that replaces it.
_ORIGIN = "slapo_origin"

# On a module of a built model: name of a tensor -> origin.
_WRITTEN = "_slapo_origins"

# On a Transformers model: the folder with its values.
FOLDER = "_slapo_folder"

# On the root of a built model.
_ORIGINAL = "_slapo_original"


@dataclass(frozen=True)
class Source:
    """Recipe of one parameter from those of the replaced modules.

    Parameters
    ----------
    names
        Parameters of the originals as ``"<k>.<name>"`` for the k-th replaced module, in the order
        of the match, such as ``"0.weight"``.
    dim
        Axis along which several parameters are concatenated.
    transpose
        True first swaps the last two axes, as between ``nn.Linear`` and GPT-2's ``Conv1D``.

    Examples
    --------
    >>> q, k = torch.zeros(2, 4), torch.ones(2, 4)
    >>> packed = Source(("0.weight", "1.weight"), dim=0).pack([q, k])
    >>> packed.shape
    torch.Size([4, 4])
    """

    names: tuple[str, ...]
    dim: int = 0
    transpose: bool = False

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the new parameter's value."""
        parts = [t.transpose(-1, -2) if self.transpose else t for t in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


#: Origin of a parameter whose values come from its author.
_NOWHERE = ""
#: Function from the originals' parameters, by name for each module, to those of the new module.
Making = Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]


def own_values(module: nn.Module) -> list[str]:
    """Return the parameters with values that do not come from other modules."""
    if callable(getattr(module, "weights_from", None)):
        return []
    sources: dict[str, Source] = getattr(module, "weight_sources", dict)()
    return [n for n, p in module.named_parameters() if not p.is_meta and n not in sources]


def inherit_weights(new: nn.Module, originals: Sequence[nn.Module]) -> None:
    """Give `new` the values of the modules it replaces, as far as it declares or allows.

    - Declared parameters are made from those of the originals.
    - If one module is replaced, parameters of `new` on ``meta`` become the original's parameter
      objects of the same name and shape.
    - Other parameters keep their values.
    """
    tables = [dict(m.named_parameters(remove_duplicate=False)) for m in originals]
    making = _making(new)
    if making is not None:
        _fill(new, making, tables)
    elif len(originals) == 1:
        _adopt_by_name(new, tables[0])


def _making(new: nn.Module) -> Making | None:
    """Return the function that makes a module's parameters, or None if it declares none."""
    weights_from: Any = getattr(new, "weights_from", None)
    if callable(weights_from):
        return lambda tables: dict(weights_from(tables))
    sources: dict[str, Source] = getattr(new, "weight_sources", dict)()
    if not sources:
        return None
    return lambda tables: {
        name: source.pack([_original(new, name, full, tables) for full in source.names])
        for name, source in sources.items()
    }


def _fill(new: nn.Module, making: Making, tables: Sequence[Mapping[str, Tensor]]) -> None:
    with torch.enable_grad():  # the results then show which parameters are trained
        values = making(tables)
    # The same code runs on values and on origins, so the two cannot disagree.
    made = _made_of(making, tables)
    for name, value in values.items():
        owner_path, _, leaf = name.rpartition(".")
        owner = new.get_submodule(owner_path)
        present = owner._parameters.get(leaf)
        if present is None:
            raise ValueError(
                f"{type(new).__name__} declares sources for the values of {name!r}, and has no "
                f"such parameter; it has {[n for n, _ in new.named_parameters()]}"
            )
        if value.shape != present.shape:
            sources: dict[str, Source] = getattr(new, "weight_sources", dict)()
            what = "weights_from() gives"
            if name in sources:
                what = f"{list(sources[name].names)} make"
            raise ValueError(
                f"{type(new).__name__}.{name} has shape {tuple(present.shape)}, but {what} "
                f"{tuple(value.shape)}"
            )
        # The clone separates it from views of the originals, as split() returns them.
        parameter = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        owner._parameters[leaf] = parameter
        if name in made:
            setattr(parameter, _ORIGIN, made[name])


def _made_of(making: Making, tables: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return origins of the new parameters, if all of their parts have one."""
    # imported only if weights are packed or a model is built
    from slapo.weights.pieces import Pieced

    tensors = [p for table in tables for p in table.values()]
    if all(origin_of(p) is None for p in tensors):
        return {}

    def known(p: Tensor) -> Pieced:
        origin = origin_of(p)
        # A leaf of its own marks everything made from values that the original model lacks.
        return Pieced.leaf(_NOWHERE, p.shape, p.dtype) if origin is None else origin

    made: Any = making([{name: known(p) for name, p in table.items()} for table in tables])
    return {
        name: origin
        for name, origin in made.items()
        if all(leaf != _NOWHERE for leaf, _ in origin.needs())
    }


def _original(
    new: nn.Module, name: str, full: str, tables: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    index, _, rest = full.partition(".")
    if index.isdigit() and int(index) < len(tables) and rest in tables[int(index)]:
        return tables[int(index)][rest]
    known = [f"{k}.{n}" for k, table in enumerate(tables) for n in table]
    raise ValueError(
        f"{type(new).__name__}.{name} comes from {full!r}, which the replaced modules lack; "
        f"they have {known}"
    )


def _adopt_by_name(new: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for path, module in new.named_modules():
        for leaf, present in list(module._parameters.items()):
            full = f"{path}.{leaf}" if path else leaf
            original = originals.get(full)
            if present is None or original is None or not present.is_meta:
                continue
            if isinstance(original, nn.Parameter) and original.shape == present.shape:
                module._parameters[leaf] = original


def dropped_values(new: nn.Module, original: nn.Module) -> list[str]:
    """Return parameters whose values differ from the original's of the same name and shape.

    The list is empty if the new module declares where its values come from.
    """
    if _making(new) is not None:
        return []
    before = dict(original.named_parameters(remove_duplicate=False))
    return [
        name
        for name, p in new.named_parameters()
        if name in before
        and p is not before[name]
        and p.shape == before[name].shape
        and not (p.is_meta or before[name].is_meta)
        and not torch.equal(p.to(before[name]), before[name])
    ]


# --- origins --------------------------------------------------------------------------------------
@dataclass
class Original:
    """The model that was passed to ``create_schedule``."""

    cls: type[nn.Module]
    config: Any
    generation_config: Any
    #: name -> shape and dtype, of parameters and persistent buffers
    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    #: name -> the first name of the same tensor
    ties: dict[str, str]
    #: folder with the values of a model that `from_pretrained` made on meta
    folder: str | None = None
    #: configs of PEFT adapters, by name
    adapters: dict[str, Any] | None = None

    @property
    def is_of_transformers(self) -> bool:
        """True if Transformers defines the model's layout on disk."""
        return hasattr(self.cls, "from_pretrained") and self.config is not None


def note_origins(model: nn.Module) -> Original:
    """Set each tensor's origin to its name, and return a description of the model."""
    first: dict[int, str] = {}
    tensors, ties = {}, {}
    for slot in saved_slots(model):
        if is_lazy(slot.tensor):
            continue
        name = first.setdefault(id(slot.tensor), slot.name)
        if name != slot.name:
            ties[slot.name] = name
            continue
        setattr(slot.tensor, _ORIGIN, name)
        tensors[name] = (_shape_of(slot), slot.tensor.dtype)
    root = innermost(model)
    configs = (getattr(root, name, None) for name in ("config", "generation_config"))
    # Copies: schedules divide entries of configs, and the folder needs those of the full model.
    config, generation = (
        copy.deepcopy(each) if hasattr(each, "save_pretrained") else None for each in configs
    )
    folder = vars(root).get(FOLDER)
    adapters = copy.deepcopy(getattr(root, "peft_config", None))
    return Original(_class_of(root), config, generation, tensors, ties, folder, adapters)


def note_adapters(model: nn.Module, original: Original) -> None:
    """Count PEFT adapters that were added to a scheduled model among its original tensors."""
    configs = getattr(innermost(model), "peft_config", None)
    if not configs:
        return
    original.adapters = copy.deepcopy(configs)
    for slot in saved_slots(model):
        if ".lora_" in slot.name and origin_at(slot) is None:
            setattr(slot.tensor, _ORIGIN, slot.name)
            original.tensors[slot.name] = (_shape_of(slot), slot.tensor.dtype)


def _class_of(model: nn.Module) -> type[nn.Module]:
    # Wrappers and traces give a model a class of this library's own; its base is the user's.
    return next(cls for cls in type(model).__mro__ if not f"{cls.__module__}.".startswith("slapo."))


def origin_of(tensor: Tensor) -> Pieced | None:
    """Return the origin of an unsharded tensor, or None if its values come from its author."""
    # A slice has the origin of its full form, which only its slot can name.
    return None if hasattr(tensor, "orig_shape") else _as_pieces(tensor, None, tensor.shape)


def origin_at(slot: Slot) -> Pieced | None:
    """Return the origin of a full tensor, or None if its values come from its author."""
    written = slot.owner.__dict__.get(_WRITTEN, {}).get(slot.leaf)
    return _as_pieces(slot.tensor, written, _shape_of(slot))


def _shape_of(slot: Slot) -> torch.Size:
    """Return the shape before sharding; an author's own slice is an original as it is."""
    spec = shards_of(slot.owner).get(slot.leaf)
    return torch.Size(slot.tensor.shape if spec is None else spec.full_shape)


def _as_pieces(tensor: Tensor, written: Any, shape: torch.Size) -> Pieced | None:
    # imported only if weights are packed or a model is built
    from slapo.weights.pieces import Pieced

    found = getattr(tensor, _ORIGIN, written)
    return Pieced.leaf(found, shape, tensor.dtype) if isinstance(found, str) else found


def write_down(model: nn.Module, original: Original | None = None) -> None:
    """Store origins on modules too, as copies of tensors lose them."""
    for slot in saved_slots(model):
        if is_lazy(slot.tensor):
            continue
        found = origin_at(slot)
        if found is not None:
            # The pieces include the shape, which some runtimes remove from a parameter.
            setattr(slot.tensor, _ORIGIN, found)
            slot.owner.__dict__.setdefault(_WRITTEN, {})[slot.leaf] = found
    if original is not None:
        innermost(model).__dict__[_ORIGINAL] = original


def original_of(model: nn.Module) -> Original | None:
    """Return the original of a built model, or None."""
    return innermost(model).__dict__.get(_ORIGINAL)
