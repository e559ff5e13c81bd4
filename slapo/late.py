"""Lazily imported attributes of packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from slapo.errors import with_nearest


def attribute(package: str, name: str, homes: Mapping[str, str]) -> Any:
    """Import an attribute of a package: a name that `homes` maps to a module, or a submodule."""
    if name in homes:
        value = getattr(importlib.import_module(homes[name]), name)
        # Later accesses find the attribute and do not come here.
        setattr(sys.modules[package], name, value)
        return value
    path = f"{package}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise  # a dependency of the submodule is missing
        module = sys.modules[package]
        known = [each for each in vars(module).get("__all__", homes) if each[0] != "_"]
        said = with_nearest(name, known, f"module {package!r} has no attribute {name!r}")
        raise AttributeError(said, name=name, obj=module) from None
