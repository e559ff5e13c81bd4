"""GPT-Neo's attention by any kernel: unscaled, and in every other layer over a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slapo.op.attend import attend


class GPTNeoAttention(nn.Module):
    """What Transformers' ``GPTNeoSelfAttention`` computes, by :func:`slapo.op.attend`.

    That class does not ask Transformers' table of attention functions, so the module is replaced;
    its layers, and their names, stay.

    Parameters
    ----------
    module
        The one in whose place it stands.
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
        """As the original's, without the weights of attention.

        Raises
        ------
        ValueError
            If these are asked for.
        """
        if output_attentions:
            raise ValueError(
                "output_attentions=True, and this attention does not keep its weights; keep the "
                "model's own by attn_op_name=None"
            )
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
        """The model's causal mask, and the window's; None where the causal one is all."""
        if self.window is None:
            return given
        rows, columns = query.shape[2], key.shape[2]
        ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
        seen = ones.tril(columns - rows).triu(columns - rows - self.window + 1)[None, None]
        if given is None:
            return seen
        if given.dtype == torch.bool:
            return given & seen
        return given.masked_fill(~seen, torch.finfo(given.dtype).min)
