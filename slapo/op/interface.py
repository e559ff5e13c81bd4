"""Attention of Transformers models by :func:`slapo.op.attend`, without changing modules.

Models look up their attention by name in a table that accepts external functions. A second table
holds mask functions. Both entries are needed: without the second, no mask reaches the function, and
there is no warning.
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
from slapo.op.attention import as_added, attend, both_masks, causal_mask, check_available, drawing

logger = get_logger()

#: Model arguments that change the result of attention and that `attend` does not support.
_REFUSED = ("softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask", "cache")
#: Arguments that Transformers passes only to the function whose name the model requested.
_OF_NAMES = frozenset({"indices", "block_indices", "cache"})
#: Matches a model that depends on the name of its attention function before the call.
_ASKS_NAME = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
#: The flash kernel supports capped logits, but would silently drop a bias for each pair.
_REFUSED_BY_FLASH = (*(name for name in _REFUSED if name != "softcap"), "position_bias")


def use_attention(model: nn.Module, backend: str = "auto") -> None:
    """Compute the attention of a Transformers model by a backend.

    Parameters
    ----------
    model
        A ``PreTrainedModel``.
    backend
        As for :func:`slapo.op.attend`; ``"flash"`` uses Transformers' own function, which handles
        padding. For capped logits, sinks or returned weights, which no backend computes, ``"auto"``
        and ``"eager"`` call the model's own eager function and log it.

    Raises
    ------
    ValueError
        If the model computes its attention itself, or the backend is unknown or cannot run here.
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
    check_available(backend)
    _check_asks_table(model)
    # Models without SDPA support may interpret a None mask as one that hides nothing.
    masked = not all(getattr(part, "_supports_sdpa", True) for part in _models_in(model))
    name = register(backend, masked)
    _put_name(model, name)
    model.__dict__["_slapo_attention"] = _Registered(backend, masked)
    for part in _models_in(model):
        if part.config._attn_implementation != name:
            raise ValueError(
                f"{type(part).__name__} did not accept {name!r} and uses "
                f"{part.config._attn_implementation!r}; leave its attention unchanged"
            )


def _put_name(model: Any, name: str) -> None:
    if "flash" not in name:
        model.set_attn_implementation(name)
        return
    # set_attn_implementation takes every name with "flash" for a kernel, and queries the hub.
    parts = _models_in(model)
    unfit = [type(part).__name__ for part in parts if not part._supports_flash_attn]
    if unfit:
        raise ValueError(
            f"{unfit[0]} does not support attention by 'flash': its class has "
            "_supports_flash_attn=False; use 'sdpa'"
        )
    for part in parts:
        part.config._attn_implementation = name


def _models_in(model: nn.Module) -> list[Any]:
    """The model and its inner models, such as an encoder and a decoder."""
    return [part for part in model.modules() if hasattr(part, "set_attn_implementation")]


def _check_asks_table(model: nn.Module) -> None:
    """Raise before anything changes; Transformers itself would only log a line and continue."""
    parts: list[Any] = _models_in(model)
    wrong = [part for part in parts if not part._can_set_attn_implementation()]
    if not parts or parts[0] is not model:
        wrong = [model]
    if wrong:
        raise ValueError(
            f"{type(wrong[0]).__name__} computes its attention itself, without Transformers' "
            "table of attention functions; leave its attention unchanged (attn_op_name=None)"
        )
    for part in parts:
        place = inspect.getmodule(type(part))
        if place is not None and _ASKS_NAME.search(inspect.getsource(place)):
            raise ValueError(
                f"{type(part).__name__} prepares its attention by the name of the attention "
                "function, and has no entry for Slapo's; leave its attention unchanged "
                "(attn_op_name=None)"
            )


def register(backend: str, masked: bool = False) -> str:
    """Register a backend in both tables, and return its name there.

    With `masked` the model always gets a mask, like Transformers' eager attention. Without it a
    plain causal mask is None, and the module must apply causality itself.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    # Transformers keeps its tables for the whole process, so each combination has a name of its
    # own.
    name = f"slapo_{backend}_masked" if masked else f"slapo_{backend}"
    masks = "flash_attention_2" if backend == "flash" else "eager" if masked else "sdpa"
    function = _flash if backend == "flash" else functools.partial(_attention, backend=backend)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    return name


class _Registered:
    """Registers the backend again in a process that unpickles a model."""

    def __init__(self, backend: str, masked: bool) -> None:
        self.backend, self.masked = backend, masked

    def __setstate__(self, state: dict[str, Any]) -> None:
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
    """Attention for models: ``(batch, heads, seq, size)`` -> ``(batch, seq, heads, size)``."""
    own = _own_function(module, kwargs) if backend in ("auto", "eager") else None
    if own is None:
        _refuse_unknown(kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # A mask includes causality; and a single query is the last token.
    is_causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if is_causal and (own is not None or query.shape[2] != key.shape[2]):
        # Without a mask, queries are the first tokens: a static cache has free space after them.
        attention_mask, is_causal = causal_mask(query, key, first=True)[None, None], False
    if own is not None:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        mask = None if attention_mask is None else as_added(attention_mask, query.dtype)
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
    # Contiguous like the output of Transformers' functions, as some models call view() on it.
    return output.transpose(1, 2).contiguous(), None


def _own_function(module: nn.Module, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The model's own eager attention if the call needs what no backend computes, else None."""
    wanted = _unknown(kwargs, _REFUSED)
    if not wanted or _OF_NAMES & set(wanted):
        return None
    for kind in type(module).__mro__:
        # Each modeling file of Transformers has its own function. Along the MRO, since a subclass
        # of the user is defined in another file.
        place = sys.modules.get(kind.__module__)
        own: Callable[..., Any] | None = getattr(place, "eager_attention_forward", None)
        if own is not None:
            _say_once(kind.__name__, *wanted)
            return own
    return None


@functools.cache
def _say_once(kind: str, *wanted: str) -> None:
    logger.info("attention: %s needs %s, which its own eager function computes", kind, list(wanted))


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
    """Call Transformers' unpadding function, and draw dropout for the heads of this rank.

    Its entry point for models loads the configured name, and would look up ours on the hub.
    """
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.modeling_flash_attention_utils import (
        _flash_attention_forward,
        flash_attn_supports_top_left_mask,
    )

    _refuse_unknown(kwargs, _REFUSED_BY_FLASH)
    states = [each.transpose(1, 2) for each in (query, key, value)]
    # The kernel requires values as wide as queries.
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
    if given:
        raise ValueError(
            f"the model's attention is called with {given}, which this backend does not support "
            "(it also returns no weights); keep the model's own with attn_op_name=None"
        )


def _unknown(kwargs: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """List the arguments of `names` that the model passes, and ``output_attentions`` if true."""
    given = [name for name in names if kwargs.get(name) is not None]
    return [*given, "output_attentions"] if kwargs.get("output_attentions") else given


class GPTNeoAttention(nn.Module):
    """Transformers' ``GPTNeoSelfAttention`` by :func:`slapo.op.attend`.

    GPT-Neo's attention is unscaled, and every other layer uses a window. That class bypasses
    Transformers' table of attention functions, so the module is replaced; its layers keep their
    names.

    Parameters
    ----------
    module
        The module to replace.
    backend
        As for :func:`slapo.op.attend`.

    Notes
    -----
    Black et al., "GPT-Neo: Large Scale Autoregressive Language Modeling with Mesh-Tensorflow"
    (2021).

    Examples
    --------
    >>> from transformers import GPTNeoConfig, GPTNeoModel
    >>> config = GPTNeoConfig(hidden_size=8, num_heads=2, num_layers=1, window_size=4,
    ...     attention_types=[[["local"], 1]], vocab_size=16, intermediate_size=8)
    >>> theirs = GPTNeoModel(config).eval().h[0].attn.attention
    >>> x = torch.randn(2, 5, 8)
    >>> torch.allclose(GPTNeoAttention(theirs)(x)[0], theirs(x)[0], atol=1e-6)
    True
    """

    def __init__(self, module: nn.Module, backend: str = "auto") -> None:
        super().__init__()
        given: Any = module
        # In the original's order, which is the order of the parameters in optimizers.
        for name in ("k_proj", "v_proj", "q_proj", "out_proj", "resid_dropout"):
            self.add_module(name, getattr(given, name))
        self.num_heads, self.head_dim = given.num_heads, given.head_dim
        self.layer_id, self.backend = given.layer_id, backend
        self.window = given.config.window_size if given.attention_type == "local" else None
        self.attn_pdrop = given.attn_dropout.p
        self.training = given.training

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute the original's output, without attention weights.

        Raises
        ------
        ValueError
            If attention weights are requested.
        """
        _refuse_unknown({"output_attentions": output_attentions})
        query, key, value = (self._heads(name, hidden_states) for name in ("q", "k", "v"))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_id)
        mask = self._mask(query, key, attention_mask)
        output = attend(
            query,
            key,
            value,
            mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=1.0,
            dropout=self.attn_pdrop if self.training else 0.0,
            backend=self.backend,
        )
        merged = output.transpose(1, 2).flatten(2)
        projected: Tensor = self.get_submodule("out_proj")(merged)
        return self.get_submodule("resid_dropout")(projected), None

    def _heads(self, name: str, states: Tensor) -> Tensor:
        projected: Tensor = self.get_submodule(f"{name}_proj")(states)
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, query: Tensor, key: Tensor, given: Tensor | None) -> Tensor | None:
        """Restrict the model's causal mask to the window; None means causal only."""
        if self.window is None:
            return given
        before = key.shape[2] - query.shape[2]
        # Query i, at position before + i, sees the last `window` keys up to itself.
        seen = causal_mask(query, key).triu(before - self.window + 1)
        return both_masks(given, seen[None, None])
