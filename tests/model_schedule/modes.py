"""What every key is compared in, and what it refuses: no key may lack an entry."""

from typing import Any

from tests.model_schedule.models import MODELS

#: Mode -> options.
MODES: dict[str, dict[str, Any]] = {
    "layers": {"parallel_vocabulary": False},
    "vocabulary": {},
    "slices": {"gather_logits": False},
    "fused": {"fused_loss": True},
    "tokens": {"sequence_parallel": True},
    "half": {"ckpt_ratio": 0.5},
    "recomputed": {"ckpt_ratio": 1.0, "checkpoint_method": "head"},
    "eager": {"attn_op_name": "eager"},
    "own": {"attn_op_name": None, "kernels": False},
    "bias and gelu": {"disable_fuse_bias_gelu": False},
    "broadcast": {"bcast_input": True},
    "all": {
        "sequence_parallel": True,
        "fused_loss": True,
        "ckpt_ratio": 0.5,
        "bcast_input": True,
    },
}
#: (key, mode) -> what the refusal says. Of what only several ranks can be refused, see below.
REFUSED: dict[tuple[str, str], str] = {
    **{("albert", mode): "sequence_parallel=True does not fit this" for mode in ("tokens", "all")},
    **{
        ("wideresnet", mode): "sequence_parallel=True does not fit this"
        for mode in ("tokens", "all")
    },
    ("wideresnet", "fused"): "fused_loss is for models whose loss is",
    ("wideresnet", "eager"): "attn_op_name='eager' does not fit this family",
    ("vit", "fused"): "fused_loss is for models whose loss is",
    ("vit", "all"): "fused_loss is for models whose loss is",
    **{
        (key, "bias and gelu"): "disable_fuse_bias_gelu=False is not supported by this family"
        for key in MODELS
        if key not in ("bert", "gpt_neo", "roberta", "vit")
    },
}
#: Keys whose models are not cut into stages, and why.
UNCUT = {"albert": "pipeline_cuts=2 does not fit this family"}
