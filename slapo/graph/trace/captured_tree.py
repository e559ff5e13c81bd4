"""Trace by capture: a module, and the modules it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from torch import fx, nn

from slapo.errors import TraceError
from slapo.graph.trace.batches import demands_one, serve_both, with_batch
from slapo.graph.trace.call import BoundCall
from slapo.graph.trace.capture import Capture, Reached, capture
from slapo.graph.trace.leaf_outputs import CapturedForm
from slapo.graph.trace.leaves import IsLeaf, default_is_leaf
from slapo.graph.trace.module import TracedModule
from slapo.graph.trace.run import Inputs
from slapo.graph.trace.tree import TraceResult, descend
from slapo.graph.trace.versions import Version, all_versions, maybe_none
from slapo.wrapper import innermost


def trace_captured_tree(
    module: nn.Module,
    inputs: Inputs,
    recursive: bool,
    flatten: bool,
    leaf_modules: Collection[str],
) -> TraceResult:
    """Capture the module, and with `recursive` the modules it calls, on the inputs it gave them.

    Raises
    ------
    TraceError
        If the module itself cannot be captured. Children that cannot stay opaque.
    """
    tracer = _Captures(default_is_leaf(flatten, leaf_modules))
    result = TraceResult({"": tracer.trace(module, "", inputs)})
    if recursive and not flatten:
        descend(result, module, "", result.traced[""], leaf_modules, tracer.trace_child)
    return result


def trace_captured_containers(
    root: nn.Module, inputs: Inputs, containers: Collection[str]
) -> TraceResult:
    """Capture the root and the containers below it, each with its children as calls.

    A container that is a mere name space, whose caller calls what is in it (OPT calls
    ``model.decoder``), is passed over.

    Raises
    ------
    TraceError
        If one of them cannot be captured, or is not called by the one above it.
    """
    tracer = _Containers(root, frozenset(containers))
    tracer.trace("", inputs)
    for path in containers:
        if path not in tracer.traced and not any(c.startswith(f"{path}.") for c in tracer.traced):
            raise TraceError(f"{path!r} cannot be a graph: no module above it calls it")
    return TraceResult({path: tracer.traced[path] for path in containers if path in tracer.traced})


class _Containers:
    """Captures of containers: the inner ones as soon as a capture comes to their call."""

    def __init__(self, root: nn.Module, paths: Collection[str]) -> None:
        self.root, self.paths = root, paths
        self.traced: dict[str, TracedModule] = {}
        self._outputs: dict[Any, Any] = {}
        self._forms: dict[tuple[str, bool], CapturedForm | None] = {}

    def trace(self, path: str, inputs: Inputs) -> None:
        """Capture the container at `path`, in both modes."""
        module = innermost(self.root.get_submodule(path))

        def once(without: frozenset[str]) -> Version:
            captured = self._captured(module, path, inputs)
            forms[module.training] = captured.form
            return _version(captured)

        forms: dict[bool, CapturedForm | None] = {}
        # A container's optional inputs shape what its children get (masks): None stays refused.
        self.traced[path] = all_versions(module, once, [])
        told = [form for form in forms.values() if form is not None]
        for mode in (True, False):
            # With one form untold it is run in both modes, which compares them.
            known = forms.get(mode, forms[module.training])
            self._forms[path, mode] = known if len(told) == len(forms) else None
        mode_matters = len({form.spelled for form in told}) > 1
        for form in told:
            form.form.mode_matters = mode_matters

    def _captured(self, module: nn.Module, path: str, inputs: Inputs) -> Capture:
        prefix = f"{path}." if path else ""
        inner = {
            c.removeprefix(prefix): c for c in self.paths if c.startswith(prefix) and c != path
        }
        while True:
            captured = self._attempt(module, inputs, self._known(inner))
            if isinstance(captured, Reached):
                self.trace(inner[captured.path], (captured.args, captured.kwargs))
                continue
            called = {str(node.target) for node in captured.graph.find_nodes(op="call_module")}
            for name in called.intersection(inner) - captured.child_inputs.keys():
                raise TraceError(
                    f"{inner[name]!r} cannot be a graph: it is called several times with "
                    "different constants"
                )
            return captured

    def _attempt(
        self, module: nn.Module, inputs: Inputs, forms: dict[str, CapturedForm | None]
    ) -> Capture | Reached:
        """Returned, not raised: what fails later is no consequence of it."""
        is_leaf = default_is_leaf(False)
        try:
            return capture(
                module, *inputs, is_leaf=is_leaf, outputs=self._outputs, containers=forms
            )
        except Reached as reached:
            return reached

    def _known(self, inner: dict[str, str]) -> dict[str, CapturedForm | None]:
        """Forms of what containers return, None for those to be captured.

        Containers whose form could not be told are left out: they are run, like any leaf.
        """
        keys = {
            name: (c, innermost(self.root.get_submodule(c)).training) for name, c in inner.items()
        }
        told = {name: self._forms.get(key) for name, key in keys.items()}
        return {
            n: form for n, form in told.items() if form is not None or keys[n] not in self._forms
        }


def _version(captured: Capture) -> Version:
    return Version(
        captured.graph,
        captured.contract,
        captured.constants,
        captured.entered,
        captured.reads_mode,
    )


class _Captures:
    """Captures of modules of one tree: inputs of children come from the capture above."""

    def __init__(self, is_leaf: IsLeaf) -> None:
        self.is_leaf = is_leaf
        self.inputs: dict[str, Inputs] = {}
        self._outputs: dict[Any, Any] = {}

    def trace_child(self, child: nn.Module, path: str, calls: list[fx.Node]) -> TracedModule:
        """See :data:`slapo.graph.trace.tree.TraceChild`."""
        if path not in self.inputs:
            raise TraceError("it is called several times with different constants")
        return self.trace(child, path, self.inputs[path])

    def trace(self, module: nn.Module, path: str, inputs: Inputs) -> TracedModule:
        """Capture `module` for all kinds of calls."""
        call = BoundCall.of(module, *inputs)
        arguments = call.arguments

        def once(without: frozenset[str]) -> Version:
            changed = {**arguments, **dict.fromkeys(without)}
            given = call.with_arguments(changed) if without else inputs
            captured = capture(module, *given, is_leaf=self.is_leaf, outputs=self._outputs)
            self._note(path, captured)
            version = _version(captured)
            # Rare combinations of missing masks are not worth twice the time.
            if len(without) < 2 and demands_one(version.contract):
                with contextlib.suppress(TraceError):  # then it stays with sizes of 1
                    wide = with_batch(given)
                    again = capture(module, *wide, is_leaf=self.is_leaf, outputs=self._outputs)
                    serve_both(version, _version(again))
            return version

        return all_versions(module, once, maybe_none(module, arguments))

    def _note(self, path: str, captured: Capture) -> None:
        for target, given in captured.child_inputs.items():
            self.inputs.setdefault(f"{path}.{target}" if path else target, given)
