"""Refusals of code that a graph cannot hold: the module, the line, the reason, the fix."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from slapo.errors import TraceError
from slapo.graph.trace.nodes import FunctionApply
from slapo.graph.trace.surroundings import RANDOM, Effect
from slapo.graph.trace.torch_private import BY_VALUE

_REMEDY = "make the module a leaf: leaf_modules=[...] or an attribute traceable = False"
CACHE_REFUSED = "a key/value cache cannot be part of a graph; pass use_cache=False"
_CHECKPOINT_REFUSED = (
    "activation checkpointing inside a traced forward would be lost; turn it off in the model "
    "and use the schedule's .checkpoint(), or make the module a leaf"
)
_COLLECTIVE_REFUSED = (
    "the forward calls the collective {}; make the module a leaf, use the schedule's .sync(), or "
    "wrap the collective in an autograd.Function, which a graph can hold"
)
_DATA_REASON = (
    "Python needs a value that only real data has (an if on a tensor, .item(), nonzero, a "
    f"boolean index); {_REMEDY}"
)
_RANDOM_REASON = (
    "the forward seeds a random generator, reads its state, or draws from one outside of a tensor "
    "operation, which a graph cannot hold; draw with torch on a tensor, or make the module a leaf"
)
#: Dynamo's messages for code that depends on the values of a tensor.
_DATA_SIGNS = (
    "Data-dependent",
    "data-dependent",
    "Data dependent operator",
    "Dynamic shape operator",
    "unbacked symint",
    "Unsupported Tensor.item()",
)
#: Searched in the failing line only: other lines of a forward may draw as a graph can.
_RANDOM_SIGNS = re.compile(
    r"\b(manual_seed(_all)?|initial_seed|[gs]et_rng_state(_all)?|fork_rng)\b"
    r"|\b(torch|random|cuda)\.seed(_all)?\(|(?<!torch\.)\brandom\.\w+\("
)
#: Methods whose effect no node of a graph stands for, so that it would be lost.
_TRACELESS = {
    "register_hook": "registers a hook on a tensor",
    "register_post_accumulate_grad_hook": "registers a hook on a tensor",
    "backward": "runs a backward pass",
    "share_memory_": "moves a tensor to shared memory",
}
#: Starts of file names of torch, of this library, and of generated code (``<eval_with_key>``).
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


def module_path(source: str) -> str:
    """Convert ``L['module']._modules['layers']._modules['0'].fc`` to ``layers.0.fc``."""
    inner = source.removeprefix("L['module']")
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", inner).lstrip(".")


def checked(target: Any) -> Any:
    """Return the target for the graph, or raise if a graph cannot hold it."""
    # Dynamo calls an ``autograd.Function`` through this wrapper, whose closure holds the class.
    origin = getattr(target, "_origin", None)
    if getattr(origin, "__name__", "") == "produce_trampoline_autograd_apply":
        function = target.__closure__[0].cell_contents
        if not issubclass(function, CheckpointFunction):
            return FunctionApply(function)
        target = function
    reason = _reason_against(target)
    if reason:
        raise TraceError(reason)
    return target


def _reason_against(target: Any) -> str | None:
    name = str(getattr(target, "__name__", target))
    home = getattr(target, "__module__", None) or ""
    if name in _TRACELESS:
        return f"the forward {_TRACELESS[name]}; make the module a leaf"
    is_higher_order = isinstance(target, torch._ops.HigherOrderOperator)
    if target is CheckpointFunction or (is_higher_order and "checkpoint" in name):
        return _CHECKPOINT_REFUSED
    if is_higher_order:
        return f"the forward uses {name}, which a graph cannot hold; make it a leaf"
    if "_vmap_" in name or home.startswith("torch._functorch"):
        # An error between a level's two calls would leave it open for the rest of the process.
        return f"the forward uses torch.func ({name}), which needs a leaf; {_REMEDY}"
    if home.startswith("torch.distributed") or "c10d" in str(target):
        return _COLLECTIVE_REFUSED.format(name)
    if home in ("torch.random", "torch.cuda.random") or _is_numpys(target):
        return _RANDOM_REASON
    return None


def _is_numpys(target: Any) -> bool:
    home = getattr(getattr(target, "f", target), "__module__", None) or ""
    return home.startswith("torch._numpy") and home.rpartition(".")[2] == "random"


def refuse_effects(effects: Iterable[Effect]) -> None:
    """Refuse a forward that changes existing objects; the message names the first."""
    for source, names in effects:
        # Exceptions: the replaced collector of Transformers, and heads that record their problem
        # type.
        noted = source.endswith(".config") and set(names) <= {"problem_type"}
        if noted or source.endswith(("_active_collector", ".COLLECTOR")):
            continue
        if source == RANDOM or f".{RANDOM}." in source:
            raise TraceError(_RANDOM_REASON)
        owner = module_path(source)
        where = ".".join(filter(None, (owner, *names[:1])))
        raise TraceError(
            f"the forward changes attribute {where!r}, which a graph cannot do; make "
            f"{owner or 'the module'} a leaf"
        )


def explain(error: Exception, root: nn.Module) -> TraceError:
    """Return the reason for a failed capture, with the module and the line."""
    frames = list(_user_frames(error))
    where = _module_of(frames, root)
    place = f"{where} in {type(root).__name__}" if where else type(root).__name__
    line = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    reason = _reason(error, frames)
    if where:
        reason = reason.replace("leaf_modules=[...]", f"leaf_modules=[{where!r}]")
    return TraceError(f"cannot trace {place}{line}: {reason}")


def _reason(error: Exception, frames: list[traceback.FrameSummary]) -> str:
    # From the most precise source to guesses: our own refusal, the failing line, the exception's
    # class, dynamo's wording.
    inner = next((e for e in _causes(error) if isinstance(e, TraceError)), None)
    if inner is not None:
        return str(inner)
    text = str(error)
    if frames and _RANDOM_SIGNS.search(frames[0].line or ""):
        return _RANDOM_REASON
    by_value = any(isinstance(each, BY_VALUE) for each in _causes(error))
    if by_value or any(sign in text for sign in _DATA_SIGNS):
        return _DATA_REASON
    if text.startswith("Observed exception"):
        where = f"at `{frames[0].line}`" if frames else "on these inputs"
        return f"the forward itself fails, {where}; if it does not outside of a trace, {_REMEDY}"
    if "Cache" in text:
        return CACHE_REFUSED
    cause = next(
        (e for e in _causes(error) if not type(e).__module__.startswith("torch._dynamo")), None
    )
    if cause is not None:
        first = next(iter(str(cause).strip().splitlines()), "")
        return (
            f"running it on fake tensors failed with {type(cause).__name__}: {first}; if it runs "
            f"on real ones, {_REMEDY}"
        )
    return f"{_dynamos_words(text)}; {_REMEDY}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _dynamos_words(text: str) -> str:
    """Return dynamo's name and explanation of a problem, without its advice for torch.compile."""
    lines = [line.strip() for line in text.splitlines()]
    name = next((line for line in lines if line), "dynamo gave up")
    explanation = next((ln for ln in lines if ln.startswith("Explanation:")), "")
    return f"{name}: {explanation.removeprefix('Explanation:').strip()}" if explanation else name


def _user_frames(error: Exception) -> Iterator[traceback.FrameSummary]:
    """Yield frames outside torch and this library, innermost first."""
    for each in _causes(error):
        real: Iterable[traceback.FrameSummary] = getattr(each, "real_stack", None) or ()
        for stack in (real, traceback.extract_tb(each.__traceback__)):
            for frame in reversed(list(stack)):
                if not frame.filename.startswith(_NOT_THE_USERS):
                    yield frame


def _module_of(frames: list[traceback.FrameSummary], root: nn.Module) -> str:
    """Return the path of the innermost module whose forward contains a frame."""
    forwards = [(path, _lines_of(module)) for path, module in root.named_modules() if path]
    for frame in frames:
        for path, (filename, first, last) in forwards:
            if frame.filename == filename and first <= (frame.lineno or 0) <= last:
                return path
    return ""


def _lines_of(module: nn.Module) -> tuple[str, int, int]:
    if isinstance(module, torch.jit.ScriptModule):
        return "", 0, -1
    code: Any = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return "", 0, -1
    lines = [line for *_, line in code.co_lines() if line]
    return code.co_filename, code.co_firstlineno, max(lines, default=0)
