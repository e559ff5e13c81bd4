"""``apply_schedule``: a ready schedule by the key of a model's family."""

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

    In this order: kernels; layers, vocabulary and loss over the tensor-parallel ranks; checkpoints;
    pipeline cuts. Values and names of the parameters stay. A call that fails changes nothing.

    Parameters
    ----------
    model
        A model, or its root schedule.
    key
        That of a recipe (``slapo recipes`` lists them), or of :func:`register_schedule`; or
        ``"auto"``, for any model: the recipe of its family, or else what :func:`slapo.draft`
        derives; in one process, what needs to know the layers alone. ``"draft"`` derives one for
        any model. Or a recipe itself, such as ``slapo.draft(...).recipe``.
    model_config
        Sizes of the model; by default ``model.config``.
    prefix
        Path of the base model, ``"bert"`` in a ``BertForMaskedLM``; by default the model says it.
    group
        The tensor-parallel ranks, as in :func:`slapo.create_schedule`.
    mesh
        Instead of a group, as in :func:`slapo.create_schedule`.
    **options
        ==========================  ===============================================================
        ``fp16``, ``bf16``          Turn the model into that type. False.
        ``attn_op_name``            Attention by ``"auto"``, ``"eager"``, ``"sdpa"``, ``"flash"`` or
                                    ``"xformers"``; None keeps the model's own. ``"auto"``.
        ``kernels``                 Activations and norms by torch's kernels. True.
        ``compile``                 Each layer by ``torch.compile``, by itself. False.
        ``disable_fuse_bias_gelu``  False makes one kernel of the bias and the GELU after it. True.
        ``sequence_parallel``       Deal tokens out over the ranks between split regions. False.
        ``parallel_vocabulary``     Split embedding and head over the ranks. True.
        ``gather_logits``           False leaves each rank its columns of the logits, from which the
                                    loss is computed. True.
        ``fused_loss``              The head computes the loss by pieces of the tokens, so that in
                                    training the output has no logits. False.
        ``ckpt_ratio``              Share of the layers that compute activations again. 0.0.
        ``checkpoint_method``       ``"uniform"``: spread evenly; ``"head"``: the first ones.
        ``pipeline_cuts``           Number of stages, of about the same work; or the numbers of the
                                    layers that end one, over all stacks, or a list for each. None.
        ``example_inputs``          What the model is called with, for the trace that cuts need.
        ``check``                   False leaves out the proof of ``"auto"``, and that of a recipe
                                    for a model of another family, over several ranks. True.
        ``bcast_input``             All ranks take the inputs of the group's first. False.
        ``delay_init``              Whether parameters may be on meta, for build() to make. True.
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
        For an option that the family cannot have, sizes that the group does not divide, a model
        without what the recipe names, or over several ranks with more than that.
    PlacementError
        If what has to be proved does not hold.

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
    """The recipe of a key; for a model that none is known of, a draft, or its layers alone."""
    known = family_recipe(config) if key == AUTO else None
    if known is not None:
        return known
    if key == AUTO and sch.world_size == 1:
        return recipe_of_layers(sch.mod, base)
    if key in (AUTO, DRAFT):
        inputs = in_training(sch.mod, inputs_for(sch, options, text_config(config)))
        return draft_in_group(sch.mod, inputs, sch.group).recipe
    try:
        return recipe_of(key, config)
    except AttributeError as error:
        raise ValueError(
            f"the recipe {key!r} asks the config of its family for what {type(config).__name__} "
            f"has not: {error}; pass the key of the model's own family, or 'auto'"
        ) from error


def _is_foreign(key: str | Recipe, config: Any) -> bool:
    """Return whether the recipe of a key is not the one that the model's own family has."""
    if isinstance(key, Recipe) or key in (AUTO, DRAFT):
        return False
    family = getattr(config, "model_type", None)
    return bool(family) and not have_one_recipe(key, str(family))


def _check_config(model: Any, given: Any, text: Any, recipe: Recipe) -> None:
    """Another config than the model's would give other heads to ranks than there are."""
    own = getattr(model, "config", None)
    if own is None or own is given:
        return
    names = [*recipe.counts.split(), *recipe.key_value_heads.split()]
    pairs = (text, text_config(own))
    values = {n: tuple(getattr(each, n, None) for each in pairs) for n in names}
    apart = {n: pair for n, pair in values.items() if pair[0] != pair[1]}
    if type(given) is not type(own) or apart:
        raise ValueError(
            f"model_config, a {type(given).__name__}, is not that of the model, whose config is a "
            f"{type(own).__name__}; given and its own differ in {apart}; leave model_config out"
        )


def _options(key: str | Recipe, given: dict[str, Any]) -> Options:
    known = [each.name for each in fields(Options)]
    shown = repr(key) if isinstance(key, str) else "recipes"
    for name in given:
        if name not in known:
            raise TypeError(
                with_nearest(name, known, f"{shown} has no option {name!r}; there are {known}")
            )
    return Options(**given)


def _schedule(model: nn.Module | Schedule, group: Any, mesh: Any) -> Schedule:
    if not isinstance(model, Schedule):
        return create_schedule(model, group=group, mesh=mesh)
    if model.parent is not None:
        raise ValueError(
            f"the schedule is that of {model.path!r}; pass the root's, with the path as prefix"
        )
    if group is not None or mesh is not None:
        raise ValueError(
            "a schedule has its group already; leave group and mesh out, or pass the model"
        )
    return model
