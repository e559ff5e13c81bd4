"""Recipes in one order: kernels, tensor parallelism, vocabulary, checkpoints, loss, cuts."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slapo.example_inputs import example_inputs
from slapo.model_schedule import tensor_parallel
from slapo.model_schedule.auto import in_training, prove
from slapo.model_schedule.kernels import fuse_bias_gelu, use_backend, use_kernels
from slapo.model_schedule.losses import (
    check_fused,
    check_loss,
    fuse_loss,
    gather_without_labels,
    loss_head,
    refuse_generate,
    split_loss,
)
from slapo.model_schedule.options import (
    Options,
    check,
    check_own_dropout,
    dropouts,
    has_layers,
)
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.splits import split
from slapo.model_schedule.stage_cuts import chosen_cuts, cut, even_cuts, layer_costs
from slapo.op.attention import check_available
from slapo.schedule import Schedule
from slapo.snapshot import restored_on_error
from slapo.utils.calls import as_call


def apply_recipe(
    sch: Schedule,
    recipe: Recipe,
    options: Options,
    config: Any,
    prefix: str,
    is_foreign: bool = False,
) -> None:
    """Schedule a model by a recipe, completely or not at all."""
    job = _RecipeRun(sch, recipe, options, config, prefix, is_foreign)
    job.check()
    model: Any = sch.mod
    # The choice of attention is stored in the config, an object that a snapshot of the modules
    # keeps by reference.
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        with restored_on_error(sch):
            job.run()
    except BaseException:
        if attention is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(attention)
        raise


class _RecipeRun:
    """One application of a recipe."""

    def __init__(
        self,
        sch: Schedule,
        recipe: Recipe,
        options: Options,
        config: Any,
        prefix: str,
        is_foreign: bool,
    ) -> None:
        self.sch, self.options, self.config = sch, options, config
        self.base = sch[prefix] if prefix else sch
        # Encoder-only models of a family lack its decoder; checks and splits then never see that
        # stack.
        present = [s for s in recipe.stacks if not s.optional or has_layers(self.base, s)]
        self.recipe = replace(recipe, stacks=tuple(present))
        self.prefix = prefix
        # A base model without a head has none of these paths, and keeps "".
        self.head = next((path for path in recipe.heads.split() if path in sch), "")
        self.parallel = sch.world_size > 1
        #: The recipe may be wrong for this model and must be proved.
        self.is_doubtful = is_foreign or not recipe.proven
        self.is_foreign = is_foreign
        self.spreads = options.sequence_parallel and self.parallel
        #: The vocabulary is sharded, and the logits stay sharded.
        self.splits_vocabulary = options.parallel_vocabulary and self.parallel
        self.splits_loss = (
            self.splits_vocabulary
            and bool(self.head)
            and not (options.gather_logits or options.fused_loss)
        )

    def check(self) -> None:
        """Refuse invalid input before anything changes."""
        check(self.base, self.recipe, self.options, self.config)
        if self.options.fused_loss:
            check_loss(self.sch.mod, self.head, "fused_loss")
            check_fused(self.sch.mod, self.config)
        # With stages the engine computes the loss by loss_fn, and the model's own loss is not used.
        elif self.splits_loss and self.options.pipeline_cuts is None:
            check_loss(self.sch.mod, self.head, "gather_logits=False")
        if self.options.pipeline_cuts is not None:
            self.ends()

    def run(self) -> None:
        """Apply all steps in order.

        Shards and loss hooks must see the modules that kernels have replaced. A checkpoint wraps
        the final layer with its collectives. The trace for cuts comes last and takes each layer as
        it is.
        """
        self.cast()
        self.kernels()
        if self.parallel:
            # The check runs in each call, as set_random_seed() may come any time before the first
            # step.
            for layer in self.all_layers() if dropouts(self.config) else ():
                layer.sync("fwd_pre", tensor_parallel.require_seed)
            self.split_layers()
        if self.splits_vocabulary:
            self.split_vocabulary()
        self.checkpoint()
        if self.options.compile:
            for layer in self.all_layers():
                layer.compile()
        if self.options.bcast_input and self.parallel:
            self.sch.sync("fwd_pre", tensor_parallel.broadcast_inputs)
        self.loss()
        if self.parallel and self.options.check and self.is_doubtful:
            self.prove()
        if self.options.pipeline_cuts is not None:
            self.cut()

    # --- steps -----------------------------------------------------------------------------------
    def cast(self) -> None:
        """Cast first, since traces and kernels depend on the dtype."""
        if self.options.fp16 or self.options.bf16:
            tensor_parallel.cast(
                self.sch.mod, torch.float16 if self.options.fp16 else torch.bfloat16
            )

    def kernels(self) -> None:
        """Replace attention, activations, norms, and the head if it computes the loss."""
        name = self.options.attn_op_name
        if name is not None and "attn_op_name" not in self.recipe.refuses:
            if self.recipe.attention is not None:
                check_available(name)
                self.recipe.attention(self.base, name)
            else:
                # "auto" may keep the model's own attention. Over ranks this must draw nothing,
                # since its dropout does not fork the random state.
                is_used = use_backend(self.sch, name, required=name != "auto")
                if self.parallel and not is_used:
                    check_own_dropout(self.config, "the model keeps its own attention")
        if self.options.kernels:
            use_kernels(self.sch)
        if not self.options.disable_fuse_bias_gelu:
            fuse_bias_gelu(self.all_layers(), self.recipe.bias_gelu)
        if self.options.fused_loss:
            self.sch.select(self.head).replace(loss_head)

    def split_layers(self) -> None:
        """Shard the layers, and the tokens between them."""
        # Hooks around a stack cannot run when a stage ends inside it.
        in_stages = self.options.pipeline_cuts is not None
        stacks = list(zip(self.recipe.stacks, self.layers(), strict=True))
        split(self.base, self.recipe, stacks, self.spreads, in_stages)
        for stack in self.recipe.stacks:
            # Every layer's cross attention adds a partial gradient to the one tensor that all of
            # them read, so one sum at the stack replaces a sum in each layer.
            if stack.reads and not in_stages:
                path, _, name = stack.reads.partition(":")
                self.base[path].sync("bwd_post", "all_reduce", argument=[name])

    def prove(self) -> None:
        """Prove a table that may be wrong for this model."""
        inputs = self.example_inputs()
        what = (
            "the recipe of another family, given for {}," if self.is_foreign else "the table for {}"
        )
        prove(self.sch, in_training(self.sch.mod, inputs), self.again, what)

    def again(self, sch: Schedule) -> None:
        """Apply the same split to another model, whose outputs can be compared."""
        # Only the split remains: a lower dtype would hide errors in rounding, and both models must
        # return complete logits. ``check=False`` ends the recursion into this proof.
        options = replace(
            self.options,
            fp16=False,
            bf16=False,
            compile=False,
            fused_loss=False,
            gather_logits=True,
            bcast_input=False,
            pipeline_cuts=None,
            check=False,
        )
        model: Any = sch.mod
        apply_recipe(sch, self.recipe, options, model.config.get_text_config(), self.prefix)

    def split_vocabulary(self) -> None:
        """Shard embeddings by rows, and the head, which may be tied to them."""
        for path in self.recipe.embeddings.split():
            if path in self.base:
                tensor_parallel.split_table(self.base[path])
        if self.head:
            # A fused loss reads the sharded logits itself; the hook below gathers them without
            # labels.
            gather = self.options.gather_logits and not self.options.fused_loss
            tensor_parallel.split_head(self.sch[self.head], gather)
            if self.options.fused_loss:
                self.sch[self.head].sync("fwd_post", gather_without_labels)

    def checkpoint(self) -> None:
        """Recompute activations in a fraction of the layers."""
        paths = [layer.path for layer in self.all_layers()]
        for path in chosen(paths, self.options.ckpt_ratio, self.options.checkpoint_method):
            self.sch[path].checkpoint()

    def loss(self) -> None:
        """Compute the loss in chunks, or from sharded logits."""
        if self.splits_loss:
            refuse_generate(self.sch.mod)
        if self.options.fused_loss:
            fuse_loss(self.sch, self.head)
        elif self.splits_loss and self.options.pipeline_cuts is None:
            split_loss(self.sch, self.head)

    def cut(self) -> None:
        paths = [[layer.path for layer in layers] for layers in self.layers()]
        inputs = self.example_inputs()
        cut(self.sch, self.prefix, self.recipe.stacks, paths, self.ends(), inputs)

    def example_inputs(self) -> Any:
        if self.options.example_inputs is None and self.recipe.inputs is not None:
            return self.recipe.inputs(self.config)
        return inputs_for(self.sch, self.options, self.config)

    # --- the model --------------------------------------------------------------------------------
    def layers(self) -> list[list[Schedule]]:
        """Return the layers of each stack."""
        return [list(self.base.select(f"{stack.layers}.*")) for stack in self.recipe.stacks]

    def all_layers(self) -> list[Schedule]:
        return [layer for layers in self.layers() for layer in layers]

    def ends(self) -> list[int]:
        """Return the indices of the layers that end a stage, over all stacks."""
        cuts = self.options.pipeline_cuts
        if isinstance(cuts, int):
            flat = [layer.path for layer in self.all_layers()]
            return even_cuts(layer_costs(self.sch.mod, flat, self.head), cuts)
        return chosen_cuts(cuts, [len(layers) for layers in self.layers()])


def inputs_for(sch: Schedule, options: Options, config: Any) -> Any:
    """Return the given example inputs, or inputs whose tokens can be sharded over the ranks."""
    if options.example_inputs is not None:
        args, kwargs = as_call(options.example_inputs)
        signature = inspect.signature(sch.mod.forward)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if args and inspect.Parameter.VAR_POSITIONAL in kinds:
            return args  # they have no names
        return {**signature.bind_partial(*args).arguments, **kwargs}
    # Sharded tokens need a multiple of the ranks. At least six tokens, so that causal attention has
    # several rows.
    length = sch.world_size * math.ceil(6 / sch.world_size)
    sizes: Any = {"batch": 2, "length": length, "decoder_length": length}
    return example_inputs(sch.mod, config=config, **sizes, device="cpu")


def chosen(paths: list[str], ratio: float, method: str) -> list[str]:
    """Select a fraction of the paths: the first ones, or evenly spaced ones."""
    count = round(ratio * len(paths))
    if ratio and not count:
        count = 1
    if method == "head":
        return paths[:count]
    # The midpoints of `count` equal intervals.
    return [paths[(2 * number + 1) * len(paths) // (2 * count)] for number in range(count)]


def base_path(model: nn.Module, prefix: str) -> str:
    """Return the path of the base model: the given prefix, or Transformers' own."""
    if prefix:
        model.get_submodule(prefix)  # raises if there is none
        return prefix
    own = getattr(model, "base_model_prefix", "")
    if not own or not isinstance(getattr(model, own, None), nn.Module):
        return ""
    # the attribute forwards to a model inside a wrapper
    if own not in dict(model.named_children()):
        children = [name for name, _ in model.named_children()]
        raise ValueError(
            f"{type(model).__name__}, with the children {children}, is a wrapper around a model "
            f"with base model {own!r}; schedule that model, then wrap it"
        )
    return own
