"""Attention as modules, for models that are written by hand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from slapo.op.attend import BACKENDS, attend


class FlashAttentionOp(nn.Module):
    """Attention without projections, as a module.

    Parameters
    ----------
    attn_op_name
        As `backend` of :func:`slapo.op.attend`.
    apply_causal_mask
        Whether queries look at no later token.
    scale
        ``1 / sqrt(head_size)`` by default.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(2, 5, 4, 8)  # (batch, seq, heads, head_size)
    >>> FlashAttentionOp("sdpa", apply_causal_mask=True)(x, x, x).shape
    torch.Size([2, 5, 4, 8])
    """

    def __init__(
        self,
        attn_op_name: str = "auto",
        apply_causal_mask: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if attn_op_name not in BACKENDS:
            raise ValueError(f"attn_op_name is {attn_op_name!r}; pass one of {list(BACKENDS)}")
        self.attn_op_name = attn_op_name
        self.apply_causal_mask = apply_causal_mask
        self.scale = scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        p: float = 0.0,
    ) -> Tensor:
        """``(batch, seq, heads, head_size)`` each -> the same.

        Parameters
        ----------
        attention_mask
            As `mask` of :func:`slapo.op.attend`; holds beside the causal one.
        p
            Probability of dropout.
        """
        states = (each.transpose(1, 2) for each in (query, key, value))
        output = attend(
            *states,
            mask=attention_mask,
            is_causal=self.apply_causal_mask,
            scale=self.scale,
            dropout=p,
            backend=self.attn_op_name,
        )
        return output.transpose(1, 2)

    def extra_repr(self) -> str:
        """What differs between two of them."""
        return f"{self.attn_op_name!r}, apply_causal_mask={self.apply_causal_mask}"


class FlashAttention(nn.Module):
    """Self or cross attention with its projections.

    Its heads are counted by the size of one, so that it goes on when a schedule shards the
    projections: ``query``, ``key``, ``value`` (or ``qkv``, with ``blocks=3``) along axis 0,
    ``out_proj`` along axis 1.

    Parameters
    ----------
    hidden_size, num_attention_heads
        The second divides the first.
    output_proj
        Whether heads are mixed at the end.
    attn_pdrop, resid_pdrop
        Dropout of the weights, and of the output.
    attn_op_name
        As `backend` of :func:`slapo.op.attend`.
    fused_qkv
        Whether query, key and value are one layer; for self attention only.
    bias
        Of all projections.
    causal
        Whether tokens look at no later ones.

    Raises
    ------
    ValueError
        If the heads do not divide the features.

    Examples
    --------
    >>> import torch
    >>> attention = FlashAttention(16, 4, fused_qkv=True, causal=True)
    >>> attention(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        output_proj: bool = True,
        attn_pdrop: float = 0.0,
        resid_pdrop: float = 0.0,
        attn_op_name: str = "auto",
        fused_qkv: bool = False,
        bias: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"FlashAttention: hidden_size {hidden_size} is not divisible by "
                f"num_attention_heads {num_attention_heads}; pass a number that divides it"
            )
        self.head_size = hidden_size // num_attention_heads
        self.attn_pdrop = attn_pdrop
        self.fused_qkv = fused_qkv
        if fused_qkv:
            self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        else:
            self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
            self.key = nn.Linear(hidden_size, hidden_size, bias=bias)
            self.value = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.attn_op = FlashAttentionOp(attn_op_name, causal)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias) if output_proj else None
        self.resid_pdrop = resid_pdrop

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
    ) -> Tensor:
        """``(batch, seq, hidden)`` -> the same.

        Parameters
        ----------
        attention_mask
            As `mask` of :func:`slapo.op.attend`.
        key_value_states
            ``(batch, kv_seq, hidden)``: what is looked at in place of the tokens themselves.

        Raises
        ------
        ValueError
            For `key_value_states` where query, key and value are one layer.
        """
        query, key, value = self._projected(hidden_states, key_value_states)
        p = self.attn_pdrop if self.training else 0.0
        output: Tensor = self.attn_op(query, key, value, attention_mask, p).flatten(2)
        if self.out_proj is not None:
            output = self.out_proj(output)
        return F.dropout(output, self.resid_pdrop, self.training)

    def _projected(self, states: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
        if self.fused_qkv:
            if others is not None:
                raise ValueError("key_value_states needs projections apart; pass fused_qkv=False")
            parts: tuple[Tensor, ...] = self.qkv(states).chunk(3, dim=-1)
        else:
            seen = states if others is None else others
            parts = (self.query(states), self.key(seen), self.value(seen))
        return tuple(part.unflatten(-1, (-1, self.head_size)) for part in parts)
