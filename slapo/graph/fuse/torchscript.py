"""The TorchScript compiler behind one function: caching, and errors that can be read."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Hashable

import torch
import torch.fx as fx
from torch import nn

from slapo.errors import SlapoError
from slapo.graph.fuse.same_code import code_key
from slapo.graph.trace.module import TracedModule

_CACHE_SIZE = 64
_scripts: OrderedDict[tuple[str, Hashable], torch.jit.ScriptModule] = OrderedDict()


def script(module: fx.GraphModule, name: str) -> torch.jit.ScriptModule:
    """Compile a module with TorchScript.

    Code without parameters is compiled once; equal modules become copies of the first.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A module that :func:`slapo.graph.fuse.extract.extract` made.
    name : str
        Its name, for messages.

    Returns
    -------
    torch.jit.ScriptModule
        The compiled module. Parameters and buffers are those of `module`.

    Raises
    ------
    SlapoError
        If TorchScript cannot compile it; the message has its reason and the way out.

    Examples
    --------
    >>> from slapo.graph.fuse.extract import extract
    >>> gm = fx.symbolic_trace(lambda x: x * 2)
    >>> part = extract(gm, list(gm.graph.nodes)[1:2], "P")
    >>> script(part, "P")(torch.ones(1))
    tensor([2.])
    """
    code = code_key(module)
    if code is None:
        for path, child in module.named_children():  # the module itself is ours
            module._modules[path] = _with_plain_graphs(child)
        return _compile(module, name)
    key = (name, code)
    if key not in _scripts:
        _scripts[key] = _compile(module, name)
        if len(_scripts) > _CACHE_SIZE:
            _scripts.popitem(last=False)
    _scripts.move_to_end(key)
    # The copies are independent: each has its own training flag.
    return copy.deepcopy(_scripts[key])


def _compile(module: fx.GraphModule, name: str) -> torch.jit.ScriptModule:
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


def _with_plain_graphs(module: nn.Module) -> nn.Module:
    """Put plain graph modules in place of traced ones, whose Python TorchScript cannot read.

    Modules that hold a traced one are replaced by shallow copies: they belong to the model.
    """
    children = {
        name: None if child is None else _with_plain_graphs(child)
        for name, child in module._modules.items()
    }
    if isinstance(module, TracedModule):
        plain: nn.Module = _plain_graph(module)
    elif all(child is module._modules[name] for name, child in children.items()):
        return module
    else:
        plain = copy.copy(module)
    plain.__dict__["_modules"] = children
    return plain


def _plain_graph(module: TracedModule) -> fx.GraphModule:
    """Make a plain graph module with the graph, the state and the hooks of a traced one."""
    limits = module.contract
    if limits.size_guards or limits.training is not None or limits.dtype is not None:
        raise SlapoError(
            f"TorchScript would not check what {type(module).__name__} may be called with (its "
            "trace holds for some sizes, one mode or one dtype only); use "
            "fuse(..., compiler=None), or match operations outside of it"
        )
    plain = fx.GraphModule(nn.Module(), fx.Graph(), type(module).__name__)
    for name in vars(nn.Module()):
        plain.__dict__[name] = module.__dict__[name]
    plain.graph = copy.deepcopy(module.graph)  # a graph knows one owner only
    return plain
