"""Why a capture failed, in the words of a user: the module, the line, the reason, the remedy."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo.errors import TraceError
from slapo.graph.trace.call import CACHE_REFUSED
from slapo.graph.trace.generators import reason_in
from slapo.graph.trace.leaf_calls import DATA_DEPENDENT

_REMEDY = "make the module a leaf: leaf_modules=[...] or an attribute traceable = False"
DATA_REASON = (
    "Python asks for a value that only real data can tell (an if on a tensor, .item(), nonzero, a "
    f"boolean index); {_REMEDY}"
)
#: What dynamo calls a question about the values of a tensor.
_DATA_SIGNS = (
    "Data-dependent branching",
    "data-dependent",
    "Data dependent operator",
    "Dynamic shape operator",
    "unbacked symint",
    "Unsupported Tensor.item()",
)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


def explain(error: Exception, root: nn.Module) -> TraceError:
    """The reason, after the module and the line where it arose."""
    frames = list(_user_frames(error))
    where = _module_of(frames, root)
    place = f"{where} in {type(root).__name__}" if where else type(root).__name__
    line = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    reason = _reason(error, frames)
    if where:
        reason = reason.replace("leaf_modules=[...]", f"leaf_modules=[{where!r}]")
    return TraceError(f"cannot trace {place}{line}: {reason}")


def _reason(error: Exception, frames: list[traceback.FrameSummary]) -> str:
    inner = next((e for e in _causes(error) if isinstance(e, TraceError)), None)
    if inner is not None:
        return str(inner)
    text = str(error)
    generators = reason_in(frames[0].line or "") if frames else None
    if generators is not None:
        return generators
    if any(isinstance(e, DATA_DEPENDENT) for e in _causes(error)) or any(
        sign in text for sign in _DATA_SIGNS
    ):
        return DATA_REASON
    if text.startswith("Observed exception"):
        where = f"at `{frames[0].line}`" if frames else "on these inputs"
        return f"the forward itself fails, {where}"
    if "Cache" in text:
        return CACHE_REFUSED
    cause = next((e for e in _causes(error) if not _is_dynamos(e)), None)
    if cause is not None:
        return (
            f"running it on fake tensors failed with {type(cause).__name__}: {_first(cause)}; if "
            f"it runs on real ones, {_REMEDY}"
        )
    return f"{_dynamos_words(text)}; {_REMEDY}"


@contextmanager
def told_once() -> Iterator[None]:
    """Within the block torch does not log the errors of fake kernels, which it raises too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keep(entry: logging.LogRecord) -> bool:
        return "run meta" not in str(entry.msg)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_dynamos(error: BaseException) -> bool:
    return type(error).__module__.startswith("torch._dynamo")


def _first(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _dynamos_words(text: str) -> str:
    """What dynamo names and how it explains it, without its advice for torch.compile."""
    lines = [line.strip() for line in text.splitlines()]
    name = next((line for line in lines if line), "dynamo gave up")
    told = next((ln for ln in lines if ln.startswith("Explanation:")), "")
    return f"{name}: {told.removeprefix('Explanation:').strip()}" if told else name


def _user_frames(error: Exception) -> Iterator[traceback.FrameSummary]:
    """Frames that belong neither to torch nor to this library, innermost first."""
    stacks: list[Iterable[traceback.FrameSummary]] = []
    for each in _causes(error):
        stacks.append(getattr(each, "real_stack", None) or ())
        stacks.append(traceback.extract_tb(each.__traceback__))
    for stack in stacks:
        for frame in reversed(list(stack)):
            if not frame.filename.startswith(_NOT_THE_USERS):
                yield frame


def _module_of(frames: list[traceback.FrameSummary], root: nn.Module) -> str:
    """The path of the innermost module whose forward a frame is in."""
    forwards = [(path, _lines_of(module)) for path, module in root.named_modules() if path]
    for frame in frames:
        for path, (filename, first, last) in forwards:
            if frame.filename == filename and first <= (frame.lineno or 0) <= last:
                return path
    return ""


def _lines_of(module: nn.Module) -> tuple[str, int, int]:
    if isinstance(module, torch.jit.ScriptModule):
        return "", 0, -1  # TorchScript has no lines of Python
    forward = vars(module).get("_forward", type(module).forward)  # traced ones have their own
    code: Any = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return "", 0, -1
    lines = [line for *_, line in code.co_lines() if line]
    return code.co_filename, code.co_firstlineno, max(lines, default=0)
