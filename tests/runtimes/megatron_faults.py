"""What users may do wrong with target "megatron", and what each rank is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import slapo
from examples.parallel_models import FAMILIES
from tests.runtimes import layouts
from tests.runtimes.contract import WithUnused
from tests.runtimes.layouts import batches, model_of
from tests.runtimes.megatron_cases import Layout, megatron_adam, megatron_sgd

start = partial(layouts.build, target="megatron")


def says(act: Callable[[], Any]) -> str:
    """The error that this rank meets."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(layout: Layout) -> dict[str, str]:
    """Name of a fault -> what it is met with here."""
    rank = torch.distributed.get_rank()
    wrong: dict[str, dict[str, Any]] = {
        "callable": {"distributed_optimizer": True},
        "sgd": {"distributed_optimizer": True, "optimizer": megatron_sgd()},
        "rate": {"optimizer": megatron_sgd(lr=None)},
        "gather": {"optimizer": megatron_adam(overlap_param_gather=True)},
        "contradiction": {"optimizer": megatron_adam(bf16=True), "dtype": torch.float16},
        "dtype": {"dtype": torch.float64},
        "fields": {"data_parallel_options": {"overlap_param_gather": True}},
        "loss": {"loss_fn": None},
        "returned": {
            "optimizer": lambda parameters: "none" if rank == 1 else layouts.sgd(parameters)
        },
        "differing": {"micro_batches": 1 + rank},
        "half trace": {"name": "llama", "dtype": torch.bfloat16},
        "half model": {"model": model_of("gpt2").bfloat16()},
    }
    found = {
        name: says(partial(start, **{"name": "gpt2", "layout": layout, **given}))
        for name, given in wrong.items()
    }
    engine = start("gpt2", layout=layout, micro_batches=3)
    batch = batches(FAMILIES["gpt2"])[0]
    found["batch"] = says(lambda: engine.train_batch(iter([batch])))
    found["call"] = says(lambda: engine(**batch[0]))
    engine = start("gpt2", layout=layout, optimizer=None)
    found["no optimizer"] = says(lambda: engine.train_batch(iter([batch])))
    return found


def group_faults(layout: Layout) -> dict[str, str]:
    """Groups that are there already: the right ones, others, and some of a job that is over."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout[0])
    found = {"other": says(lambda: start("gpt2", layout=layout))}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=layout[0])
    theirs = parallel_state.get_pipeline_model_parallel_group()
    found["same"] = says(lambda: start("gpt2", layout=layout))
    assert parallel_state.get_pipeline_model_parallel_group() is theirs
    return found


def restarted(layout: Layout) -> list[float]:
    """An engine of a job that is over, and one of the next; in a world of one."""
    losses = []
    for _ in range(2):
        engine = start("gpt2", layout=layout)
        losses.append(engine.train_batch(iter(batches(FAMILIES["gpt2"]))).item())
        torch.distributed.destroy_process_group()
        slapo.init_mesh(device="cpu")
    return losses


def no_gradient(layout: Layout) -> str:
    """Overlap, and a parameter without a gradient."""
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(WithUnused(), group=mesh["tp"])
    engine, _ = slapo.build(
        sch,
        target="megatron",
        mesh=mesh,
        loss_fn=lambda output, target: output.mean(),
        optimizer=layouts.sgd,
        overlap_grad_reduce=True,
    )
    return says(lambda: engine.train_batch(iter([(torch.ones(2, 3), None)])))


def without_cuda(layout: Layout) -> dict[str, str]:
    """What this machine, or one without the package, says."""
    found = {"cuda": says(lambda: start("gpt2", layout=layout))}
    with mock.patch("importlib.util.find_spec", return_value=None):
        found["package"] = says(lambda: start("gpt2", layout=layout))
    return found
