"""Predicted cost of a schedule on a cluster: memory and time of a step without running it."""

from slapo.cost.api import dryrun
from slapo.cost.calibrate import calibrate
from slapo.cost.layout import Layout
from slapo.cost.machine import MACHINES, Machine
from slapo.cost.memory import Memory
from slapo.cost.meter import Meter
from slapo.cost.result import DryRun
from slapo.cost.steptime import StepTime
from slapo.cost.suggestions import Suggestion, Suggestions, suggest
from slapo.cost.update import Update

__all__ = [
    "MACHINES",
    "DryRun",
    "Layout",
    "Machine",
    "Memory",
    "Meter",
    "StepTime",
    "Suggestion",
    "Suggestions",
    "Update",
    "calibrate",
    "dryrun",
    "suggest",
]
