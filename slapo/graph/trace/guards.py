"""The checks under which a capture serves another call of its key.

They are torch's own: the shape engine's conditions on the sizes of arguments, and dynamo's guards
on the module and on Python's globals.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from types import FunctionType
from typing import Any

from torch import nn

from slapo.graph.trace.torch_private import CaptureOutput, CheckFunctionManager, GuardBuilder

#: Sources of parameters and buffers, and of other attributes of modules, which graphs read by name.
_IN_MODULE = re.compile(r"\.(_parameters|_buffers)\[[^\]]+\]$")
_CHILD = re.compile(r"\._modules\['([^']+)'\]")
_PLAIN = re.compile(r"L\['module'\](\._modules\['[^']+'\])*\.\w+")


def size_conditions(output: CaptureOutput) -> list[str]:
    """The shape engine's conditions on sizes of arguments, as Python such as ``args[0].size()[1]``.

    Static dimensions are asked too: without them, the guard of a loop over a size is dropped.
    Offsets into a storage are not: micro-batches are slices of a batch.
    """
    graph = output.graph_capture_output.output_graph
    fakes = [f for f in graph.shape_env.tracked_fakes or () if "_slapo" not in f.source.name]
    (found,) = graph.shape_env.produce_guards_verbose(
        [f.fake for f in fakes],
        [f.source for f in fakes],
        input_contexts=[f.symbolic_context for f in fakes],
        ignore_static=False,
        langs=("python",),
    )
    asked = (e for e in dict.fromkeys(found.exprs) if "L['module']" not in e and "L[" in e)
    conditions = (e.replace("L['args']", "args").replace("L['kwargs']", "kwargs") for e in asked)
    return [condition for condition in conditions if "storage_offset" not in condition]


def state_guards(
    output: CaptureOutput, forward: FunctionType, leaves: Collection[str], parked: Collection[str]
) -> Any:
    """Dynamo's guards on the module and on Python's globals; ``.check(frame)`` asks them in C++.

    Arguments have their key, and tensors of modules are watched by :class:`.Tree`. Nothing is asked
    of the class of modules that stay calls, which may be replaced, and of those in `parked`, which
    rewrites take out. Tensors from elsewhere are part of the graph: these must be the same objects.
    """
    graph = output.graph_capture_output.output_graph
    opaque, gone = ({f"L['module']{_source_of(p)}" for p in each} for each in (leaves, parked))
    scope = {"G": forward.__globals__}
    kept = [g for g in graph.guards.inner if _kept(g, opaque, tuple(gone)) and _is_there(g, scope)]
    graph.guards.inner = type(graph.guards.inner)(map(_exact, kept))
    ordered = graph.guard_on_key_order
    graph.guard_on_key_order = type(ordered)(s for s in ordered if _is_asked(s.name, tuple(gone)))
    graph.skip_guards_check = True
    return CheckFunctionManager(forward.__code__, graph).guard_manager


def constants_read(output: CaptureOutput, root: nn.Module) -> list[tuple[str, str, Any]]:
    """Path, name and value of the plain attributes of modules that the forward has asked for.

    Somebody's ``torch.compile`` sees the graph and not the forward, and must guard on them too.
    """
    graph = output.graph_capture_output.output_graph
    names = dict.fromkeys(g.name for g in graph.guards.inner if _PLAIN.fullmatch(g.name))
    found = []
    for source in names:
        holder, _, name = source.rpartition(".")
        path = ".".join(_CHILD.findall(holder))
        value = getattr(root.get_submodule(path), name, None)
        if name != "training" and isinstance(value, (bool, int, float, str)):
            found.append((path, name, value))
    return found


def is_read(output: CaptureOutput, path: str, name: str) -> bool:
    """Whether the forward has asked for an attribute of the module at `path`."""
    source = f"L['module']{_source_of(path)}.{name}"
    guards = output.graph_capture_output.output_graph.guards.inner
    return any(g.name == source or g.name.startswith((f"{source}.", f"{source}[")) for g in guards)


def _source_of(path: str) -> str:
    return "".join(f"._modules[{name!r}]" for name in path.split("."))


def _is_asked(name: str, gone: tuple[str, ...]) -> bool:
    if not name.startswith(("L['module']", "G[")):
        return False
    ours = "_slapo" in name or "_dot_output_capturing" in name
    return not ours and not (gone and name.startswith(gone))


def _kept(guard: Any, opaque: Collection[str], gone: tuple[str, ...]) -> bool:
    name = guard.name
    if not _is_asked(name, gone) or guard.create_fn_name() == "WEAKREF_ALIVE":
        return False
    if name == "L['module']" or name in opaque:  # of any class, but with the attributes they have
        attribute = (getattr(guard.create_fn, "keywords", None) or {}).get("attr", "forward")
        return attribute not in ("__call__", "forward")
    return guard.create_fn_name() != "TENSOR_MATCH" or not _IN_MODULE.search(name)


def _is_there(guard: Any, scope: dict[str, Any]) -> bool:
    """False for a global that is not in the module of its name, as in code that ``exec`` runs."""
    try:
        return not guard.name.startswith("G[") or bool([eval(guard.name, scope)])
    except (AttributeError, KeyError):
        return False
    except Exception:  # a source that only dynamo can read
        return True


def _exact(guard: Any) -> Any:
    """A tensor in a list, a closure or a global is a constant of the graph."""
    is_constant = guard.create_fn_name() == "TENSOR_MATCH" and not _PLAIN.fullmatch(guard.name)
    return guard.originating_source.make_guard(GuardBuilder.ID_MATCH) if is_constant else guard
