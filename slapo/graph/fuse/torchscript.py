"""TorchScript compiler as one function, with a cache and readable errors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from slapo import scripting
from slapo.errors import SlapoError
from slapo.graph.fuse.modules import compiled_late
from slapo.graph.rewrite.rules import text_of
from slapo.graph.trace.module import Traced, origin_of, trace_of
from slapo.logger import get_logger

logger = get_logger()

_CACHE_SIZE = 64
# The value also holds the called functions: the key identifies some of them by id, which must not
# be reused.
_scripts: OrderedDict[tuple[str, str], tuple[torch.jit.ScriptModule, Any]] = OrderedDict()
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"training"}


def script(module: fx.GraphModule, name: str) -> nn.Module:
    """Compile an extracted module with TorchScript, or with inductor if torch lacks it.

    Code without parameters is compiled once; equal modules are copies of the first.
    """
    if not scripting.has_scripts():
        text = "%s is compiled by inductor: torch %s has no TorchScript"
        logger.info(text, name, torch.__version__)
        return compiled_late(module, name)
    code = _code_key(module)
    if code is None:
        for path, child in module.named_children():  # the module itself is generated
            module._modules[path] = _as_written(child)
        return _compile(module, name)
    key = (name, code)
    if key not in _scripts:
        _scripts[key] = (_compile(module, name), [node.target for node in module.graph.nodes])
        if len(_scripts) > _CACHE_SIZE:
            _scripts.popitem(last=False)
    _scripts.move_to_end(key)
    with scripting.quiet():
        return copy.deepcopy(_scripts[key][0])  # each copy has its own training flag


def _code_key(module: fx.GraphModule) -> str | None:
    """Return a text that determines the compiled code; None with state or opaque children."""
    if has_state(module):
        return None
    texts = [str(module.training)]
    for path, child in list(module.named_modules(remove_duplicate=False))[1:]:
        # Dropout's `p`, GELU's `approximate` and the like are compiled in as constants.
        own = {k: v for k, v in vars(child).items() if k not in _OF_ALL_MODULES}
        hooks = any(vars(child).get(slot) for slot in _OF_ALL_MODULES if "hooks" in slot)
        # other classes may read any state
        of_torch = type(child).__module__.startswith("torch.nn.")
        if hooks or not of_torch or not all(isinstance(v, _PLAIN) for v in own.values()):
            return None
        texts.append(f"{path}: {type(child).__name__} {own}")
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [str(node.type) for node in module.graph.find_nodes(op="placeholder")]
    return "\n".join([*texts, *inputs, text_of(calls)])


def has_state(module: nn.Module) -> bool:
    """Return whether a module has parameters, buffers, or other state that is saved."""
    return bool(module.state_dict()) or next(module.buffers(), None) is not None


def _compile(module: fx.GraphModule, name: str) -> torch.jit.ScriptModule:
    """Run the TorchScript compiler; its errors become one readable SlapoError."""
    try:
        return scripting.script(module)
    except Exception as error:  # TorchScript raises many types, including bare RuntimeErrors
        raise SlapoError(
            f"TorchScript cannot compile {name!r}: {_reason(error)}; use "
            "fuse(..., compiler='inductor') or compiler=None, or match fewer operations"
        ) from error


def _reason(error: Exception) -> str:
    """Reduce a compiler's message to its first sentence and the line that it points at."""
    lines = [line.strip() for line in str(error).splitlines()]
    shown = [line for line in lines if line and not line.startswith(("File", "~", "def "))]
    pointed = next((lines[i] for i, line in enumerate(lines[1:]) if line.startswith("~")), "")
    reason = f"{type(error).__name__}: {shown[0] if shown else 'no message'}"
    return f"{reason} (in {pointed!r})" if pointed and pointed not in reason else reason


def _as_written(module: nn.Module) -> nn.Module:
    """Return a shallow copy in which traced modules have the forward of their original class."""
    children = {k: None if m is None else _as_written(m) for k, m in module._modules.items()}
    same = all(child is module._modules[name] for name, child in children.items())
    if same and not isinstance(module, Traced):
        return module
    if isinstance(module, Traced) and trace_of(module).is_rewritten:
        raise SlapoError(
            f"TorchScript compiles the class's forward of {type(module).__name__}, but its graph "
            "was rewritten; use fuse(..., compiler=None), or match operations outside of it"
        )
    kind: Any = origin_of(module) if isinstance(module, Traced) else type(module)
    # TorchScript compiles the ``forward`` of an object's class, which for a traced one dispatches
    # in Python.
    plain: nn.Module = object.__new__(kind)
    plain.__dict__.update(module.__dict__, _modules=children)
    return plain
