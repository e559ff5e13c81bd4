"""``.checkpoint()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from torch import fx, nn

from slapo.graph.match.subgraph_view import subgraph_view
from slapo.graph.rewrite.effects import HasGraph
from slapo.graph.rewrite.plan import Plan, subgraph_inputs
from slapo.graph.rewrite.reorder import check_recompute
from slapo.graph.rewrite.rules import MadePerText, Pick, carry_out
from slapo.node import Node
from slapo.op.checkpoint import CheckPointWrapper, OrderArgs
from slapo.primitives.base import Primitive
from slapo.primitives.subgraphs import Subgraphs, parse_one
from slapo.primitives.wrapping import check_not_wrapped, wrap


class CheckpointPrimitive(Primitive, name="checkpoint"):
    """Recompute activations in the backward pass instead of storing them.

    | the module: ``mod(x) --> checkpoint(mod, x)``
    | a subgraph: ``b = f(x); c = g(b) --> c = CheckPointWrapper_0(x)``

    All names stay unchanged: in ``state_dict``, ``named_parameters`` and schedule paths. The
    recomputation uses the same random states as the forward pass, including the tracker's.

    Parameters
    ----------
    subgraph
        One match of ``find``; None checkpoints the module itself.
    order_args_fn
        Function from the arguments of a call to the tuple of positional arguments for the
        checkpointed module.
    use_reentrant
        As in ``torch.utils.checkpoint.checkpoint``.

    Raises
    ------
    ValueError
        If the module is checkpointed already, if several subgraphs are given, or if the subgraph
        cannot become one call or cannot be recomputed (see :mod:`slapo.graph.rewrite.reorder`).

    Notes
    -----
    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    Examples
    --------
    >>> import slapo
    >>> from torch import nn
    >>> sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> sch["0"].checkpoint().mod
    CheckPointWrapper(Linear)
    >>> list(sch.mod.state_dict())
    ['0.weight', '0.bias']
    """

    @staticmethod
    def apply(
        sch: Node,
        /,
        subgraph: Any = None,
        order_args_fn: Annotated[
            OrderArgs | None, "from a call's arguments to an ordered tuple of them"
        ] = None,
        use_reentrant: bool = False,
    ) -> Node:
        if subgraph is None:
            check_not_wrapped(sch, CheckPointWrapper)
            wrap(sch, CheckPointWrapper(sch.mod, order_args_fn, use_reentrant))
        else:
            _checkpoint_subgraph(parse_one(sch, subgraph), order_args_fn, use_reentrant)
        sch.metadata.primitives["checkpoint"]["enabled"] = True
        return sch


def _checkpoint_subgraph(
    subgraphs: Subgraphs, order_args_fn: OrderArgs | None, use_reentrant: bool
) -> None:
    (chain,), (pick,) = subgraphs.chains, subgraphs.picks or (None,)
    rule = Checkpoint(subgraphs.gm, chain, order_args_fn, use_reentrant, pick)
    # The checkpointed operations still use these modules by name, so the modules must not move.
    call = carry_out(subgraphs.gm, rule, keep_modules=True)
    subgraphs.owner.refresh([str(call.target)])


class Checkpoint(MadePerText):
    """A module that checkpoints a chain of operations and uses the traced module's state."""

    def __init__(
        self,
        module: fx.GraphModule,
        chain: Sequence[fx.Node],
        order_args_fn: OrderArgs | None,
        use_reentrant: bool,
        pick: Pick | None,
    ) -> None:
        self.order_args_fn, self.use_reentrant = order_args_fn, use_reentrant
        super().__init__(module, chain, CheckPointWrapper.__name__, pick)

    def __str__(self) -> str:
        return f"the checkpoint at {self.location}"

    def _planned(self, gm: HasGraph, chains: Any, bindings: Any) -> Plan:
        plan = super()._planned(gm, chains, bindings)
        check_recompute(gm, plan.nodes)
        return plan

    def _make(self, gm: HasGraph, home: nn.Module, chain: list[fx.Node]) -> nn.Module:
        view = subgraph_view(home, chain, subgraph_inputs(chain))
        return CheckPointWrapper.around_view(view, self.order_args_fn, self.use_reentrant)
