"""``.compile()``."""

from __future__ import annotations

import torch

from slapo.node import Node
from slapo.primitives.base import Primitive
from slapo.primitives.wrapping import check_called, check_runs
from slapo.wrapper import innermost


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
        If the module is compiled already, by this primitive or by TorchScript, or has no forward.

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
        kind = type(innermost(sch.mod)).__name__
        if isinstance(innermost(sch.mod), torch.jit.ScriptModule):
            raise ValueError(f"{kind} is compiled by TorchScript; leave this call out")
        if sch.mod._compiled_call_impl is not None:
            raise ValueError(f"{kind} is compiled already; leave the second call out")
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"torch.compile has no backend {backend!r}; pass one of {known}")
        # Module.compile() compiles __call__ with all hooks, in place. torch.compile() would return
        # a wrapper with other names.
        sch.mod.compile(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode)
        sch.metadata.primitives["compile"]["enabled"] = True
        return sch
