"""Attention: a function with several kernels, and modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo.errors import MissingPackageError
from slapo.logger import get_logger
from slapo.random import TENSOR_PARALLEL, get_rng_tracker

logger = get_logger()

BACKENDS = ("auto", "eager", "sdpa", "flash", "xformers")

#: Names in published schedules for kernels of two packages.
_PUBLISHED = {
    **dict.fromkeys(("native_xformers", "cutlass", "triton"), "xformers"),
    **dict.fromkeys(("native_flash_attn", "flash_attn", "cuda"), "flash"),
}
#: Number of keys from which SDPA is faster than eager attention with a per-pair bias, measured on a
#: CPU in float32. SDPA's fast kernels do not accept a bias that needs a gradient.
_LONG = 1024
_HALVES = (torch.float16, torch.bfloat16)
#: Query, key and value.
_States = tuple[Tensor, Tensor, Tensor]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot product attention: ``softmax(scale * query @ key.T + bias) @ value``.

    Parameters
    ----------
    query
        ``(batch, heads, seq, head_size)``.
    key, value
        ``(batch, kv_heads, kv_seq, head_size)``; each of their heads serves ``heads / kv_heads``
        query heads.
    mask
        Four dimensions, broadcastable to ``(batch, heads, seq, kv_seq)``. Either booleans, True for
        keys that a query may attend to, or values to add to the logits.
    bias
        Further values to add to the logits, such as a learned relative position bias.
    is_causal
        Hide later tokens. Queries are the last tokens of the keys: query ``i`` sees keys up to ``i
        + kv_seq - seq``. A mask applies in addition.
    scale
        ``1 / sqrt(head_size)`` by default.
    dropout
        Dropout probability of the attention weights. If the random tracker has a tensor-parallel
        state (:func:`slapo.set_random_seed`), that state draws the mask, since heads are sharded
        then.
    backend
        ``"eager"``, ``"sdpa"`` (torch's), ``"flash"`` (the package flash-attn; CUDA, half
        precision, neither mask nor bias), ``"xformers"`` (CUDA), or ``"auto"``: eager on CPU for a
        bias over few keys in float32, else sdpa, whose kernels torch chooses.

    Returns
    -------
    Tensor
        ``(batch, heads, seq, head_size)``; zeros or a mean of the values for a query without
        visible keys, never nan.

    Raises
    ------
    ValueError
        If shapes do not match, or the named backend does not support the arguments.
    MissingPackageError
        If the backend's package is not installed.

    Examples
    --------
    >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    >>> attend(q, k, k, is_causal=True).shape
    torch.Size([2, 4, 5, 8])
    """
    check_available(backend, query)
    _check_shapes(query, key, value)
    _check_mask(mask)
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias is of type {bias.dtype}; pass a float bias, or a mask as mask=")
    if backend == "auto":
        # In half precision eager attention rounds the logits, and its gradients are worse.
        few = key.shape[-2] < _LONG and query.device.type == "cpu" and query.dtype not in _HALVES
        backend = "eager" if bias is not None and few else "sdpa"
    # Kernels take one tensor to add to the logits, so both become one.
    if bias is not None and mask is not None:
        is_bool = mask.dtype == torch.bool
        mask = torch.where(mask, bias, _least(bias.dtype)) if is_bool else mask + bias
    elif bias is not None:
        mask = bias
    with drawing(dropout):
        return _KERNELS[backend]((query, key, value), mask, is_causal, scale, dropout)


def known_backend(name: Any) -> str:
    """Return the backend for a name; ``"auto"`` for a published kernel that this machine lacks.

    Raises ``ValueError`` for an unknown name.
    """
    if name in BACKENDS:
        return str(name)
    if name not in _PUBLISHED:
        raise ValueError(f"attn_op_name is {name!r}; pass one of {list(BACKENDS)}")
    try:
        check_available(_PUBLISHED[name])
    except (MissingPackageError, ValueError) as error:
        logger.info('attn_op_name=%r means "auto" here: %s', name, error)
        return "auto"
    return _PUBLISHED[name]


def drawing(dropout: float) -> AbstractContextManager[None]:
    """Draw the dropout of this rank's heads from the tracker's tensor-parallel state."""
    tracker = get_rng_tracker()
    # The tracker may hold only states of the user's own.
    is_split = dropout > 0 and TENSOR_PARALLEL in tracker.get_states()
    return tracker.fork() if is_split else nullcontext()


def check_available(backend: str, query: Tensor | None = None) -> None:
    """Raise for an unknown backend, or one that cannot run on this machine or this query."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; pass one of {list(BACKENDS)}")
    package = {"flash": "flash_attn", "xformers": "xformers"}.get(backend)
    if package is None:
        return
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"attention by {backend!r} needs the package {package!r}, which is not installed; "
            "install it, or use 'sdpa', which has such a kernel on CUDA"
        )
    if not torch.cuda.is_available() or (query is not None and query.device.type != "cuda"):
        raise ValueError(f"attention by {backend!r} runs on CUDA only; use 'sdpa' elsewhere")
    if backend == "flash" and query is not None and query.dtype not in _HALVES:
        raise ValueError(
            f"attention by 'flash' needs half precision, but the query is {query.dtype}; use "
            "'sdpa', or convert the model to bfloat16"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(each.shape) for each in (query, key, value)]
    fits = all(len(shape) == 4 for shape in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fits or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query, key and value shapes {shapes} do not match; pass (batch, heads, seq, "
            "head_size), with as many key as value heads, which divide the query heads"
        )


def _check_mask(mask: Tensor | None) -> None:
    """Raise for ambiguous masks: fewer than four dimensions, or integers."""
    if mask is not None and mask.dim() != 4:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} is ambiguous: axis 0 may be samples or queries; "
            "pass four axes: mask[:, None, None] of (batch, kv_seq), mask[None, None] of (seq, "
            "kv_seq)"
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask is of type {mask.dtype}, neither bool nor floating point; pass mask.bool() if "
            "1 marks positions to attend to"
        )


# --- masks ---------------------------------------------------------------------------------------
def _least(dtype: torch.dtype) -> float:
    # Not -inf: the softmax of a row without visible keys would be nan, and so would its gradient.
    return torch.finfo(dtype).min


def as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to values to add to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, _least(dtype))


def both_masks(mask: Tensor | None, seen: Tensor) -> Tensor:
    """Restrict a mask to the pairs that `seen`, a boolean mask, allows."""
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, _least(mask.dtype))


def causal_mask(query: Tensor, key: Tensor, first: bool = False) -> Tensor:
    """``(seq, kv_seq)`` mask, True for visible keys; queries are the last tokens, or the first."""
    rows, columns = query.shape[-2], key.shape[-2]
    whole = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return whole.tril(0 if first else columns - rows)


# --- kernels -------------------------------------------------------------------------------------
def _repeated(states: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values, once for each query head."""
    own = states.shape[1]
    if own == heads:
        return states
    # Query head i uses key head i // (heads / own), so copies of one head are neighbors.
    return states[:, :, None].expand(-1, -1, heads // own, -1, -1).flatten(1, 2)


def _eager(
    states: _States, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float
) -> Tensor:
    """Reference attention; weights in float32, as in Transformers."""
    query = states[0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (_repeated(each, query.shape[1]) for each in states[1:])
    weights = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        mask = both_masks(mask, causal_mask(query, key))
    least = _least(weights.dtype)
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, least)
    elif mask is not None:  # clamp: a row of only -inf would give nan
        weights = (weights + mask).clamp(min=least)
    precise = torch.promote_types(weights.dtype, torch.float32)
    weights = weights.softmax(-1, dtype=precise).to(query.dtype)
    return torch.matmul(F.dropout(weights, dropout), value)


def _sdpa(
    states: _States, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float
) -> Tensor:
    query, key, value = states
    # Torch's flag aligns query i with key i, and excludes a mask.
    plain = mask is None and query.shape[-2] == key.shape[-2]
    if is_causal and not plain:
        mask = both_masks(mask, causal_mask(query, key))
    # Kernels for grouped heads take no mask; with one, torch would fall back to the math kernel.
    grouped = mask is None and query.shape[1] != key.shape[1]
    if not grouped:
        key, value = (_repeated(each, query.shape[1]) for each in (key, value))
    causal = bool(is_causal and plain)  # the kernel takes no symbolic boolean
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )


def _flash(
    states: _States, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float
) -> Tensor:
    if mask is not None:
        raise ValueError(
            "attention by 'flash' takes neither mask nor bias; use 'sdpa', or leave padding out"
        )
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    moved = (each.transpose(1, 2) for each in states)
    # Since version 2.1 its causal flag aligns the last query with the last key, as is_causal does
    # here.
    output: Tensor = flash_attn_func(
        *moved, dropout_p=dropout, softmax_scale=scale, causal=is_causal
    )
    return output.transpose(1, 2)


def _xformers(
    states: _States, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float
) -> Tensor:
    from xformers import ops  # type: ignore[import-not-found, unused-ignore]

    query = states[0]
    key, value = (_repeated(each, query.shape[1]) for each in states[1:])
    mask = both_masks(mask, causal_mask(query, key)) if is_causal else mask
    if mask is not None:  # it needs a value for every pair
        pairs = (*query.shape[:-1], key.shape[-2])
        mask = as_added(mask, query.dtype).to(query.dtype).expand(pairs)
    # xformers and flash-attn take (batch, seq, heads, head_size).
    moved = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    output: Tensor = ops.memory_efficient_attention(*moved, attn_bias=mask, p=dropout, scale=scale)
    return output.transpose(1, 2)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "flash": _flash,
    "xformers": _xformers,
}


# --- modules -------------------------------------------------------------------------------------
class FlashAttentionOp(nn.Module):
    """Attention without projections, as a module.

    Parameters
    ----------
    attn_op_name
        As `backend` of :func:`slapo.op.attend`.
    apply_causal_mask
        Hide later tokens.
    scale
        ``1 / sqrt(head_size)`` by default.

    Raises
    ------
    ValueError
        For an unknown backend.

    Examples
    --------
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
        self.attn_op_name = known_backend(attn_op_name)
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
        """Attend; inputs and output have shape ``(batch, seq, heads, head_size)``.

        Parameters
        ----------
        attention_mask
            As `mask` of :func:`slapo.op.attend`; applies in addition to the causal mask.
        p
            Dropout probability.
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
        return f"{self.attn_op_name!r}, apply_causal_mask={self.apply_causal_mask}"


class FlashAttention(nn.Module):
    """Self or cross attention with its projections.

    The forward derives the number of heads from the head size, so schedules can shard the
    projections: ``query``, ``key``, ``value`` (or ``qkv``, with ``blocks=3``) along axis 0,
    ``out_proj`` along axis 1.

    Parameters
    ----------
    hidden_size, num_attention_heads
        The second divides the first.
    output_proj
        Add a projection that mixes the heads.
    attn_pdrop, resid_pdrop
        Dropout probability of the attention weights, and of the output.
    attn_op_name
        As `backend` of :func:`slapo.op.attend`.
    fused_qkv
        Compute query, key and value in one layer; for self attention only.
    bias
        Add a bias to all projections.
    causal
        Hide later tokens.

    Raises
    ------
    ValueError
        If the number of heads does not divide the hidden size.

    Examples
    --------
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
        """Attend; input and output have shape ``(batch, seq, hidden)``.

        Parameters
        ----------
        attention_mask
            As `mask` of :func:`slapo.op.attend`.
        key_value_states
            ``(batch, kv_seq, hidden)``: source of keys and values in cross attention.

        Raises
        ------
        ValueError
            For `key_value_states` with ``fused_qkv=True``.
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
                raise ValueError(
                    "key_value_states needs separate projections; pass fused_qkv=False"
                )
            parts: tuple[Tensor, ...] = self.qkv(states).chunk(3, dim=-1)
        else:
            seen = states if others is None else others
            parts = (self.query(states), self.key(seen), self.value(seen))
        # -1: a shard of a projection has fewer heads.
        return tuple(part.unflatten(-1, (-1, self.head_size)) for part in parts)
