"""Feed-forward blocks: plain, and gated as in Llama, Gemma and T5.

Shazeer, "GLU Variants Improve Transformer" (2020), for gated blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.hooks import has_forward_hooks
from slapo.op import liger
from slapo.op.dispatch import is_plain
from slapo.op.fused_bias import Activation, is_new_gelu
from slapo.op.linear import LinearWithAct, LinearWithDropout

if TYPE_CHECKING:
    from typing_extensions import Self

_BACKENDS = ("auto", "torch", "liger")
#: SiLU outside torch by qualified name, so that nothing is imported for it.
_FOREIGN_SILU = "transformers.activations.SiLUActivation"


def gated_silu(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    """``silu(gate) * up``, which saves only its two operands for the backward pass.

    Parameters
    ----------
    gate, up
        ``(..., features)``, of one shape and dtype.
    backend
        ``"torch"``, ``"liger"`` (the package liger-kernel; CUDA), or ``"auto"``: liger if it is
        installed and supports the tensors. Its backward pass overwrites `gate` and `up`, unless
        they are leaves or the graph is retained.

    Returns
    -------
    Tensor
        ``(..., features)``.

    Raises
    ------
    ValueError
        For an unknown backend, or tensors that ``"liger"`` does not support.
    MissingPackageError
        If ``"liger"`` is not installed.

    Notes
    -----
    Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), for the activation
    that is recomputed in the backward pass.

    Examples
    --------
    >>> gated_silu(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([-0.2689,  0.0000,  2.1932])
    """
    if _is_for_liger("gated_silu", backend, gate, up):
        return cast(Tensor, liger.GatedByLiger.apply(gate, up, "silu"))
    # On CPU the recomputation saves memory without a measurable slowdown.
    is_alike = gate.shape == up.shape and gate.dtype == up.dtype
    if is_alike and gate.device.type == "cpu" and is_plain(gate, up):
        return cast(Tensor, _GatedSiLU.apply(gate, up))
    return F.silu(gate) * up


def gated_gelu(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    """``gelu(gate, approximate="tanh") * up``.

    On CPU the activation is saved, because it takes longer to recompute than SiLU.

    Parameters
    ----------
    gate, up
        ``(..., features)``, of one shape and dtype.
    backend
        As for :func:`gated_silu`.

    Returns
    -------
    Tensor
        ``(..., features)``.

    Raises
    ------
    ValueError, MissingPackageError
        As for :func:`gated_silu`.

    Examples
    --------
    >>> gated_gelu(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor([-0.1588,  0.0000,  2.5236])
    """
    if _is_for_liger("gated_gelu", backend, gate, up):
        return cast(Tensor, liger.GatedByLiger.apply(gate, up, "gelu"))
    return F.gelu(gate, approximate="tanh") * up


def _is_for_liger(what: str, backend: str, gate: Tensor, up: Tensor) -> bool:
    if backend not in _BACKENDS:
        raise ValueError(f"{what}: unknown backend {backend!r}; pass one of {list(_BACKENDS)}")
    if backend == "liger":
        liger.check_fits(what, gate, up)
    return backend == "liger" or (backend == "auto" and liger.fits(gate, up))


class _GatedSiLU(torch.autograd.Function):
    """``silu(gate) * up``; the backward pass recomputes SiLU."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        # In place on the fresh result, so that no third tensor is allocated.
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # Rounds like the separate operations.
        gate, up = ctx.saved_tensors
        wants_gate, wants_up = ctx.needs_input_grad
        of_silu = grad * up if wants_gate else None
        if torch.is_grad_enabled():  # differentiable operations, for higher-order gradients
            opened = torch.sigmoid(gate)
            slope = opened * (1 + gate * (1 - opened))
            return None if of_silu is None else of_silu * slope, F.silu(gate) * grad
        if of_silu is not None:
            torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=of_silu)
        return of_silu, F.silu(gate).mul_(grad) if wants_up else None


def _gated(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``act(gate) * up``, fused unless a trace, compiler or hook must see `act`."""
    # Hooks of the activation would not run if it were fused.
    is_free = not (isinstance(act, nn.Module) and has_forward_hooks(act))
    if is_free and is_plain(gate, up):
        kind = type(act)
        if kind is nn.SiLU or f"{kind.__module__}.{kind.__qualname__}" == _FOREIGN_SILU:
            return gated_silu(gate, up)
        if is_new_gelu(act) and liger.fits(gate, up):
            return gated_gelu(gate, up)
    return act(gate) * up


class FusedMLP(nn.Module):
    """``dropout(fc_out(act(fc_in(x))))``, with fused bias additions.

    Parameters
    ----------
    hidden_size
        Features of the input and of the output.
    intermediate_size
        Features in between.
    orig_act
        Activation: a name from Transformers configs, such as ``"gelu_new"``, a function or a
        module.
    resid_pdrop
        Dropout probability of the output.
    use_torchscript
        Run the second bias addition and the dropout by TorchScript.

    Examples
    --------
    >>> FusedMLP(4, 16, "gelu_new", resid_pdrop=0.1)(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        orig_act: str | Activation,
        resid_pdrop: float,
        use_torchscript: bool = False,
    ) -> None:
        super().__init__()
        self.fc_in = LinearWithAct(hidden_size, intermediate_size, orig_act)
        self.fc_out = LinearWithDropout(
            intermediate_size, hidden_size, p=resid_pdrop, use_torchscript=use_torchscript
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(..., hidden_size)`` -> the same."""
        output: Tensor = self.fc_out(self.fc_in(hidden_states))
        return output


class SameChildren(nn.Module):
    """Base of blocks that :meth:`like` builds around the children of another module."""

    #: Names of the children.
    parts: ClassVar[tuple[str, ...]]

    @classmethod
    def like(cls, module: nn.Module) -> Self:
        """Build the block with the children and the other attributes, such as sizes, of `module`.

        Hooks, shards and collectives on the children stay.

        Parameters
        ----------
        module
            A module with exactly the children in ``parts``.

        Raises
        ------
        ValueError
            If it has other children, tensors of its own, or a forward set on the object.

        Examples
        --------
        >>> GatedMLP.like(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: GatedMLP.like(Linear): it has ...
        """
        children = dict(module.named_children())
        tensors = [*module._parameters, *module._buffers]
        own = vars(module)
        if set(children) != set(cls.parts) or tensors or "forward" in own:
            raise ValueError(
                f"{cls.__name__}.like({type(module).__name__}): it has the children "
                f"{list(children)}, the tensors "
                f"{tensors}{' and a forward put on it' if 'forward' in own else ''}; pass a "
                f"module with only {list(cls.parts)}, or leave it unchanged (kernels=False)"
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        # Names with an underscore are nn.Module's own tables, such as hooks, which replace() moves.
        new.__dict__.update({name: own[name] for name in own if not name.startswith("_")})
        for name, child in children.items():  # in their order, which is the order of the parameters
            new.add_module(name, child)
        return new


class GatedMLP(SameChildren):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, with one function for the product.

    Built by :meth:`like` around the children of the original.

    Examples
    --------
    >>> class MLP(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)
    ...         self.down_proj, self.act_fn = nn.Linear(6, 4), nn.SiLU()
    >>> GatedMLP.like(MLP())(torch.ones(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    parts: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj", "act_fn")

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """``(..., hidden_size)`` -> the same."""
        return cast(Tensor, self.down_proj(_gated(self.act_fn, self.gate_proj(x), self.up_proj(x))))


class GatedDense(GatedMLP):
    """``wo(dropout(act(wi_0(x)) * wi_1(x)))`` with T5's names; `wo` may have another dtype.

    Examples
    --------
    >>> GatedDense.parts
    ('wi_0', 'wi_1', 'wo', 'dropout', 'act')
    """

    parts = ("wi_0", "wi_1", "wo", "dropout", "act")

    wi_0: nn.Module
    wi_1: nn.Module
    wo: nn.Module
    dropout: nn.Module
    act: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``(..., hidden_size)`` -> the same."""
        states = _gated(self.act, self.wi_0(hidden_states), self.wi_1(hidden_states))
        states = self.dropout(states)
        # T5's last layer stays in float32 if the others are in half precision.
        weight = getattr(self.wo, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype not in (states.dtype, torch.int8):
            states = states.to(weight.dtype)
        return cast(Tensor, self.wo(states))
