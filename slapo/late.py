"""Attributes of packages that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def attribute(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Import an attribute of a package: a name that `homes` has a module for, or a submodule."""
    if name in homes:
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value
    path = f"{package}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise  # a package that the submodule needs
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
