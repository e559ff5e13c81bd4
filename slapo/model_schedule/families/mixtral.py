"""Mixtral: Llama's attention; each rank has a slice of every expert, and all of the router."""

from __future__ import annotations

from typing import Any

from slapo.model_schedule.families.llama import ATTENTION, decoder
from slapo.model_schedule.recipe import Recipe, Region
from slapo.model_schedule.registry import register_recipe


@register_recipe("mixtral")
def mixtral(config: Any) -> Recipe:
    """Experts are split within, so that all ranks have the same work whatever the routing."""
    return decoder(ATTENTION, Region("mlp", experts="mlp.experts", whole="mlp.gate"))
