"""``python -m slapo.autotune.tune``, the command line by the name of the published package."""

import sys
from types import ModuleType
from typing import Any

from slapo.autotune import search
from slapo.autotune.command import main
from slapo.autotune.database import Database
from slapo.autotune.symbols import Space, Symbol

__all__ = ["Database", "Space", "Symbol", "main"]


class _Callable(ModuleType):
    """A module that can be called as the function :func:`slapo.autotune.tune`.

    Importing it binds it in its package under the name of the function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return search.tune(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main(prog="python -m slapo.autotune.tune"))
