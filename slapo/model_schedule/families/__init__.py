"""The families of models that have a recipe, a file each."""

from slapo.model_schedule.families import (
    albert,
    bert,
    gemma,
    gpt2,
    gpt_neo,
    llama,
    mixtral,
    opt,
    qwen3,
    t5,
    vit,
    wideresnet,
)

__all__ = [
    "albert",
    "bert",
    "gemma",
    "gpt2",
    "gpt_neo",
    "llama",
    "mixtral",
    "opt",
    "qwen3",
    "t5",
    "vit",
    "wideresnet",
]
