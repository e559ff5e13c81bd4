"""Losses of sharded or fused heads, computed instead of the model's own loss.

Models compute their loss from full logits. A pre-hook takes the labels out of the call; a post-hook
puts the loss into the output. Hooks read all state from the module, so that a record can store them
by name.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from slapo.errors import SlapoError
from slapo.model_schedule.tensor_parallel import group_of
from slapo.op.cross_entropy import IGNORED, token_losses
from slapo.op.linear_loss import LossHead, Targets
from slapo.schedule import Schedule
from slapo.sharding.state import shards_of
from slapo.wrapper import innermost

#: Attribute of a model: the targets of the current call.
_TARGETS = "_slapo_targets"
#: Attribute of a head: False once its output is known to stay unchanged.
_TOUCHED = "_slapo_touched"
#: Config entries that change logits after the head.
_AFTER_THE_HEAD = (
    "final_logit_softcapping",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)
_BIAS = "final_logits_bias"
#: Arguments of Transformers' losses besides the labels.
_LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels", "ignore_index")
#: Method of a model that makes the decoder's input from labels.
_SHIFT = "prepare_decoder_input_ids_from_labels"
#: Suffixes of classes whose labels are tokens.
_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
#: Functions in Transformers' loss table -> whether they shift labels by one token.
_FUNCTIONS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}
#: Classes that call such a function, but shift labels themselves or add to the loss.
_OTHERWISE = frozenset(
    """
    BambaForCausalLM CanaryForConditionalGeneration CohereAsrForConditionalGeneration
    CsmDepthDecoderForCausalLM CsmForConditionalGeneration Florence2ForConditionalGeneration
    GitForCausalLM LukeForMaskedLM MoonshineForConditionalGeneration
    MoonshineStreamingForConditionalGeneration PPFormulaNetForConditionalGeneration
    """.split()  # noqa: SIM905
)
#: Classes, besides those for masked tokens, that compute a plain cross entropy without such a
#: function.
_PLAIN = frozenset(
    """
    BartForCausalLM BartForConditionalGeneration BigBirdPegasusForCausalLM
    BigBirdPegasusForConditionalGeneration BlenderbotForCausalLM BlenderbotForConditionalGeneration
    BlenderbotSmallForCausalLM BlenderbotSmallForConditionalGeneration CpmAntForCausalLM
    FSMTForConditionalGeneration LEDForConditionalGeneration LongT5ForConditionalGeneration
    M2M100ForConditionalGeneration MBartForCausalLM MBartForConditionalGeneration
    MT5ForConditionalGeneration MarianForCausalLM MvpForCausalLM MvpForConditionalGeneration
    NllbMoeForConditionalGeneration PLBartForCausalLM PLBartForConditionalGeneration
    PegasusForCausalLM PegasusForConditionalGeneration PegasusXForConditionalGeneration
    Pop2PianoForConditionalGeneration SeamlessM4TTextToUnitForConditionalGeneration
    Speech2TextForConditionalGeneration T5ForConditionalGeneration TrOCRForCausalLM
    UMT5ForConditionalGeneration UdopForConditionalGeneration WhisperForCausalLM
    WhisperForConditionalGeneration XLNetLMHeadModel
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class OwnLoss:
    """A mean cross entropy of tokens.

    `moved`: labels are shifted by one token. `counted`: the model accepts ``num_items_in_batch``
    and ``ignore_index``.
    """

    moved: bool
    counted: bool


def own_loss(model: Any) -> OwnLoss | str:
    """Return the loss that a model computes from logits and labels, or why it is unknown.

    A sharded or fused head computes this loss instead of the model. Class names do not determine
    it, since some decoders do not shift labels. Tables list the exceptions.
    """
    # includes a user's subclass of such a model
    names = [kind.__name__ for kind in type(model).__mro__]
    takes = inspect.signature(model.forward).parameters
    if "labels" not in takes or not any(name.endswith(_TOKENS) for name in names):
        return "takes no token labels"
    # Transformers decorates forward methods; only the inner function shows the names that it uses.
    forward: Any = inspect.unwrap(type(model).forward)
    if "forward" in vars(model) or not forward.__module__.startswith("transformers."):
        return "has a custom forward, which may compute another loss"
    if not _OTHERWISE.isdisjoint(names):
        return "shifts labels itself or adds to its loss"
    if "loss_function" in forward.__code__.co_names:
        function = getattr(model.loss_function, "__name__", "")
        is_stock = getattr(model.loss_function, "__module__", "").startswith("transformers.")
        if function not in _FUNCTIONS or not is_stock:
            return f"has {model.loss_function!r} as its loss_function"
        return OwnLoss(moved=_FUNCTIONS[function], counted=True)
    if any(name in _PLAIN or name.endswith("ForMaskedLM") for name in names):
        return OwnLoss(moved=False, counted=False)
    return "computes its loss in an unknown way"


def check_loss(model: nn.Module, head: str, option: str) -> None:
    """Refuse models whose loss is not known to be a cross entropy of tokens."""
    kind, own = type(model).__name__, own_loss(model)
    why = own if isinstance(own, str) else "" if head else "has no head that computes logits"
    if why:
        raise ValueError(
            f"{option} is for models whose loss is the mean cross entropy of tokens, but {kind} "
            f"{why}; leave it out"
        )
    if _has_decoder(model) and not hasattr(model, _SHIFT):
        raise ValueError(
            f"{option}: {kind} makes the decoder's input from the labels in an unknown way (it "
            f"has no {_SHIFT}); leave it out"
        )
    layer = innermost(model.get_submodule(head))
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        what = "already has a fused loss" if isinstance(layer, LossHead) else "is not plain"
        raise ValueError(
            f"{option} needs a torch.nn.Linear head, but {head!r}, a {type(layer).__name__}, "
            f"{what}; leave it out"
        )


def check_fused(model: nn.Module, config: Any) -> None:
    """Refuse models that scale or cap their logits: with a fused loss there are no logits."""
    values = {name: getattr(config, name, None) for name in _AFTER_THE_HEAD}
    changes = {name: value for name, value in values.items() if value not in (None, 0.0, 1.0)}
    if hasattr(model, _BIAS):  # BART and related models add it outside the head
        changes[_BIAS] = "a buffer"
    if changes:
        raise ValueError(
            f"fused_loss: {type(model).__name__} changes its logits after the head, by "
            f"{changes}, but a fused loss has none; leave it out, or pass gather_logits=False on "
            "several ranks"
        )


def fuse_loss(sch: Schedule, head: str) -> None:
    """Compute the loss in the head from hidden states, in chunks and without logits."""
    own = _known(sch.mod)
    give = functools.partial(give_targets, head=head, shift=own.moved, counted=own.counted)
    sch.sync("fwd_pre", give)
    sch.sync("fwd_post", functools.partial(take_loss, head=head))


def split_loss(sch: Schedule, head: str) -> None:
    """Compute the loss from sharded logits; every rank gets the full loss."""
    own = _known(sch.mod)
    keep = functools.partial(keep_targets, shift=own.moved, counted=own.counted)
    sch.sync("fwd_pre", keep)
    sch.sync("fwd_post", functools.partial(put_split_loss, head=head))


def _known(model: nn.Module) -> OwnLoss:
    own = own_loss(model)
    assert not isinstance(own, str), "checked before"
    return own


def loss_head(path: str, module: nn.Module) -> LossHead:
    """Return the linear layer as a head that can compute the loss."""
    assert isinstance(module, nn.Linear), "checked before"
    return LossHead.like(module)


def refuse_generate(model: nn.Module) -> None:
    """Disable :meth:`generate`, which would choose among one rank's columns only."""
    if hasattr(model, "generate"):
        model.__dict__["generate"] = _refuse_generate


def _refuse_generate(*args: Any, **kwargs: Any) -> None:
    raise SlapoError(
        "gather_logits=False leaves each rank its columns of the logits, so generate() would "
        "choose different tokens on each rank; schedule the model with gather_logits=True"
    )


# --- hooks ---------------------------------------------------------------------------------------
def gather_without_labels(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Post-hook of a sharded head: without labels the head returns logits, so gather them."""
    layer = innermost(module)
    assert isinstance(layer, LossHead), "made before"
    return layer.gathered(output) if layer.targets is None else output


def give_targets(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    head: str,
    shift: bool,
    counted: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook: pass the labels to the head instead of the model."""
    args, kwargs, targets = _taken(module, args, kwargs, shift, counted)
    _head(module, head).targets = targets
    return args, kwargs


def take_loss(module: nn.Module, args: tuple[Any, ...], output: Any, *, head: str) -> Any:
    """Post-hook: take the loss from the logits' position in the output."""
    layer = _head(module, head)
    if layer.targets is None:
        return output
    layer.targets = None
    logits, layer.logits = layer.logits, None
    loss = _logits_of(module, output)
    _check_untouched(module, layer, loss)
    if isinstance(output, tuple):
        whole = () if logits is None else (logits,)
        return (_whole_loss(module, loss, output), *whole, *output[1:])
    return replace(output, loss=_whole_loss(module, loss, output), logits=logits)


def _check_untouched(module: nn.Module, layer: LossHead, loss: Tensor) -> None:
    """Refuse a model that scales or caps its logits after the head: it has changed the loss.

    The first call with real values is checked; engines pass a tensor of their own.
    """
    given, layer.given = layer.given, None
    if layer.__dict__.get(_TOUCHED) is False or given is None or isinstance(given, FakeTensor):
        return
    if given.is_meta or torch.compiler.is_compiling():
        return
    # A bias added to the logits turns the scalar loss into a row.
    before = float(given)
    after = float(loss.detach()) if loss.numel() == 1 else float("inf")
    if before != after and before == before:
        raise SlapoError(
            f"{type(module).__name__} changes its logits after the head: the fused loss is "
            f"{before:.6g}, but the model's is {after:.6g}; leave fused_loss out, or pass "
            "gather_logits=False on several ranks"
        )
    # A factor leaves 0 and infinity as they are, so such a loss proves nothing and the next one is
    # compared.
    if before not in (0.0, float("inf")) and before == before:
        layer.__dict__[_TOUCHED] = False


def keep_targets(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shift: bool,
    counted: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook: keep the labels until the end of the call."""
    args, kwargs, targets = _taken(module, args, kwargs, shift, counted)
    module.__dict__[_TARGETS] = targets
    return args, kwargs


def put_split_loss(module: nn.Module, args: tuple[Any, ...], output: Any, *, head: str) -> Any:
    """Post-hook: put the loss of sharded logits into the output."""
    targets: Targets | None = module.__dict__.pop(_TARGETS, None)
    if targets is None:
        return output
    logits = _logits_of(module, output)
    layer = innermost(module.get_submodule(head))
    start = shards_of(layer)["weight"].start
    each = token_losses(
        logits, targets.moved(), start, group_of(layer), ignore_index=targets.ignore_index
    )
    # `each` is equal on all ranks, so a mean needs no further collective.
    loss = targets.mean(each.sum())
    if isinstance(output, tuple):
        return (_whole_loss(module, loss, output), *output)
    return replace(output, loss=_whole_loss(module, loss, output))


def _logits_of(module: Any, output: Any) -> Tensor:
    if not isinstance(output, tuple):
        logits: Tensor = output.logits
        return logits
    if output[0].dim() == 0 and getattr(module.config, "output_router_logits", False):
        raise SlapoError(
            "the output is a tuple with the router loss before the logits; leave out "
            "return_dict=False or output_router_logits"
        )
    first: Tensor = output[0]
    return first


def _head(module: nn.Module, head: str) -> LossHead:
    found = innermost(module.get_submodule(head))
    if not isinstance(found, LossHead):
        raise SlapoError(
            f"fused_loss: {head!r} is now a {type(found).__name__} instead of the recipe's "
            "LossHead; change the head (resize_token_embeddings, adapters) before you schedule "
            "the model"
        )
    return found


def _whole_loss(module: nn.Module, loss: Tensor, output: Any) -> Tensor:
    """Add the router's loss, as models do that compute both."""
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is None:
        return loss
    return loss + getattr(module, "router_aux_loss_coef", 0.0) * auxiliary.to(loss.device)


def _taken(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shift: bool,
    counted: bool,
) -> tuple[tuple[Any, ...], dict[str, Any], Targets | None]:
    """Return the call without its labels, and the targets made from them."""
    # A positional argument may be the labels, so the call is mapped to names and back.
    names = list(inspect.signature(innermost(module).forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    labels = given.get("labels")
    if labels is None:
        return args, kwargs, None
    # Without labels the model computes no loss of its own, which would need full logits.
    given["labels"] = None
    # Removed from the call: the model would pass them on to a loss that it does not compute.
    loss = {name: given.pop(name, None) for name in _LOSS_ARGUMENTS}
    if not counted:  # the model accepts and ignores them
        loss = dict.fromkeys(loss)
    count, moved = loss["num_items_in_batch"], loss["shift_labels"]
    ignored = IGNORED if loss["ignore_index"] is None else loss["ignore_index"]
    _feed_decoder(module, given, labels)
    new = tuple(given[name] for name, _ in zip(names, args, strict=False))
    left = {name: value for name, value in given.items() if name not in names[: len(args)]}
    # The caller has shifted these labels, as data loaders of sharded sequences do.
    if moved is not None:
        return new, left, Targets(moved, False, count, ignored)
    return new, left, Targets(labels, shift, count, ignored)


def _feed_decoder(module: Any, given: dict[str, Any], labels: Tensor) -> None:
    """Make the decoder's input from the labels, as encoder-decoder models do."""
    if not _has_decoder(module):
        return
    if given.get("decoder_input_ids") is None and given.get("decoder_inputs_embeds") is None:
        model: Any = innermost(module)
        given["decoder_input_ids"] = getattr(model, _SHIFT)(labels=labels)


def _has_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))
