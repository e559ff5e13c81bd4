"""``.replace_all(cls, make_fn)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from torch import nn

from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.replace import replace_module
from slapo.primitives.wrapping import check_module
from slapo.snapshot import restored_on_error
from slapo.utils.calls import check_takes
from slapo.wrapper import innermost


class ReplaceAllPrimitive(Primitive, name="replace_all"):
    """Replace every submodule of a class.

    ``every m with isinstance(m, cls) --> make_fn(path, m, **kwargs)``

    Replacements are not searched again. If `make_fn` fails for one module, none is replaced.

    Parameters
    ----------
    cls
        A class of modules.
    make_fn
        Function of the path from the root, the module and the keyword arguments; returns the new
        module.
    **kwargs
        Keyword arguments for `make_fn`.

    Raises
    ------
    ValueError
        If no submodule is an instance of `cls`.
    TypeError
        If `cls` is not a class of modules, or `make_fn` does not return a module.

    Examples
    --------
    >>> import slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()))
    >>> sch.replace_all(nn.ReLU, lambda path, module: nn.GELU()).mod[2]
    GELU(approximate='none')
    """

    @staticmethod
    def apply(
        sch: Node,
        /,
        cls: Annotated[type[nn.Module], "such as nn.GELU"],
        make_fn: Annotated[Callable[..., nn.Module], "such as lambda path, module: nn.GELU()"],
        **kwargs: Any,
    ) -> Node:
        check_takes(make_fn, "make_fn", ("path", "module"), **kwargs)
        nodes = list(_outermost(sch, cls))
        if not nodes:
            present = sorted({type(innermost(n.mod)).__name__ for _, n in sch.named_schedules()})
            raise ValueError(f"no submodule is a {cls.__name__}; the classes are {present}")
        # All are made before the first is put in place, so a failing make_fn changes nothing.
        made = [
            check_module(
                make_fn(n.path, innermost(n.mod), **kwargs),
                "the result of make_fn",
                "return the new module",
            )
            for n in nodes
        ]
        with restored_on_error(sch.get_top_schedule()):
            for node, new in zip(nodes, made, strict=True):
                replace_module(node, new)
        return sch


def _outermost(sch: Node, cls: type[nn.Module]) -> list[Node]:
    """Matching nodes outside all other matches, each module once."""
    found: dict[int, Node] = {}
    pending = list(reversed(sch.child.values()))
    while pending:
        node = pending.pop()
        module = innermost(node.mod)
        if isinstance(module, cls):
            # A module shared by several paths is replaced once; set_module() reaches its other
            # places.
            found.setdefault(id(module), node)
        else:
            pending.extend(reversed(node.child.values()))
    return list(found.values())
