"""Modules whose class has the name that the user chose, and that can be copied and pickled."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def instance_of(base: type[M], name: str) -> M:
    """Make an instance of a subclass that exists for its name; also how a pickle of it is read.

    Parameters
    ----------
    base : type
        A class of modules that is made without arguments.
    name : str
        Name of the subclass.

    Returns
    -------
    torch.nn.Module
        A new module.

    Examples
    --------
    >>> instance_of(nn.Sequential, "BiasGelu")
    BiasGelu()
    """
    return type(name, (base,), {"__doc__": base.__doc__, "__module__": base.__module__})()
