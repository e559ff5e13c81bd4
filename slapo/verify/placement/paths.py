"""The running module, in the forward and in the backward pass."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn

from slapo.pipeline.pipelined import unstaged
from slapo.wrapper import innermost


@contextmanager
def calls_followed(follow: Callable[..., Any]) -> Iterator[None]:
    """Run every module call within the block through ``follow(module, call, args, kwargs)``.

    Replaces the call itself: a module's own hooks, with their collectives, must run as part of it.
    """
    call = nn.Module.__call__

    def following(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return follow(module, call, args, kwargs)

    nn.Module.__call__ = following  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]


class Paths:
    """Paths of a model's modules while they run.

    Autograd numbers nodes in the order of creation. In the backward pass, a node's number thus
    identifies the module that created it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._graphs: set[str] = set()
        for name, module in model.named_modules():
            path = unstaged(model, name)
            self._names.setdefault(id(module), path)
            # Wrappers and the module inside both run; messages name one path for the two.
            self._names.setdefault(id(innermost(module)), path)
            if isinstance(innermost(module), fx.GraphModule):
                self._graphs.add(path)
        self._running: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def followed(self) -> AbstractContextManager[None]:
        """Follow every module call that begins within the block."""
        return calls_followed(self._follow)

    def _follow(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        around = self._running[-1] if self._running else ""
        # Modules outside the model, such as one that a hook calls, count as part of the caller.
        self._running.append(self._names.get(id(module), around))
        self._note(self._running[-1])
        try:
            return call(module, *args, **kwargs)
        finally:
            self._running.pop()
            self._note(around)

    def _note(self, path: str) -> None:
        """Assign all later nodes to `path`."""
        number = torch.autograd._get_sequence_nr()
        if self._numbers and self._numbers[-1] == number:
            self._paths[-1] = path
        else:
            self._numbers.append(number)
            self._paths.append(path)

    def in_graph(self) -> bool:
        """Return True if a graph is running, which may contain operations of other modules."""
        return self.now()[0] in self._graphs

    def number(self) -> int:
        """Autograd's sequence number of the running node, or of the last one created."""
        node: Any = torch._C._current_autograd_node()
        # A module that runs during the backward pass is a checkpoint's recomputation, in its own
        # forward.
        if node is not None and not self._running:
            return int(node._sequence_nr())
        return torch.autograd._get_sequence_nr() - 1

    def now(self) -> tuple[str, bool]:
        """The running module, and True if it is in its backward pass."""
        if self._running:
            return self._running[-1], False
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return "", False
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._paths[index] if index >= 0 else ""), True
