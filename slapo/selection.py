"""A selection of schedule nodes by a glob."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import nn

from slapo.errors import SlapoError, with_nearest
from slapo.history import describe
from slapo.node import Node
from slapo.primitives import (
    AnnotatePrimitive,
    CheckpointPrimitive,
    CompilePrimitive,
    CutPipelineStagePrimitive,
    DecomposePrimitive,
    ForkRNGPrimitive,
    ReplaceAllPrimitive,
    SetPrimitive,
    ShardPrimitive,
    SyncPrimitive,
    TracePrimitive,
)
from slapo.primitives.base import Primitive, find_primitive, list_primitives
from slapo.primitives.run import document, perform, record_of, run
from slapo.record import made_by
from slapo.snapshot import restored_on_error
from slapo.utils.calls import check_takes

P = ParamSpec("P")
N = TypeVar("N", bound=Node)


def _broadcast(
    primitive: type[Primitive], apply: Callable[Concatenate[Any, P], Any]
) -> Callable[Concatenate[Selection[N], P], Selection[N]]:
    """Return `primitive` as a method that applies it to every node, or to none."""

    @functools.wraps(apply)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.apply(primitive, *args, **kwargs)

    return document(method, primitive)


class Selection(Generic[N]):
    """Schedule nodes that match a glob; a primitive called on it is applied to each of them.

    Created by :meth:`Schedule.select`. If the primitive fails on one node, schedule and model are
    restored to their state before the call.

    Parameters
    ----------
    nodes
        The nodes, in the order of the tree.
    pattern
        The glob that selected them.
    """

    shard = _broadcast(ShardPrimitive, ShardPrimitive.apply)
    sync = _broadcast(SyncPrimitive, SyncPrimitive.apply)
    checkpoint = _broadcast(CheckpointPrimitive, CheckpointPrimitive.apply)
    compile = _broadcast(CompilePrimitive, CompilePrimitive.apply)
    fork_rng = _broadcast(ForkRNGPrimitive, ForkRNGPrimitive.apply)
    annotate = _broadcast(AnnotatePrimitive, AnnotatePrimitive.apply)
    set = _broadcast(SetPrimitive, SetPrimitive.apply)
    trace = _broadcast(TracePrimitive, TracePrimitive.apply)
    replace_all = _broadcast(ReplaceAllPrimitive, ReplaceAllPrimitive.apply)
    decompose = _broadcast(DecomposePrimitive, DecomposePrimitive.apply)
    cut_pipeline_stage = _broadcast(CutPipelineStagePrimitive, CutPipelineStagePrimitive.apply)

    def __init__(self, nodes: list[N], pattern: str) -> None:
        self.nodes = nodes
        self.pattern = pattern

    @classmethod
    def matching(cls, root: N, pattern: str) -> Selection[N]:
        """Select the nodes below `root` that match `pattern`; ValueError if there is none."""
        regex = compile_glob(pattern)
        matches = (node for path, node in root.named_schedules() if path and regex.fullmatch(path))
        # A module registered at several paths is one module: apply a primitive to it once.
        first: dict[int, N] = {}
        for node in matches:
            first.setdefault(id(node.mod), node)
        nodes = list(first.values())
        if not nodes:
            one = pattern.replace("*", "0")
            hint = f"{'' if one == pattern else 'for one, '}{root.describe_unknown(one)}"
            raise ValueError(f"select({pattern!r}) matches no module: {hint}")
        return cls(nodes, pattern)

    def apply(self, primitive: type[Primitive], /, *args: Any, **kwargs: Any) -> Selection[N]:
        """Apply `primitive` to every node, or to none if it fails on one."""
        top = self.nodes[0].get_top_schedule()
        with restored_on_error(top):
            for node in self.nodes:
                if run(node, primitive, *args, **kwargs) is False:
                    raise SlapoError(
                        f"select({self.pattern!r}).{primitive.name()}: it failed for "
                        f"{node.path!r} (see the warning), so no module was changed"
                    )
        return self

    def replace(self, make_module: Callable[[str, Any], Any]) -> Selection[N]:
        """Replace every module by ``make_module(path, module)``.

        A function that can be imported by name is recorded by that name, and creates the modules of
        another model when the record is replayed.
        """
        if isinstance(make_module, nn.Module) or not callable(make_module):
            raise TypeError(
                f"select({self.pattern!r}).replace: got {describe(make_module)}, but one module "
                "cannot replace several; pass a function, such as "
                "lambda path, module: nn.GELU()"
            )
        check_takes(make_module, "make_module", ("path", "module"))
        replace = find_primitive("replace")
        assert replace is not None, "replace is registered with the package"
        with restored_on_error(self.nodes[0].get_top_schedule()):
            for node in self.nodes:
                module = make_module(node.path, node.mod)
                # record_of() would record the module; the function also fits models of other sizes.
                record = record_of(node, replace, (module,), {})
                given = {"new_mod": made_by(make_module, module, node)}
                record = dataclasses.replace(record, given=given)
                perform(node, replace, (module,), {}, record)
        return self

    def __iter__(self) -> Iterator[N]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> N:
        return self.nodes[index]

    def __repr__(self) -> str:
        return f"<Selection {self.pattern!r} of {len(self)} modules>"

    def __getattr__(self, name: str) -> Any:
        primitive = None if name.startswith("_") else find_primitive(name)
        if primitive is None:
            known = list_primitives()
            hint = with_nearest(name, known, f"its primitives are {known}")
            raise AttributeError(f"a Selection has no attribute {name!r}; {hint}")
        return _broadcast(primitive, primitive.apply).__get__(self, Selection)


@functools.cache
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob over dotted paths: ``*`` stays within a component, ``**`` spans several."""
    # Longest first: ``**.`` matches any number of components, including none.
    regex = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*\*", r".+")
    return re.compile(regex.replace(r"\*", r"[^.]*").replace(r"\?", r"[^.]"))
