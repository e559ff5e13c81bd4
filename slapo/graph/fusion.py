"""Fusion: a subgraph becomes one module that a compiler has worked on."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx
from torch import nn

from slapo.errors import SlapoError

from .extract import extract
from .fused_sequential import sequential_of
from .rewrite import check_closed

Compiler = Callable[[fx.GraphModule, str], nn.Module]

_SCRIPT_CACHE_SIZE = 64
_scripts: OrderedDict[tuple[str, ...], torch.jit.ScriptModule] = OrderedDict()


def fuse_subgraph(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    compiler: str | None = "TorchScript",
    name: str = "FusedModule",
) -> nn.Module:
    """Compile a chain of operations into one module.

    The graph stays as it is; :func:`slapo.graph.rewrite.replace_vertical` puts the module in.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        The owner of the graph.
    nodes : sequence of torch.fx.Node
        The chain. Only its last value may be used outside.
    compiler : {"TorchScript", "inductor", None}
        ``"TorchScript"`` gives a ``torch.jit.ScriptModule``, ``"inductor"`` a module that
        ``torch.compile`` translates when it is first called, and None a plain
        ``nn.Sequential`` that runs the operations one by one.
    name : str, default "FusedModule"
        Name of the new module's class.

    Returns
    -------
    torch.nn.Module
        A module that takes the inputs of the chain in order of first use. Parameters and buffers
        are the same objects as before.

    Raises
    ------
    ValueError
        If the compiler is unknown, there are several subgraphs, or the chain is not closed.
    SlapoError
        If the compiler cannot translate the chain.

    Examples
    --------
    >>> gm = fx.symbolic_trace(lambda x, b: torch.nn.functional.gelu(x + b))
    >>> chain = [n for n in gm.graph.nodes if n.op == "call_function"]
    >>> fuse_subgraph(gm, chain, compiler=None, name="BiasGelu")
    BiasGelu(
      (0): Call(add)
      (1): Call(gelu)
    )
    """
    if compiler not in COMPILERS:
        known = ", ".join(map(repr, COMPILERS))
        raise ValueError(f"unknown compiler {compiler!r}; the known ones are {known}")
    if not nodes:
        raise ValueError("the subgraph is empty; hand over one of those that find() returned")
    if any(isinstance(node, (list, tuple)) for node in nodes):
        raise ValueError(
            f"fuse takes one subgraph, got {len(nodes)}; fuse them one by one, or replace them "
            "horizontally by a module of your own"
        )
    check_closed(nodes)
    return COMPILERS[compiler](extract(gm, nodes, name), name)


def _by_torchscript(module: fx.GraphModule, name: str) -> nn.Module:
    """Script a module; code without parameters is compiled once and copied."""
    key = _script_key(module, name)
    if key is None:
        return _script(module, name)
    if key not in _scripts:
        _scripts[key] = _script(module, name)
        if len(_scripts) > _SCRIPT_CACHE_SIZE:
            _scripts.popitem(last=False)
    _scripts.move_to_end(key)
    # The copies are independent: each has its own training flag.
    return copy.deepcopy(_scripts[key]).train(module.training)


def _script_key(module: fx.GraphModule, name: str) -> tuple[str, ...] | None:
    """Describe a module fully by its code and its submodules; None if it has state."""
    if module.state_dict() or next(module.buffers(), None) is not None:
        return None
    parts = [(path, child) for path, child in module.named_modules() if path]
    if not all(type(child).__module__.startswith("torch.nn.") for _, child in parts):
        return None
    return (name, module.code, *(f"{path}: {child} {child.training}" for path, child in parts))


def _script(module: fx.GraphModule, name: str) -> torch.jit.ScriptModule:
    """Run the TorchScript compiler; its complaints become one readable error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        # It stumbles over an annotation within fx.GraphModule itself.
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't", UserWarning)
        try:
            return torch.jit.script(module)
        except Exception as error:  # TorchScript raises many kinds, bare RuntimeErrors among them
            raise SlapoError(
                f"TorchScript cannot compile {name!r}: {_reason(error)}; use "
                "fuse(..., compiler='inductor') or compiler=None, or match fewer operations"
            ) from error


def _reason(error: Exception) -> str:
    """Reduce a compiler's message to its first sentence and the line it is about."""
    lines = [line.strip() for line in str(error).splitlines()]
    shown = [line for line in lines if line and not line.startswith(("File", "~", "def "))]
    pointed = next((lines[i] for i, line in enumerate(lines[1:]) if line.startswith("~")), "")
    reason = f"{type(error).__name__}: {shown[0] if shown else 'no message'}"
    return f"{reason} (in {pointed!r})" if pointed and pointed not in reason else reason


def _by_inductor(module: fx.GraphModule, name: str) -> nn.Module:
    """Let ``torch.compile`` translate a module in place, which keeps the names of its state."""
    module.compile(backend="inductor")
    return module


def _as_sequential(module: fx.GraphModule, name: str) -> nn.Module:
    """Leave the operations as they are, one child for each."""
    return sequential_of(module, name)


COMPILERS: dict[str | None, Compiler] = {
    "TorchScript": _by_torchscript,
    "inductor": _by_inductor,
    None: _as_sequential,
}
"""The compilers that :func:`fuse_subgraph` knows. Each makes a module from an extracted one."""
