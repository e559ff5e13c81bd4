"""Attributes of packages that are imported when they are first asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Import a submodule that is asked for as an attribute; ``AttributeError`` if there is none."""
    path = f"{package}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise  # a package that the submodule needs
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
