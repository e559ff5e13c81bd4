"""Which loss a model computes from its logits and labels, as its own forward says.

A head that is split or fused gives the loss in the model's place, so it has to be known: whether
labels are moved by one token, and whether the model divides by a count of tokens that it is given.
The names of classes do not say it: some decoders compare labels as they are, and models of text and
images, which are called like translators, move them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

#: Functions of Transformers' table of losses, and whether labels are moved by one token.
_FUNCTIONS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
#: Endings of classes whose labels are tokens.
_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
_PLAIN = re.compile(r"\bCrossEntropyLoss\((ignore_index=-100)?\)")
_ANY = re.compile(r"\bCrossEntropyLoss\(|\bcross_entropy\(")
#: Labels or logits that are moved within the forward: names, or slices along the tokens.
_MOVED = re.compile(r"shift_(labels|logits)|\[[^\]\n]*,[^\]\n]*(\b1:|:-1\b)[^\]\n]*\]")
#: What is added to the loss; that of a router is in the output, and added behind.
_ADDED = re.compile(r"\bloss\s*(?:\+=|=\s*loss\s*\+)\s*(?P<what>[^\n]*)|z_loss")
_DOCSTRING = re.compile(r'"""(?:.|\n)*?"""')


@dataclass(frozen=True)
class OwnLoss:
    """A mean of the cross entropies of tokens.

    Parameters
    ----------
    moved
        Whether a label is compared with the prediction one token before.
    counted
        Whether the model takes ``num_items_in_batch`` to divide by, and ``ignore_index``.
    """

    moved: bool
    counted: bool


def own_loss(model: nn.Module) -> OwnLoss | str:
    """The loss of a model; or words, after its name, why it is not known.

    Examples
    --------
    >>> from transformers import BertConfig, BertForMaskedLM
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    >>> own_loss(BertForMaskedLM(BertConfig(num_hidden_layers=1, **sizes)))
    OwnLoss(moved=False, counted=False)
    >>> own_loss(nn.Linear(2, 2))
    'takes no labels of tokens'
    """
    names = [kind.__name__ for kind in type(model).__mro__]  # a user's own class of such a model
    takes = inspect.signature(model.forward).parameters
    if "labels" not in takes or not any(name.endswith(_TOKENS) for name in names):
        return "takes no labels of tokens"
    forward = inspect.unwrap(type(model).forward)
    if "forward" in vars(model) or not forward.__module__.startswith("transformers."):
        return "has a forward of your own, which may compute another loss"
    source = _DOCSTRING.sub("", inspect.getsource(forward))
    added = [found["what"] or found[0] for found in _ADDED.finditer(source)]
    if any("aux_loss" not in what for what in added):
        return f"adds to its loss: {[what.strip() for what in added]}"
    if "self.loss_function(" in source:
        return _by_function(model, source)
    return _by_itself(model, source)


def _by_function(model: Any, source: str) -> OwnLoss | str:
    function = getattr(model.loss_function, "__name__", "")
    is_stock = getattr(model.loss_function, "__module__", "").startswith("transformers.")
    if function not in _FUNCTIONS or not is_stock:
        return f"has {model.loss_function!r} as its loss_function"
    if _MOVED.search(source):
        return "moves logits or labels itself"
    return OwnLoss(moved=_FUNCTIONS[function], counted=True)


def _by_itself(model: nn.Module, source: str) -> OwnLoss | str:
    """A plain cross entropy, made in the forward or kept as a child."""
    kept = [
        name
        for name, child in model.named_children()
        if type(child) is nn.CrossEntropyLoss and f"self.{name}(" in source
    ]
    plain = [getattr(model, name) for name in kept]
    is_plain = all(
        each.weight is None
        and (each.ignore_index, each.reduction, each.label_smoothing) == (-100, "mean", 0.0)
        for each in plain
    )
    made = len(_PLAIN.findall(source))
    if made + len(kept) != 1 or made != len(_ANY.findall(source)) or not is_plain:
        return "computes its loss in a way that nothing is known of"
    if _MOVED.search(source):
        return "moves logits or labels itself"
    return OwnLoss(moved=False, counted=False)
