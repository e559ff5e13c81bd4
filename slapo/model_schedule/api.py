"""``apply_schedule``: apply a ready schedule by the key of the model's family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from slapo.errors import with_nearest
from slapo.example_inputs import text_config
from slapo.model_schedule import families
from slapo.model_schedule.apply import apply_recipe, base_path, inputs_for
from slapo.model_schedule.auto import family_recipe, in_training, recipe_of_layers
from slapo.model_schedule.drafts import draft_in_group
from slapo.model_schedule.options import Options
from slapo.model_schedule.recipe import Recipe
from slapo.model_schedule.registry import AUTO, DRAFT, have_one_recipe, recipe_of, schedule_of
from slapo.schedule import Schedule, create_schedule

assert families.__doc__, "families.py is imported for the recipes that it registers"


def apply_schedule(
    model: nn.Module | Schedule,
    key: str | Recipe,
    *,
    model_config: Any = None,
    prefix: str = "",
    group: Any = None,
    mesh: Any = None,
    **options: Any,
) -> Schedule:
    """Schedule a model by the recipe of its family.

    The order is: kernels; tensor parallelism of layers and vocabulary; checkpoints; the loss;
    pipeline cuts. Values and names of the parameters stay. A call that fails changes nothing.

    Parameters
    ----------
    model
        A model, or its root schedule.
    key
        Key of a recipe (``slapo recipes`` lists them) or of :func:`register_schedule`. ``"auto"``
        takes any model. It uses the recipe of the family, or else a derived one
        (:func:`slapo.draft`); in one process a list of the layers is enough. ``"draft"`` always
        derives a recipe. A recipe itself is accepted too, such as ``slapo.draft(...).recipe``.
    model_config
        Sizes of the model; by default ``model.config``.
    prefix
        Path of the base model, ``"bert"`` in a ``BertForMaskedLM``; by default the model's own
        ``base_model_prefix``.
    group
        The tensor-parallel ranks, as in :func:`slapo.create_schedule`.
    mesh
        Device mesh to pass instead of a group, as in :func:`slapo.create_schedule`.
    **options
        ==========================  ===============================================================
        ``fp16``, ``bf16``          Cast the model to this dtype. False.
        ``attn_op_name``            Attention by ``"auto"``, ``"eager"``, ``"sdpa"``, ``"flash"`` or
                                    ``"xformers"``; None keeps the model's own. ``"auto"``.
        ``kernels``                 Run activations and norms by torch's kernels. True.
        ``compile``                 Compile each layer by itself (``torch.compile``). False.
        ``disable_fuse_bias_gelu``  False fuses a bias with the GELU after it. True.
        ``sequence_parallel``       Shard tokens between split regions. False.
        ``parallel_vocabulary``     Shard embedding and head over the ranks. True.
        ``gather_logits``           False leaves the logits sharded by columns and computes the
                                    loss from the shards. True.
        ``fused_loss``              The head computes the loss in chunks of tokens. In training the
                                    output then has no logits. False.
        ``ckpt_ratio``              Fraction of the layers that recompute activations. 0.0.
        ``checkpoint_method``       ``"uniform"``: evenly spaced layers; ``"head"``: the first ones.
        ``pipeline_cuts``           Number of stages, balanced by work; or the indices of the layers
                                    that end a stage, over all stacks or in a list per stack. None.
        ``example_inputs``          Example inputs of the model, for drafts and the trace of cuts: a
                                    tensor, a tuple of positional or a dict of keyword arguments.
        ``check``                   False skips the proof of ``"auto"``, and that of a recipe
                                    for a model of another family on several ranks. True.
        ``bcast_input``             Broadcast the inputs of the group's first rank. False.
        ``delay_init``              True lets build() materialize parameters on meta. True.
        ==========================  ===============================================================

    Returns
    -------
    Schedule
        The root schedule, for :func:`slapo.build` or for further primitives.

    Raises
    ------
    KeyError
        For an unknown key.
    ValueError
        For an option that the family does not support, or sizes that the group does not divide.
        Also for a model that lacks modules of the recipe, or on several ranks has additional ones.
    PlacementError
        If the schedule must be proved and is wrong.

    Examples
    --------
    >>> import slapo
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32,
    ...     num_hidden_layers=2, num_attention_heads=2)
    >>> sch = apply_schedule(LlamaForCausalLM(config), "llama", ckpt_ratio=0.5, fused_loss=True)
    >>> type(sch["lm_head"].mod).__name__
    'LossHead'
    >>> model, _ = slapo.build(sch)
    """
    own = None if isinstance(key, Recipe) or key in (AUTO, DRAFT) else schedule_of(key)
    if own is not None:
        given = {"model_config": model_config, "prefix": prefix, "group": group, "mesh": mesh}
        # Functions of users need not declare arguments that the caller left at their defaults.
        said = {name: value for name, value in given.items() if value not in (None, "")}
        return own(model, **said, **options)
    checked = _options(key, options)
    sch = _schedule(model, group, mesh)
    config: Any = getattr(sch.mod, "config", None) if model_config is None else model_config
    base = base_path(sch.mod, prefix)
    text = text_config(config)
    recipe = key if isinstance(key, Recipe) else _recipe(key, sch, base, config, checked)
    if model_config is not None:
        _check_config(sch.mod, model_config, text, recipe)
    apply_recipe(sch, recipe, checked, text, base, is_foreign=_is_foreign(key, config))
    return sch


def _recipe(key: str, sch: Schedule, base: str, config: Any, options: Options) -> Recipe:
    """Return the recipe of a key. Unknown models get a draft, or a recipe of the layers alone."""
    known = family_recipe(config) if key == AUTO else None
    if known is not None:
        return known
    # One rank shards nothing, so the forward pass and the proof of a draft would be wasted.
    if key == AUTO and sch.world_size == 1:
        return recipe_of_layers(sch.mod, base)
    if key in (AUTO, DRAFT):
        inputs = in_training(sch.mod, inputs_for(sch, options, text_config(config)))
        return draft_in_group(sch.mod, inputs, sch.group).recipe
    try:
        return recipe_of(key, config)
    except AttributeError as error:
        raise ValueError(
            f"the recipe {key!r} reads a config attribute that {type(config).__name__} lacks: "
            f"{error}; pass the key of the model's own family, or 'auto'"
        ) from error


def _is_foreign(key: str | Recipe, config: Any) -> bool:
    """Return whether a key is not that of the model's own family."""
    if isinstance(key, Recipe) or key in (AUTO, DRAFT):
        return False
    family = getattr(config, "model_type", None)
    return bool(family) and not have_one_recipe(key, str(family))


def _check_config(model: Any, given: Any, text: Any, recipe: Recipe) -> None:
    """Refuse a config that differs from the model's: head counts would be wrong."""
    own = getattr(model, "config", None)
    if own is None or own is given:
        return
    names = [*recipe.counts.split(), *recipe.key_value_heads.split()]
    # Multimodal configs keep the head counts in the nested config of their text part.
    pairs = (text, text_config(own))
    values = {n: tuple(getattr(each, n, None) for each in pairs) for n in names}
    apart = {n: pair for n, pair in values.items() if pair[0] != pair[1]}
    if type(given) is not type(own) or apart:
        raise ValueError(
            f"model_config, a {type(given).__name__}, does not match the model's config, a "
            f"{type(own).__name__}; given and own values differ in {apart}; leave model_config "
            "out"
        )


def _options(key: str | Recipe, given: dict[str, Any]) -> Options:
    known = [each.name for each in fields(Options)]
    shown = repr(key) if isinstance(key, str) else "recipes"
    for name in given:
        if name not in known:
            raise TypeError(
                with_nearest(name, known, f"{shown} has no option {name!r}; known are {known}")
            )
    return Options(**given)


def _schedule(model: nn.Module | Schedule, group: Any, mesh: Any) -> Schedule:
    if not isinstance(model, Schedule):
        return create_schedule(model, group=group, mesh=mesh)
    if model.parent is not None:
        raise ValueError(
            f"this is the schedule of {model.path!r}; pass the root's, with the path as prefix"
        )
    if group is not None or mesh is not None:
        raise ValueError(
            "the schedule already has a group; leave group and mesh out, or pass the model"
        )
    return model
