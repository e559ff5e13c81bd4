"""Attention of Transformers' models by :func:`slapo.op.attend`: no module is touched.

Models look their attention up by name, in a table that takes functions of others; a second table
has what makes masks. Both are needed: a function without masks gets none, and no word of it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from slapo.op.attend import BACKENDS, attend, check_available, drawing

#: Arguments of models that change what attention computes, and that `attend` does not know.
_REFUSED = ("softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask", "cache")


def use_attention(model: nn.Module, backend: str = "auto") -> None:
    """Have a model of Transformers compute its attention by a backend.

    Parameters
    ----------
    model
        A ``PreTrainedModel``.
    backend
        As for :func:`slapo.op.attend`; ``"flash"`` goes to Transformers' own function, which knows
        padding.

    Raises
    ------
    ValueError
        If the model computes its attention by itself, or the backend is unknown or cannot run here.
    MissingPackageError
        If the backend's package is not installed.

    Examples
    --------
    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = BertModel(BertConfig(num_hidden_layers=1, **sizes))
    >>> use_attention(model, "eager")
    >>> model.config._attn_implementation
    'slapo_eager'
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention by {backend!r} is not known; pass one of {list(BACKENDS)}")
    check_available(backend)
    given: Any = model
    name = f"slapo_{backend}"
    takes = hasattr(given, "set_attn_implementation") and given._can_set_attn_implementation()
    if not takes:
        raise ValueError(
            f"{type(model).__name__} computes its attention by itself, without asking "
            "Transformers' table of attention functions; leave its attention as it is "
            "(attn_op_name=None)"
        )
    register(backend)
    given.set_attn_implementation(name)
    if given.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} has not taken {name!r} and runs by "
            f"{given.config._attn_implementation!r}; leave its attention as it is"
        )


def register(backend: str) -> None:
    """Put a backend into both tables."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks = "flash_attention_2" if backend == "flash" else "sdpa"
    function = _flash if backend == "flash" else functools.partial(_attention, backend=backend)
    AttentionInterface.register(f"slapo_{backend}", function)
    AttentionMaskInterface.register(f"slapo_{backend}", ALL_MASK_ATTENTION_FUNCTIONS[masks])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    backend: str,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What models call: ``(batch, heads, seq, size)`` -> ``(batch, seq, heads, size)``."""
    _refuse_unknown(kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = attend(
        query,
        key,
        value,
        mask=attention_mask,
        bias=position_bias,
        # A mask has it all; and a single query is the last token.
        is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        dropout=dropout,
        backend=backend,
    )
    return output.transpose(1, 2).contiguous(), None


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Any:
    """Transformers' function, with numbers for the heads of this rank."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    flash = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    with drawing(dropout):
        return flash(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    given = [name for name in _REFUSED if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"the model's attention is called with {given}, which this backend does not compute; "
            "keep the model's own by attn_op_name=None"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True, and this attention does not keep its weights; keep the "
            "model's own by attn_op_name=None"
        )
