"""The model as a sequence of stages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from slapo.errors import SlapoError
from slapo.graph.trace.module import Traced, trace_of
from slapo.graph.trace.nests import parts, size_check
from slapo.graph.trace.tree import Joined
from slapo.pipeline.stage import Kind, Stage, owner_at, put_tensor
from slapo.pipeline.ties import StageTie, ties_of_stages
from slapo.sharding.tags import new_parameter
from slapo.wrapper import innermost


class PipelineInputs:
    """Converts a call of the model to the tensors that its first stage takes."""

    def __init__(self, root: Traced, names: Sequence[str], joined: Mapping[Kind, Joined]) -> None:
        first = next(iter(joined.values()))
        targets = {n.name: str(n.target) for n in first.graph.find_nodes(op="placeholder")}
        self.names = [targets[name].lstrip("*") for name in names]
        self._signature = inspect.signature(trace_of(root).origin.forward)
        parameters = list(self._signature.parameters.values())[1:]
        self._signature = self._signature.replace(parameters=parameters)
        self._label = f"pipelined {trace_of(root).origin.__name__}"
        # Strides follow from sizes, since every tensor is made contiguous.
        self._conditions = {
            kind: [c for c in each.sizes or () if ".stride()" not in c]
            for kind, each in joined.items()
        }
        # Positional arguments and names of keywords in the traced call: size conditions are written
        # in terms of args[k] and kwargs['name'].
        self._split: tuple[int, tuple[str, ...]] | None = None
        self._traced: dict[str, Any] = dict(first.fixed)
        if first.sizes is not None:
            args, kwargs = trace_of(root).inputs
            self._split = len(args), tuple(kwargs)
            self._traced = {k: _outline(v) for k, v in self._bound(args, kwargs).items()}

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> tuple[Tensor, ...]:
        """Check a call in train or eval mode; return its tensors in order."""
        given = self._bound(args, kwargs)
        self._check(given, training)
        return self._take(given)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors, in order, of a checked call, or of many such calls together."""
        return self._take(self._bound(args, kwargs))

    def _take(self, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        missing = [name for name in self.names if not isinstance(given.get(name), Tensor)]
        if missing:
            shown = {name: type(given[name]).__name__ for name in missing if name in given}
            raise SlapoError(
                f"{self._label}: its stages take the tensors {self.names}; {missing} are missing "
                f"or not tensors {shown}. Pass them, or trace with concrete_args to leave them "
                "out"
            )
        return tuple(given[name].contiguous() for name in self.names)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            taken = list(self._signature.parameters)
            raise TypeError(f"{self._label}: {error}; it takes {taken}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def _check(self, given: Mapping[str, Any], training: bool) -> None:
        for name, traced in self._traced.items():
            now = _outline(given.get(name))
            if now != traced and name != "use_cache":
                raise SlapoError(
                    f"{self._label}: {name} is {_shown(now)}, but the stages were cut for "
                    f"{_shown(traced)}; call it with such inputs, or pass yours as "
                    "example_inputs to apply_schedule or trace_until"
                )
        count, names = self._split or (0, ())
        order = list(self._signature.parameters)[:count]
        args, kwargs = [given[name] for name in order], {name: given[name] for name in names}
        failing = [
            next((c for c in each if not _check_of(c)(args, kwargs)), None)
            for kind, each in self._conditions.items()
            if kind.training == training
        ]
        if None in failing or not failing:  # stages refuse a mode without a graph
            return
        condition = str(failing[0])
        for k, name in enumerate(order):
            condition = condition.replace(f"args[{k}]", name)
        condition = re.sub(r"kwargs\['(\w+)'\]", r"\1", condition)
        raise SlapoError(
            f"{self._label}: the stages support only inputs with {condition}; pass such, or "
            "trace with example inputs of other sizes"
        )


@lru_cache(maxsize=1024)  # called for each micro-batch
def _check_of(condition: str) -> Callable[[Any, Any], bool]:
    return size_check([condition])


def _outline(value: Any) -> Any:
    """Properties in which calls must agree: dtypes and dimensions of tensors, and all constants.

    ``use_cache`` is ignored: no graph creates a cache.
    """
    if isinstance(value, Tensor):
        return (value.dtype, value.dim())
    elements = parts(value)
    if elements is None:
        return value
    items = [(part.key, _outline(part.value)) for part in elements if part.key != "use_cache"]
    return (type(value), *items)


def _shown(outline: Any) -> str:
    is_tensor = isinstance(outline, tuple) and outline and isinstance(outline[0], torch.dtype)
    return f"a {outline[0]} tensor of {outline[1]} dimensions" if is_tensor else repr(outline)


def unstaged(root: nn.Module, path: str) -> str:
    """Return the path in the original model of a module or tensor of a possibly pipelined one."""
    stage, _, rest = path.partition(".")
    is_cut = isinstance(root, PipelinedModule) and stage.startswith("submod_")
    return rest if is_cut else path


class PipelinedModule(nn.Module):
    """A model split into stages ``submod_0``, ``submod_1``, ...

    A call runs all stages in this process, one after another, to compare with the original. State
    dicts are those of the original: same names, including tied ones, in the same order.

    Attributes
    ----------
    ties : tuple of StageTie
        Parameters shared by several stages.
    inputs : PipelineInputs
        Inputs of the first stage.
    """

    def __init__(
        self, root: Traced, stages: Sequence[Stage], joined: Mapping[Kind, Joined]
    ) -> None:
        super().__init__()
        self.training = root.training
        # In a tuple, so that it is not a child. The full model has the code of initialization.
        self._whole: tuple[Traced, ...] = (root,)
        #: original name -> (stage, name there); stage 0 holds tensors that no stage uses
        self._places = _place_names(root, stages)
        for index, stage in enumerate(stages):
            self.add_module(f"submod_{index}", stage)
        self.ties: tuple[StageTie, ...] = ties_of_stages(stages)
        #: (stage, name there) of a parameter -> its first name in the model
        self._first_names = self._name_parameters()
        self.inputs = PipelineInputs(root, stages[0].received, joined)
        self.register_state_dict_post_hook(_to_original_names)
        self.register_load_state_dict_pre_hook(_to_stage_names)

    @property
    def whole(self) -> Traced | None:
        """The model before the split, which shares modules with the stages; None once released."""
        return self._whole[0] if self._whole else None

    def forget_whole(self) -> None:
        """Release the model before the split, and tensors that only it holds."""
        self._whole = ()

    def renew_tensors(self) -> None:
        """Take over tensors of containers that were created again since the split."""
        for own, source, name in self._in_containers():
            put_tensor(own, source, name)

    def give_tensors(self, stages: Collection[int]) -> None:
        """Give the full model the present tensors of containers in some stages."""
        for own, source, name in self._in_containers(stages):
            put_tensor(source, own, name)

    def _in_containers(
        self, stages: Collection[int] | None = None
    ) -> Iterator[tuple[nn.Module, nn.Module, str]]:
        """Yield tensors that a stage and the full model hold in different modules."""
        for stage in self.stages:
            for path, own in stage.named_modules():
                # Modules that a stage calls are the model's own. Containers, which it only reads
                # tensors of, are new plain modules.
                source = _module_at(self.whole, path)
                if source is None or source is own or stage.index not in (stages or [stage.index]):
                    continue
                for name in [*own._parameters, *own._buffers]:
                    yield own, source, name

    @property
    def stages(self) -> list[Stage]:
        """All stages, in order."""
        return [stage for stage in self.children() if isinstance(stage, Stage)]

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool | None = None
    ) -> tuple[Tensor, ...]:
        """Return stage 0's tensors for a call of the model, in its own mode or the given one."""
        return self.inputs.bind(args, kwargs, self.training if training is None else training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every stage in this process."""
        values: Any = self.bind(args, kwargs)
        for stage in self.stages:
            values = stage(*values)
        return values

    def _name_parameters(self) -> dict[tuple[int, str], str]:
        stages = self.stages
        first: dict[int, str] = {}
        names: dict[tuple[int, str], str] = {}
        for original, (index, local) in self._places.items():
            path, _, leaf = local.rpartition(".")
            # As an attribute: modules of TorchScript have no table of parameters.
            parameter = getattr(stages[index].get_submodule(path), leaf, None)
            if isinstance(parameter, nn.Parameter):
                names[index, local] = first.setdefault(id(parameter), original)
        return names

    def first_name(self, index: int, local: str) -> str:
        """Name in the model's ``named_parameters()`` for a parameter of a stage."""
        return self._first_names.get((index, local), local)

    def original_names(self, index: int) -> dict[str, tuple[str, ...]]:
        """Name of a tensor in a stage -> its names in the model."""
        found: dict[str, tuple[str, ...]] = {}
        for original, (stage, local) in self._places.items():
            if stage == index:
                found[local] = (*found.get(local, ()), original)
        return found


def release(pipelined: PipelinedModule, keep: Sequence[int]) -> None:
    """Free the tensors of all stages but those in `keep`, by moving them to ``meta``.

    Parameters shared with a kept stage stay.
    """
    kept = [stage for stage in pipelined.stages if stage.index in keep]
    needed = {id(t) for stage in kept for t in (*stage.parameters(), *stage.buffers())}
    for stage in pipelined.stages:
        if stage.index not in keep:
            for module in stage.modules():
                _release_module(module, needed)


def _release_module(module: nn.Module, needed: set[int]) -> None:
    for name, parameter in list(module._parameters.items()):
        if _is_released(parameter, needed):
            blank = torch.empty_like(parameter, device="meta")
            module._parameters[name] = new_parameter(blank, parameter)
    for name, buffer in list(module._buffers.items()):
        if _is_released(buffer, needed):
            module._buffers[name] = buffer.to("meta")


def _is_released(tensor: Tensor | None, needed: set[int]) -> TypeGuard[Tensor]:
    return tensor is not None and id(tensor) not in needed and not tensor.is_meta


# --- names ---------------------------------------------------------------------------------------
def _place_names(root: nn.Module, stages: Sequence[Stage]) -> dict[str, tuple[int, str]]:
    by_name: dict[str, int] = {}
    by_tensor: dict[int, tuple[int, str]] = {}
    # The first stage that holds a tensor wins, which is also the owner of a tie.
    for stage in reversed(stages):
        for name, held in _tensors(stage):
            by_name[name] = stage.index
            by_tensor[id(held)] = (stage.index, name)
    places: dict[str, tuple[int, str]] = {}
    tensors = dict(_tensors(root))
    for name in root.state_dict():
        tensor = tensors.get(name)
        if name in by_name:
            places[name] = (by_name[name], name)
        elif tensor is not None and id(tensor) in by_tensor:
            places[name] = by_tensor[id(tensor)]
        elif tensor is not None:  # a module that the model never calls
            _adopt(stages[0], root, name)
            places[name] = by_tensor[id(tensor)] = (0, name)
    return places


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _module_at(root: nn.Module | None, path: str) -> nn.Module | None:
    try:
        return None if root is None else innermost(root.get_submodule(path))
    except AttributeError:
        return None


def _adopt(stage: Stage, root: nn.Module, name: str) -> None:
    owner, leaf = owner_at(stage, name)
    put_tensor(owner, root.get_submodule(name.rpartition(".")[0]), leaf)


def _to_original_names(
    module: PipelinedModule, state: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    own = {key: state.pop(key) for key in list(state) if key.startswith(f"{prefix}submod_")}
    for original, (stage, name) in module._places.items():
        state[prefix + original] = own[f"{prefix}submod_{stage}.{name}"]


def _to_stage_names(
    module: PipelinedModule, state: dict[str, Any], prefix: str, *args: Any
) -> None:
    taken: dict[str, Any] = {}
    for original, place in module._places.items():
        if prefix + original in state:
            taken[f"{prefix}submod_{place[0]}.{place[1]}"] = state.pop(prefix + original)
    for tie in module.ties:  # the other stages hold the same tensor, or their own copy of it
        keys = [f"{prefix}submod_{stage}.{name}" for stage, name in tie.members]
        value = next((taken[key] for key in keys if key in taken), None)
        if value is not None:
            taken.update(dict.fromkeys(keys, value))
    state.update(taken)
