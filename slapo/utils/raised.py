"""Location of an exception within a model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from slapo.wrapper import innermost


def running_in(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module of `model` running when `error` was raised."""
    paths = {}
    for path, module in model.named_modules():
        paths[id(module)] = paths[id(innermost(module))] = path
    found, frame = None, error.__traceback__
    while frame is not None:
        found = paths.get(id(frame.tb_frame.f_locals.get("self")), found)
        frame = frame.tb_next
    return found


def note_module(model: nn.Module, args: Any, output: Any) -> None:
    """Hook: add the running module to the notes of an exception."""
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    path = None if error is None else running_in(error, model)
    if error is not None and path:
        module = innermost(model.get_submodule(path))
        dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters(recurse=False)}
        of = f" of {', '.join(sorted(dtypes))}" if dtypes else ""
        note = f"slapo: raised in {path!r}, a {type(module).__name__}{of}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
