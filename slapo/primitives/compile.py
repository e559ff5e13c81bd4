"""``.compile()``."""

from __future__ import annotations

from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called, check_runs


class CompilePrimitive(Primitive, name="compile"):
    """Compile a module with ``torch.compile``, starting with its next call.

    ``mod(x) --> torch.compile(mod)(x)``

    The module object and its names stay the same. After ``sch.select("h.*").compile()`` all layers
    of a stack share the code of one. This compiles less than the full model and leaves the
    decisions of the model's own forward in Python.

    Parameters
    ----------
    fullgraph, dynamic, backend, mode
        As in ``torch.compile``.

    Raises
    ------
    ValueError
        If the module has no forward.

    Examples
    --------
    >>> import torch, slapo
    >>> sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> sch["0"].compile(backend="eager").mod(torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    @staticmethod
    def apply(
        sch: Node,
        /,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: str = "inductor",
        mode: str | None = None,
    ) -> Node:
        check_runs(sch)
        check_called(sch)
        # Module.compile() compiles __call__ with all hooks, in place. torch.compile() would return
        # a wrapper with other names.
        sch.mod.compile(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode)
        sch.metadata.primitives["compile"]["enabled"] = True
        return sch
