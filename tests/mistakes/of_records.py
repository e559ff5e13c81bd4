"""Schedules that are to be saved, and records that are to be replayed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo
from slapo import Schedule, ScheduleRecord
from tests.mistakes import gelu, mistake, stack
from tests.primitives.models import Stack


def saved(schedule: Callable[[Schedule], Any], edit: Callable[[Any], Any] = lambda data: 0) -> Path:
    """The file of a schedule of :class:`Stack`, with a change."""
    sch = stack()
    schedule(sch)
    path = Path(tempfile.mkdtemp()) / "schedule.json"
    sch.record.save(path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


class Hooks:
    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output


def checkpoints(sch: Schedule) -> None:
    sch.select("layers.*").checkpoint()


# --- save ----------------------------------------------------------------------------------------
@mistake("save")
def a_lambda_in_a_record():
    sch = stack()
    sch.replace_all(nn.Dropout, lambda path, module: nn.Identity())
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_function_within_a_function():
    def hook(module, args, output):
        return output

    sch = stack()
    sch["head"].sync("fwd_post", hook)
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_method():
    sch = stack()
    sch["head"].sync("fwd_post", Hooks().hook)
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_module_with_values_of_its_own():
    sch = stack()
    sch["head"].replace(nn.Linear(4, 4))
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_module_that_was_changed():
    new = nn.GELU("tanh")
    new.approximation = "none"
    sch = stack()
    sch["head"].replace(new)
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_large_tensor_in_a_record():
    sch = stack()
    sch["head"].annotate("weight", "mask", torch.ones(1000, 1000))
    yield sch
    sch.record.save("schedule.json")


@mistake("save")
def a_config_in_a_record():
    class Config:
        hidden_size = 4

    sch = stack()
    sch["layers.0"].trace(config=Config())
    yield sch
    sch.record.save("schedule.json")


# --- diff ----------------------------------------------------------------------------------------
@mistake("diff")
def a_schedule_to_compare_with(sch):
    sch.record.diff(stack())


# --- load ----------------------------------------------------------------------------------------
@mistake("load")
def a_version_of_tomorrow():
    path = saved(checkpoints, lambda data: data.update(version=2))
    yield
    ScheduleRecord.load(path)


@mistake("load")
def another_file():
    path = saved(checkpoints, lambda data: data.clear())
    yield
    ScheduleRecord.load(path)


@mistake("load")
def half_a_file():
    path = saved(checkpoints)
    path.write_text(path.read_text()[:100])
    yield
    ScheduleRecord.load(path)


@mistake("load")
def a_step_without_a_path():
    path = saved(checkpoints, lambda data: data["steps"][1].pop("path"))
    yield
    ScheduleRecord.load(path)


# --- replay --------------------------------------------------------------------------------------
@mistake("replay")
def the_schedule_itself():
    sch = stack()
    yield
    slapo.replay(Stack(), sch)


@mistake("replay")
def a_model_with_fewer_layers():
    path = saved(checkpoints)
    yield
    slapo.replay(Stack(depth=2), path, allow=["tests"])


@mistake("replay")
def a_model_with_another_forward():
    path = saved(lambda sch: sch.fuse(sch.find(gelu)[2], compiler=None))
    model = Stack()
    model.forward = lambda x: model.head(model.layers[0](x))
    yield
    slapo.replay(model, path, allow=["tests"])


@mistake("replay")
def a_model_in_another_mode():
    class Noisy(nn.Module):
        def forward(self, x):
            return gelu(x) if self.training else gelu(gelu(x))

    sch = slapo.create_schedule(Noisy())
    sch.replace(torch.relu, sch.find(gelu)[0])
    yield
    slapo.replay(Noisy().eval(), sch.record)


@mistake("replay")
def a_model_with_other_sizes():
    path = saved(lambda sch: sch["head"].shard("weight", axis=0, blocks=4))
    yield
    slapo.replay(Stack(size=5), path, allow=["tests"])


@mistake("replay")
def a_primitive_that_nobody_registered():
    path = saved(checkpoints, lambda data: data["steps"][0].update(primitive="checkpoints"))
    yield
    slapo.replay(Stack(), path, allow=["tests"])


@mistake("replay")
def a_function_that_has_moved():
    path = saved(
        lambda sch: sch["layers.0"].replace(gelu, sch["layers.0"].find("fc1")),
        lambda data: data["steps"][1]["arguments"].update(new_mod={"import": "tests.mistakes:g"}),
    )
    yield
    slapo.replay(Stack(), path, allow=["tests"])


@mistake("replay")
def a_number_of_one_rank():
    path = saved(
        lambda sch: (
            sch["layers.0.fc1"].replace(nn.MultiheadAttention(8, 4, device="meta"))
            and sch["layers.0.fc1"].set("num_heads", 2)
        ),
        lambda data: data["steps"].pop(0),
    )
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    slapo.replay(nn.Sequential(), path, allow=["tests"])


@mistake("set")
def a_value_and_a_whole(sch):
    sch["layers.0.drop"].set("p", 0.1, whole=4)


@mistake("set")
def no_value(sch):
    sch["layers.0.drop"].set("p")


@mistake("set")
def a_whole_that_is_no_integer(sch):
    sch["layers.0.drop"].set("p", whole=0.1)
