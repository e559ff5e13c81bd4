"""Attention of Transformers' models by :func:`slapo.op.attend`: no module is touched.

Models look their attention up by name, in a table that takes functions of others; a second table
has what makes masks. Both are needed: a function without masks gets none, and no word of it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slapo.logger import get_logger
from slapo.op.attend import BACKENDS, attend, check_available, drawing

logger = get_logger()

#: Arguments of models that change what attention computes, and that `attend` does not know.
_REFUSED = ("softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask", "cache")
#: Those that no function of Transformers knows but the one whose name the model has asked for.
_OF_NAMES = frozenset({"indices", "block_indices", "cache"})
#: A model that does something else before the call where its attention is called so.
_ASKS_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
#: The flash kernel caps its logits; a bias for each pair is what it would leave out in silence.
_REFUSED_BY_FLASH = (*(name for name in _REFUSED if name != "softcap"), "position_bias")


def use_attention(model: nn.Module, backend: str = "auto") -> None:
    """Have a model of Transformers compute its attention by a backend.

    Parameters
    ----------
    model
        A ``PreTrainedModel``.
    backend
        As for :func:`slapo.op.attend`; ``"flash"`` goes to Transformers' own function, which knows
        padding. ``"auto"`` and ``"eager"`` go to the model's own eager function, with a line in the
        log, for what no backend computes: capped logits, sinks, weights to hand back.

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
    _check_asks_table(model)
    # Others may take a mask that is None for one that hides nothing.
    masked = not all(getattr(part, "_supports_sdpa", True) for part in _models_in(model))
    name = register(backend, masked)
    _put_name(model, name)
    model.__dict__["_slapo_attention"] = Registered(backend, masked)
    for part in _models_in(model):
        if part.config._attn_implementation != name:
            raise ValueError(
                f"{type(part).__name__} has not taken {name!r} and runs by "
                f"{part.config._attn_implementation!r}; leave its attention as it is"
            )


def _put_name(model: Any, name: str) -> None:
    if "flash" not in name:
        model.set_attn_implementation(name)
        return
    # That method takes each name with "flash" in it for a kernel, and asks the hub for it.
    parts = _models_in(model)
    unfit = [type(part).__name__ for part in parts if not part._supports_flash_attn]
    if unfit:
        raise ValueError(
            f"{unfit[0]} is not made for attention by 'flash': its class says "
            "_supports_flash_attn=False; take 'sdpa'"
        )
    for part in parts:
        part.config._attn_implementation = name


def _models_in(model: nn.Module) -> list[Any]:
    """The model and those within it, as an encoder and a decoder of their own classes."""
    return [part for part in model.modules() if hasattr(part, "set_attn_implementation")]


def _check_asks_table(model: nn.Module) -> None:
    """Before anything is changed: Transformers itself writes a line to the log, and goes on."""
    parts: list[Any] = _models_in(model)
    wrong = [part for part in parts if not part._can_set_attn_implementation()]
    if not parts or parts[0] is not model:
        wrong = [model]
    if wrong:
        raise ValueError(
            f"{type(wrong[0]).__name__} computes its attention by itself, without asking "
            "Transformers' table of attention functions; leave its attention as it is "
            "(attn_op_name=None)"
        )
    for part in parts:
        place = inspect.getmodule(type(part))
        if place is not None and _ASKS_NAME.search(inspect.getsource(place)):
            raise ValueError(
                f"{type(part).__name__} prepares its attention by the name of the function that "
                "will compute it, and knows no name of ours; leave its attention as it is "
                "(attn_op_name=None)"
            )


def register(backend: str, masked: bool = False) -> str:
    """Put a backend into both tables; gives its name there.

    Parameters
    ----------
    masked
        Whether the model always gets a mask, as from Transformers for its eager attention: without
        that there is none for a plain causal one, which the module has to know then.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"slapo_{backend}_masked" if masked else f"slapo_{backend}"
    masks = "flash_attention_2" if backend == "flash" else "eager" if masked else "sdpa"
    function = _flash if backend == "flash" else functools.partial(_attention, backend=backend)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    return name


class Registered:
    """Keeps a pickled model's attention: where it is unpickled, both tables get the backend."""

    def __init__(self, backend: str, masked: bool) -> None:
        self.backend, self.masked = backend, masked

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As made, in another process."""
        self.__dict__.update(state)
        register(self.backend, self.masked)


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
) -> tuple[Tensor, Tensor | None]:
    """What models call: ``(batch, heads, seq, size)`` -> ``(batch, seq, heads, size)``."""
    own = _own_function(module, kwargs) if backend in ("auto", "eager") else None
    if own is None:
        _refuse_unknown(kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A mask has it all; and a single query is the last token.
    is_causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    rows, columns = query.shape[2], key.shape[2]
    if is_causal and (own is not None or rows != columns):
        # No mask means that queries are the first tokens: a static cache has room behind them.
        whole = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        attention_mask, is_causal = whole.tril()[None, None], False
    if own is not None:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        mask = _added(attention_mask, query)
        with drawing(dropout):
            result: tuple[Tensor, Tensor | None] = own(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return result
    output = attend(
        query,
        key,
        value,
        mask=attention_mask,
        bias=position_bias,
        is_causal=is_causal,
        scale=scaling,
        dropout=dropout,
        backend=backend,
    )
    return output.transpose(1, 2).contiguous(), None


def _own_function(module: nn.Module, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The model's own eager attention, where it is asked for what no backend computes."""
    wanted = _unknown(kwargs, _REFUSED)
    if not wanted or _OF_NAMES & set(wanted):
        return None
    for kind in type(module).__mro__:
        place = sys.modules.get(kind.__module__)
        own: Callable[..., Any] | None = getattr(place, "eager_attention_forward", None)
        if own is not None:
            _say_once(kind.__name__, *wanted)
            return own
    return None


@functools.cache
def _say_once(kind: str, *wanted: str) -> None:
    logger.info(
        "attention: %s asks for %s, which is computed by its own eager function", kind, list(wanted)
    )


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What is added to the logits, as eager functions take it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    least = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, least)


def _flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """By Transformers' function that unpads, with numbers for the heads of this rank.

    Not by its entry for models: that loads what the config names, and asks the hub for ours.
    """
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.modeling_flash_attention_utils import (
        _flash_attention_forward,
        flash_attn_supports_top_left_mask,
    )

    _refuse_unknown(kwargs, _REFUSED_BY_FLASH)
    states = [each.transpose(1, 2) for each in (query, key, value)]
    # The kernel wants values as wide as queries.
    size, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    states[2] = torch.nn.functional.pad(states[2], [0, missing])
    with drawing(dropout):
        output: Tensor = _flash_attention_forward(
            *states,
            attention_mask,
            query_length=query.shape[2],
            is_causal=module.is_causal if is_causal is None else is_causal,
            dropout=dropout,
            softmax_scale=scaling,
            use_top_left_mask=flash_attn_supports_top_left_mask(),
            target_dtype=get_target_dtype(query, module),
            attn_implementation="flash_attention_2",
            **kwargs,
        )
    return output[..., :size], None


def _refuse_unknown(kwargs: dict[str, Any], names: tuple[str, ...] = _REFUSED) -> None:
    given = _unknown(kwargs, names)
    if given == ["output_attentions"]:
        raise ValueError(
            "output_attentions=True, and this attention does not keep its weights; keep the "
            "model's own by attn_op_name=None"
        )
    if given:
        raise ValueError(
            f"the model's attention is called with {given}, which this backend does not compute; "
            "keep the model's own by attn_op_name=None"
        )


def _unknown(kwargs: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """What is asked for of `names`, and weights."""
    given = [name for name in names if kwargs.get(name) is not None]
    return [*given, "output_attentions"] if kwargs.get("output_attentions") else given
