"""Parameters that several modules share, by name, and how they stay tied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from slapo.errors import SlapoError


class TieGroups:
    """Groups of names that refer to one parameter."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        groups = [frozenset(group) for group in names.values() if len(group) > 1]
        self._group_of = _by_name(groups)

    def __bool__(self) -> bool:
        return bool(self._group_of)

    def partners(self, name: str) -> frozenset[str]:
        """Return the other names of the parameter called `name`."""
        return self._group_of.get(name, frozenset()) - {name}

    def renamed(self, names: Mapping[str, str]) -> TieGroups:
        """Return the same groups with some names changed."""
        new = TieGroups.__new__(TieGroups)
        groups = [frozenset(names.get(n, n) for n in group) for group in self.groups()]
        new._group_of = _by_name(groups)
        return new

    def as_dict(self) -> dict[str, tuple[str, ...]]:
        """Return name -> other names, for tied parameters."""
        return {name: tuple(sorted(self.partners(name))) for name in self._group_of}

    def groups(self) -> Iterator[frozenset[str]]:
        """Yield each group of names once."""
        yield from dict.fromkeys(self._group_of.values())

    def names_under(self, path: str) -> Iterator[str]:
        """Return the tied names of the module at `path` and of its descendants."""
        prefix = f"{path}." if path else ""
        return (name for name in self._group_of if name.startswith(prefix))


def _by_name(groups: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return name -> group, in an order that is the same in every process."""
    return {name: group for group in groups for name in sorted(group)}


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Return the module and local name of the parameter called `name`, or None if it is gone."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return (module, leaf) if module._parameters.get(leaf) is not None else None


def parameters_named(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    """Return the existing parameters among `names`."""
    found = (owner_of(model, name) for name in names)
    return [owner._parameters[leaf] for owner, leaf in filter(None, found)]  # type: ignore[misc]


def check_ties(model: nn.Module, ties: TieGroups) -> None:
    """Check that the existing names of each group refer to one parameter."""
    for group in ties.groups():
        present = sorted(name for name in group if owner_of(model, name))
        params = parameters_named(model, present)
        if len({id(p) for p in params}) > 1:
            raise SlapoError(
                f"{', '.join(present)} were one parameter but are now separate, with shapes "
                f"{[tuple(p.shape) for p in params]}; schedule both sides alike, or untie them "
                "before create_schedule"
            )


class TiePlan:
    """Plan that keeps ties when a new module replaces others.

    A parameter of the new module with the old name becomes the tied one. A module that already
    holds the tied parameter, under any name, keeps it.
    """

    def __init__(
        self,
        model: nn.Module,
        ties: TieGroups,
        old_paths: Sequence[str],
        new_path: str,
        new: nn.Module,
    ) -> None:
        self.ties, self.new_path = ties, new_path
        self._renames: dict[str, str] = {}
        self._moves: list[tuple[nn.Module, str, nn.Parameter]] = []
        held = {id(p): n for n, p in new.named_parameters(remove_duplicate=False)} if ties else {}
        leaving = {name: path for path in old_paths for name in ties.names_under(path)}
        for name, path in leaving.items():
            found = owner_of(model, name)
            stay = [p for p in ties.partners(name) if p not in leaving and owner_of(model, p)]
            if found is not None and stay:
                param = found[0]._parameters[found[1]]
                assert param is not None, "owner_of finds existing parameters only"
                local = name[len(path) + 1 :] if path else name
                self._plan(name, local, param, new, held.get(id(param)), stay)

    def _plan(
        self,
        name: str,
        local: str,
        param: nn.Parameter,
        new: nn.Module,
        held_as: str | None,
        partners: list[str],
    ) -> None:
        if held_as is not None:
            self._renames[name] = held_as
            return
        target = owner_of(new, local)
        present = target[0]._parameters[target[1]] if target else None
        if target is None or present is None or present.shape != param.shape:
            has = f"shape {tuple(present.shape)}" if present is not None else "no such parameter"
            raise ValueError(
                f"{name!r} of shape {tuple(param.shape)} is tied to {partners}, but "
                f"{type(new).__name__} has {has} to replace it, which would break the tie; give "
                f"it a parameter {local!r} of that shape, or untie the two before create_schedule"
            )
        self._moves.append((*target, param))
        self._renames[name] = local

    def carry_out(self) -> TieGroups:
        """Tie the new module; return the ties by their new names."""
        for owner, leaf, param in self._moves:
            owner._parameters[leaf] = param
        prefix = f"{self.new_path}." if self.new_path else ""
        return self.ties.renamed({old: prefix + new for old, new in self._renames.items()})
