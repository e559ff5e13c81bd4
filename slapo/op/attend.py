"""Attention as a function, with several kernels behind it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from slapo.errors import MissingPackageError
from slapo.random import TENSOR_PARALLEL, get_rng_tracker

BACKENDS = ("auto", "eager", "sdpa", "flash", "xformers")
#: From so many keys on, SDPA is faster than eager attention with a bias for each pair (measured on
#: a CPU in float32: its fast kernels do not take one that needs a gradient).
_LONG = 1024
_HALVES = (torch.float16, torch.bfloat16)


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
        heads of the query.
    mask
        Of four dimensions, broadcastable to ``(batch, heads, seq, kv_seq)``: booleans, True where
        a query may look; or numbers to add.
    bias
        Numbers to add as well, such as a learned bias of relative positions.
    is_causal
        Whether queries look at no later token. They are the last ones of the keys: query ``i`` sees
        keys up to ``i + kv_seq - seq``. A mask holds beside it.
    scale
        ``1 / sqrt(head_size)`` by default.
    dropout
        Probability for each weight. Where the random tracker has a state
        (:func:`slapo.set_random_seed`), it is drawn from that: heads lie on several ranks then.
    backend
        ``"eager"``, ``"sdpa"`` (torch's), ``"flash"`` (the package flash-attn; CUDA, half
        precision, neither mask nor bias), ``"xformers"`` (CUDA), or ``"auto"``: eager on CPU for a
        bias over few keys in float32, else sdpa, whose kernels torch chooses.

    Returns
    -------
    Tensor
        ``(batch, heads, seq, head_size)``; zeros or a mean of the values for a query that may look
        nowhere, never nan.

    Raises
    ------
    ValueError
        For shapes that do not fit, or what the named backend cannot do.
    MissingPackageError
        If it is not installed.

    Examples
    --------
    >>> q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    >>> attend(q, k, k, is_causal=True).shape
    torch.Size([2, 4, 5, 8])
    """
    _check(query, key, value, backend)
    _check_mask(mask)
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias is of type {bias.dtype}; pass numbers to add, or a mask as mask=")
    if backend == "auto":
        backend = "eager" if bias is not None and _is_better_eager(query, key) else "sdpa"
    check_available(backend, query)
    both = _joined(mask, bias)
    with drawing(dropout):
        return _KERNELS[backend](query, key, value, both, is_causal, scale, dropout)


def _is_better_eager(query: Tensor, key: Tensor) -> bool:
    """With a bias: faster; in half precision eager rounds the logits, and gradients are worse."""
    few = key.shape[-2] < _LONG and query.device.type == "cpu"
    return few and query.dtype not in _HALVES


def drawing(dropout: float) -> AbstractContextManager[None]:
    """Where numbers for heads of this rank are drawn from."""
    tracker = get_rng_tracker()
    # A tracker may have other states only, which are the user's own.
    is_split = dropout > 0 and TENSOR_PARALLEL in tracker.get_states()
    return tracker.fork() if is_split else nullcontext()


def check_available(backend: str, tensor: Tensor | None = None) -> None:
    """Refuse a backend that this machine, or this tensor, cannot have.

    Raises
    ------
    MissingPackageError
        If its package is not installed.
    ValueError
        If it needs an accelerator, or another type.
    """
    package = {"flash": "flash_attn", "xformers": "xformers"}.get(backend)
    if package is None:
        return
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"attention by {backend!r} needs the package {package!r}, which is not installed; "
            "install it, or take 'sdpa', which has such a kernel on CUDA"
        )
    if not torch.cuda.is_available() or (tensor is not None and tensor.device.type != "cuda"):
        raise ValueError(f"attention by {backend!r} runs on CUDA only; take 'sdpa' elsewhere")
    if tensor is not None and backend == "flash" and tensor.dtype not in _HALVES:
        raise ValueError(
            f"attention by 'flash' takes half precision, and the query is {tensor.dtype}; take "
            "'sdpa', or turn the model into bfloat16"
        )


def _check(query: Tensor, key: Tensor, value: Tensor, backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"attention by {backend!r} is not known; pass one of {list(BACKENDS)}")
    shapes = [tuple(each.shape) for each in (query, key, value)]
    fits = all(len(shape) == 4 for shape in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fits or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query, key and value of shapes {shapes} do not fit; pass (batch, heads, seq, "
            "head_size), with as many heads of keys as of values, which divide those of queries"
        )


def _check_mask(mask: Tensor | None) -> None:
    """Refuse what would mask something else, or next to nothing, as integers that are added."""
    if mask is not None and mask.dim() != 4:
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} may mean samples or queries by its first "
            "dimension; pass four: mask[:, None, None] of (batch, kv_seq), mask[None, None] of "
            "(seq, kv_seq)"
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask is of type {mask.dtype}: neither booleans nor numbers to add; pass mask.bool() "
            "where 1 is where a query may look"
        )


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Mask and bias as one."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return mask + bias


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """``(seq, kv_seq)``: True where a query may look."""
    rows, columns = query.shape[-2], key.shape[-2]
    whole = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return whole.tril(columns - rows)


def _with_causal(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    causal = _causal(query, key)
    if mask is None:
        return causal
    if mask.dtype == torch.bool:
        return mask & causal
    return mask.masked_fill(~causal, torch.finfo(mask.dtype).min)


def repeated(states: Tensor, heads: int) -> Tensor:
    """Heads of keys or values, once for each head of queries."""
    batch, own, length, size = states.shape
    if own == heads:
        return states
    return states[:, :, None].expand(batch, own, heads // own, length, size).flatten(1, 2)


# --- kernels -------------------------------------------------------------------------------------
def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """The reference: weights in float32, as Transformers computes them."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key, value = (repeated(each, query.shape[1]) for each in (key, value))
    weights = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        mask = _with_causal(query, key, mask)
    if mask is not None:
        lowest = torch.finfo(weights.dtype).min
        is_bool = mask.dtype == torch.bool
        # From below: a row of -inf alone would be nan.
        masked = weights.masked_fill(~mask, lowest) if is_bool else weights + mask
        weights = masked if is_bool else masked.clamp(min=lowest)
    precise = torch.promote_types(weights.dtype, torch.float32)
    weights = weights.softmax(-1, dtype=precise).to(query.dtype)
    return torch.matmul(F.dropout(weights, dropout), value)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    # Torch's own flag means query i sees keys up to i, and excludes a mask.
    plain = mask is None and query.shape[-2] == key.shape[-2]
    if is_causal and not plain:
        mask = _with_causal(query, key, mask)
    # Kernels that take grouped heads take no mask: with one the math kernel would run.
    grouped = mask is None and query.shape[1] != key.shape[1]
    if not grouped:
        key, value = (repeated(each, query.shape[1]) for each in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal and plain,
        scale=scale,
        enable_gqa=grouped,
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    if mask is not None:
        raise ValueError(
            "attention by 'flash' takes neither mask nor bias; take 'sdpa', or leave padding out"
        )
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    states = (each.transpose(1, 2) for each in (query, key, value))
    output: Tensor = flash_attn_func(
        *states, dropout_p=dropout, softmax_scale=scale, causal=is_causal
    )
    return output.transpose(1, 2)


def _xformers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    from xformers import ops  # type: ignore[import-not-found, unused-ignore]

    key, value = (repeated(each, query.shape[1]) for each in (key, value))
    added = _added(query, key, mask, is_causal)
    states = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    output: Tensor = ops.memory_efficient_attention(
        *states, attn_bias=added, p=dropout, scale=scale
    )
    return output.transpose(1, 2)


def _added(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """A mask as numbers for every pair, which is what xformers takes."""
    mask = _with_causal(query, key, mask) if is_causal else mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)
    shape = (*query.shape[:-1], key.shape[-2])
    return mask.to(query.dtype).expand(shape)


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "flash": _flash,
    "xformers": _xformers,
}
