"""Small models: with a recipe, without, of configs that carry a tensor-parallel plan, own ones."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Prime, so that no size of a batch is one of the model.
BATCH, LENGTH, EVEN_LENGTH = 3, 13, 12
VOCABULARY = 97
#: Of images and sounds, in pixels, frames of a spectrum with so many rows, and samples.
IMAGE, FRAMES, MELS, SOUND = 32, 32, 16, 700
#: More than this is none that settings have made tiny.
MAX_PARAMETERS = 30_000_000

#: Settings by name; a config takes those that it knows.
TINY: dict[str, Any] = {
    # sizes
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "attention_hidden_size": 64,
    "partial_rotary_factor": 0.5,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "experts_per_token": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 2,
    "num_nextn_predict_layers": 0,
    # latent and linear attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_n_heads": 4,
    "n_groups": 2,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    # other names of sizes: two stacks, older decoders, sound, images
    "d_model": 64,
    "dim": 64,
    "emb_dim": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "hidden_dim": 96,
    "d_ff": 96,
    "d_inner": 96,
    "d_kv": 16,
    "d_head": 16,
    "rotary_dim": 8,
    "n_heads": 4,
    "num_heads": 4,
    "n_layers": 2,
    "num_decoder_layers": 2,
    "block_sizes": [1, 1],
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_mel_bins": MELS,
    "input_feat_per_channel": MELS,
    "max_source_positions": FRAMES,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_channels": 3,
    # tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    # chance
    **dict.fromkeys(
        (
            "activation_dropout",
            "attention_dropout",
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "dropout",
            "classifier_dropout",
            "decoder_layerdrop",
            "drop_path_rate",
            "dropout_rate",
            "encoder_layerdrop",
            "feat_proj_dropout",
            "final_dropout",
            "layerdrop",
            "mask_feature_prob",
            "mask_time_prob",
            "relu_dropout",
            "embd_pdrop",
            "embedding_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "input_jitter_noise",
            "resid_pdrop",
            "residual_dropout",
            "router_jitter_noise",
        ),
        0.0,
    ),
}
_OWN = None  # the config's own default
_ROTARY = {"partial_rotary_factor": _OWN}
#: Changes of them, one after the other until a model can be built and runs.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 4, "head_dim": _OWN, **_ROTARY},
    {"hidden_size": 512, "head_dim": _OWN, **_ROTARY},
    {"hidden_size": 512, "head_dim": 128, **_ROTARY},
    _ROTARY,
    {"head_dim": _OWN, **_ROTARY},
    {"head_dim": 128, **_ROTARY},
    {"head_dim": 64, **_ROTARY},
    {"num_hidden_layers": 6, "num_layers": _OWN, **_ROTARY},
    {
        "qk_head_dim": _OWN,
        "v_head_dim": _OWN,
        "head_dim": _OWN,
        "qk_nope_head_dim": _OWN,
        "qk_rope_head_dim": _OWN,
        **_ROTARY,
    },
    {"sliding_window": _OWN, "head_dim": _OWN, **_ROTARY},
    {"pad_token_id": _OWN, **_ROTARY},
    {"moe_intermediate_size": _OWN, "intermediate_size": _OWN, **_ROTARY},
    {"shared_expert_intermediate_size": _OWN, "moe_intermediate_size": _OWN},
    {"hidden_size": 256, "head_dim": _OWN, **_ROTARY},
    {"head_dim": 8, **_ROTARY},
    {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0], **_ROTARY},
    {"layer_types": ["conv", "full_attention"], **_ROTARY},
)


#: Where models come from: recipes, tests of drafts, Transformers' configs with and without a plan.
RECIPES, OTHERS, OWN = "with a recipe", "without one", "own"
PLANS, NO_PLANS = "with a plan", "without a plan"
GROUPS = (RECIPES, OTHERS, OWN, PLANS, NO_PLANS)


@dataclass(frozen=True)
class Case:
    """A model.

    Parameters
    ----------
    group
        One of `GROUPS`.
    family
        Folder of Transformers that its config is in, or the name that the tests have for it.
    name
        Name of the config, or again that of the tests.
    module
        Module to import the config from.
    """

    group: str
    family: str
    name: str
    module: str = ""

    @property
    def key(self) -> str:
        """Key of its recipe; empty where there is none."""
        return self.family if self.group == RECIPES else ""

    def load(self) -> Any:
        """The config class."""
        return getattr(importlib.import_module(self.module), self.name)

    def build(self, variant: int) -> nn.Module:
        """The model, of settings that were found to run."""
        if self.module:
            return build(self.load(), variant)
        if self.group == OWN:
            from tests.model_schedule import draft_models

            return draft_models.own(*draft_models.OWN[self.name][0])
        return self._of_tests().build()

    def inputs(self, model: nn.Module, length: int) -> dict[str, Any]:
        """Keyword arguments."""
        if self.module:
            return inputs_of(model, length)
        if self.group == OWN:
            from tests.model_schedule import draft_models

            return {"ids": draft_models.ids(BATCH, length)}
        return dict(self._of_tests().inputs(BATCH, length))

    def _of_tests(self) -> Any:
        from tests.model_schedule import draft_models, models

        return (models.MODELS if self.group == RECIPES else draft_models.STRANGERS)[self.name]


class NoModel(Exception):
    """There is none of a config, or none that runs on tokens."""


# --- which there are -----------------------------------------------------------------------------
def cases(of_transformers: Sequence[str] = (PLANS,)) -> list[Case]:
    """All models, by their groups; configs of Transformers with a plan, or without one too."""
    from tests.model_schedule import draft_models, models

    return [
        *(Case(RECIPES, key, key) for key in models.MODELS),
        *(Case(OTHERS, name, name) for name in draft_models.STRANGERS),
        *(Case(OWN, name, name) for name in draft_models.OWN),
        *itertools.chain.from_iterable(map(configs, of_transformers)),
    ]


def configs(group: str) -> list[Case]:
    """Every config class with a plan, or without one, in the order of their families."""
    from transformers import models

    found = []
    for entry in pkgutil.iter_modules(models.__path__):
        folder = importlib.import_module(f"{models.__name__}.{entry.name}")
        for part in pkgutil.iter_modules(folder.__path__ if entry.ispkg else ()):
            if part.name.startswith("configuration_"):
                module = f"{folder.__name__}.{part.name}"
                names = _names(module, has_plan=group == PLANS)
                found += [Case(group, entry.name, name, module) for name in names]
    return found


def _names(module: str, has_plan: bool) -> Iterator[str]:
    from transformers import PreTrainedConfig

    for name, each in vars(importlib.import_module(module)).items():
        own = inspect.isclass(each) and each.__module__ == module
        if own and issubclass(each, PreTrainedConfig) and bool(each.base_model_tp_plan) == has_plan:
            yield name


def model_class(config: type[Any]) -> Any:
    """The largest model that takes a config: with a head, if there is such a one.

    Raises
    ------
    NoModel
        If there is none.
    """
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_CTC_MAPPING,
        auto.MODEL_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    for mapping in mappings:
        if config in mapping:
            found = mapping[config]
            return found[0] if isinstance(found, tuple) else found
    place = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    for says in (_names_config, _takes_config):
        for each in vars(place).values():
            if inspect.isclass(each) and each.__module__ == place.__name__ and says(each, config):
                return each
    raise NoModel(f"no model takes a {config.__name__}")


def _names_config(model: Any, config: type[Any]) -> bool:
    return getattr(model, "config_class", None) is config and "PreTrained" not in model.__name__


def _takes_config(model: Any, config: type[Any]) -> bool:
    if not hasattr(model, "base_model_prefix") or "PreTrained" in model.__name__:
        return False
    parameter = inspect.signature(model.__init__).parameters.get("config")
    return parameter is not None and str(parameter.annotation).strip("'").endswith(config.__name__)


# --- models --------------------------------------------------------------------------------------
def settings(config: type[Any], number: int) -> dict[str, Any]:
    """What a variant says of a config."""
    own = config().to_dict()
    known = {*inspect.signature(config.__init__).parameters, *own}
    wanted = {**TINY, **VARIANTS[number]}
    # Models of sound take a kernel size for each layer; Mamba's single one has the same name.
    numbers = {key for key, value in own.items() if isinstance(value, int)}
    return {
        key: value
        for key, value in wanted.items()
        if key in known and value is not _OWN and not (key in numbers and isinstance(value, tuple))
    }


def build(config: type[Any], number: int) -> nn.Module:
    """A model in train mode without chance, no parameter of which is all zeros or ones.

    Raises
    ------
    ValueError
        If it is not tiny.
    """
    kind = model_class(config)
    made = config(**settings(config, number))
    with torch.device("meta"):
        count = sum(p.numel() for p in kind._from_config(made).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters are not tiny")
    torch.manual_seed(0)
    model: nn.Module = kind._from_config(config(**settings(config, number))).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    # Norms of small batches lose most digits of float32.
    return model.double() if _in_double(model) else model


def _in_double(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def inputs_of(model: nn.Module, length: int) -> dict[str, Any]:
    """Tokens, the last of one row padding; labels where the model takes them; images, sounds."""
    generator = torch.Generator().manual_seed(2)
    takes = inspect.signature(model.forward).parameters
    shapes = {
        "pixel_values": (BATCH, 3, IMAGE, IMAGE),
        "input_values": (BATCH, SOUND),
        "input_features": (BATCH, MELS, FRAMES),
    }
    if "input_ids" not in takes and (found := [name for name in shapes if name in takes]):
        data = torch.randn(shapes[found[0]], generator=generator)
        return {found[0]: data.double() if _in_double(model) else data}
    tokens = torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -4:] = 0
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if "use_cache" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        inputs["use_cache"] = False
    if "labels" in takes:
        inputs["labels"] = tokens.masked_fill(mask == 0, -100)
    elif "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = tokens.flip(0)
    return inputs


def run(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits, or hidden states, and the loss, after its backward pass."""
    torch.manual_seed(3)  # a router may draw numbers
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    first: Tensor = output[0] if logits is None else logits
    loss = getattr(output, "loss", None)
    if loss is None:
        # Of different weights: the mean square of what a norm gives is the same for all inputs.
        loss = (first.float() * torch.linspace(0.5, 1.5, first.shape[-1])).square().mean()
    loss.backward()
    return first.detach(), loss.detach()


def first_that_runs(config: type[Any], check: Callable[[nn.Module], None]) -> int:
    """Number of the first variant of which a model can be built and does not fail `check`.

    Raises
    ------
    NoModel
        With what each failed with.
    """
    said: dict[str, None] = {}
    for number in range(len(VARIANTS)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(build(config, number))
        except NoModel:
            raise
        except Exception as error:
            said[brief(error)] = None
        else:
            return number
    raise NoModel("; ".join(said))


def brief(error: BaseException) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
