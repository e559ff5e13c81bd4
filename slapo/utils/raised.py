"""Where in a model an exception was raised."""

from __future__ import annotations

from torch import nn

from slapo.wrapper import innermost


def running_in(error: BaseException, model: nn.Module) -> str | None:
    """The path of the innermost module of `model` that was running when `error` was raised."""
    paths = {}
    for path, module in model.named_modules():
        paths[id(module)] = paths[id(innermost(module))] = path
    found, frame = None, error.__traceback__
    while frame is not None:
        found = paths.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return found
