"""Target "megatron" on gloo: its schedules, DDP and optimizers run, with the CPU for CUDA."""

import itertools
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import slapo
from examples.parallel_models import FAMILIES, schedule
from slapo.pipeline import generate_pipeline_partition
from tests.runtimes import layouts
from tests.runtimes.alone import Alone, compare, compare_by_hand, of_this_rank
from tests.runtimes.contract import build, data, loss_fn, make, seeded, with_unused
from tests.runtimes.layouts import (
    MICRO_BATCHES,
    TOLERANCE,
    adam,
    batches,
    megatron_adam,
    megatron_sgd,
    model_of,
)
from tests.runtimes.ranks import error_of, on_ranks, stand_in_for_cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]

Layout = tuple[int, int, int]

start = partial(layouts.build, target="megatron")
halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
BUCKETS = {"overlap_grad_reduce": True, "data_parallel_options": {"bucket_size": 2000}}


def check(apart: dict[str, float]) -> None:
    assert max(apart.values()) < TOLERANCE, apart


# --- ways to train, and their like in one process ------------------------------------------------
def train(
    layout: Layout,
    family: str = "gpt2",
    alone: dict[str, Any] | None = None,
    make_optimizer: Callable[[], Any] | None = None,
    **options: Any,
) -> None:
    """`options` are for build; `alone` says what one process needs besides."""
    if make_optimizer is not None:
        options["optimizer"] = make_optimizer()
    reference = layouts.alone(family, **(alone or {}))
    check(compare(start(family, layout=layout, **options), reference, batches(FAMILIES[family])))
    clip = reference.clip
    assert clip == inf or min(reference.norms) > clip, "each step is clipped"


configured = partial(
    train,
    make_optimizer=partial(megatron_sgd, clip_grad=0.1),
    lr_scheduler=halving,
    alone={"clip": 0.1, "lr_scheduler": halving},
)
overlapped = partial(train, family="llama", **BUCKETS)
distributed = partial(
    train,
    make_optimizer=megatron_adam,
    distributed_optimizer=True,
    clip_grad_norm=0.1,
    alone={"optimizer": adam, "clip": 0.1},
)
distributed_overlapped = partial(
    train,
    family="t5",
    make_optimizer=partial(megatron_adam, use_distributed_optimizer=True, clip_grad=0.0),
    alone={"optimizer": adam},
    **BUCKETS,
)


def by_hand(layout: Layout) -> None:
    """Call, backward and step; every batch goes back in two halves."""
    for overlap in (False, True):
        engine = start("gpt2", layout=layout, overlap_grad_reduce=overlap)
        check(compare_by_hand(engine, layouts.alone("gpt2"), batches(FAMILIES["gpt2"]), parts=2))


# --- half precision ------------------------------------------------------------------------------
def half(layout: Layout) -> None:
    """bfloat16 against one process, to the bit: the same numbers are added in the same order.

    There the model is traced, too: it always masks attention, and others only where they must.
    """
    mesh = slapo.init_mesh(*layout, device="cpu")
    sch = slapo.create_schedule(model_of("llama").bfloat16(), group=mesh["tp"])
    schedule(sch, FAMILIES["llama"], stages=2)
    traced = generate_pipeline_partition(sch).mod
    # The mean of micro-batches, so that roundings are the same.
    loss_fn = FAMILIES["llama"].loss
    reference = Alone(traced, loss_fn, layouts.sgd, parts=MICRO_BATCHES)
    model = model_of("llama").bfloat16()
    engine = start("llama", layout=layout, model=model, dtype=torch.bfloat16, loss_fn=loss_fn)
    found = compare(engine, reference, batches(FAMILIES["llama"]))
    assert found["losses"] < 1e-6  # a mean of two micro-batches, in float32
    assert found["state"] == 0.0
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.bfloat16}
    assert type(engine.optimizer).__name__ == "Float16OptimizerWithFloat16Params"


def mixed(layout: Layout) -> None:
    """Losses in bfloat16 with the distributed optimizer and overlap, against float32."""
    config = megatron_adam(bf16=True, use_distributed_optimizer=True, clip_grad=0.1)
    model = model_of("gpt2").bfloat16()
    engine = start("gpt2", layout=layout, model=model, optimizer=config, overlap_grad_reduce=True)
    reference = layouts.alone("gpt2", optimizer=adam, clip=0.1)
    # Logits of size 1 have errors of 2**-9, and losses are means over some 60 of them.
    assert compare(engine, reference, batches(FAMILIES["gpt2"]))["losses"] < 2e-3


def scaled(layout: Layout) -> None:
    """float16, beginning with so large a scale that gradients overflow.

    Steps that would overflow are left out, and the scheduler's with them.
    """
    config = megatron_sgd(fp16=True, initial_loss_scale=2.0**18, hysteresis=1)
    model = model_of("gpt2").half()
    engine = start("gpt2", layout=layout, model=model, optimizer=config, lr_scheduler=halving)
    batch = of_this_rank(engine.mesh, batches(FAMILIES["gpt2"])[0])
    losses, rates = [], []
    for _ in range(12):
        losses.append(engine.train_batch(iter([batch])).item())
        rates.append(engine.optimizer.param_groups[0]["lr"])
    assert losses[0] == losses[1]
    assert rates[1] == layouts.LEARNING_RATE
    assert losses[-1] < losses[0]
    assert rates[-1] < layouts.LEARNING_RATE
    assert 1.0 < engine.optimizer.get_loss_scale().item() < 2.0**18


# --- the rest ------------------------------------------------------------------------------------
def repeats(layout: Layout) -> None:
    layouts.check_repeats("llama", "megatron", layout)


def idle_stages(layout: Layout) -> None:
    """One of two stages has nothing to train, for all kinds of optimizers.

    No gradient crosses if it is the first.
    """
    kinds = [
        (layouts.sgd, layouts.sgd),
        (megatron_sgd(clip_grad=0.0), layouts.sgd),
        (megatron_adam(clip_grad=0.0, use_distributed_optimizer=True), adam),
    ]
    for (kind, reference), is_first in itertools.product(kinds, (True, False)):
        model = seeded()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        for part in (model.emb, *model.h[:2]) if is_first else (*model.h[2:], model.head):
            part.requires_grad_(False)
        alone = Alone(model, loss_fn, reference)
        # The scheduler changes nothing before the third step.
        engine = make("megatron", layout, model=model, optimizer=kind, lr_scheduler=halving)
        check(compare(engine, alone, data(2)))


def no_gradient(layout: Layout) -> None:
    """Overlap, and a parameter without a gradient."""
    torch.manual_seed(0)
    engine = build(
        with_unused(),
        "megatron",
        layout,
        loss_fn=lambda output, target: output.mean(),
        overlap_grad_reduce=True,
    )
    text = error_of(lambda: engine.train_batch(iter([(torch.ones(2, 3), None)])))
    assert text.startswith("SlapoError: overlap_grad_reduce=True waits"), text
    assert "['unused.bias', 'unused.weight'] got none" in text


# What each layout runs besides the four families. In one test: processes take seconds to import
# what they need.
TASKS: dict[Layout, list[Callable[[Layout], None]]] = {
    (2, 1, 1): [half, scaled, repeats, idle_stages],
    (1, 2, 1): [by_hand, configured, overlapped, distributed, no_gradient],
    (1, 1, 2): [by_hand],
    (2, 2, 1): [distributed, distributed_overlapped, mixed],
    (2, 1, 2): [],
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=pytest.mark.wide) if n == (2, 1, 2) else n for n in TASKS],
    ids=lambda layout: "x".join(map(str, layout)),
)
@on_ranks(timeout=280)
def test_training_equals_one_process(layout: Layout) -> None:
    stand_in_for_cuda()
    names = FAMILIES if layout.count(1) == 2 else ("gpt2", "t5")
    layouts.check_families(names, "megatron", layout, clip_grad_norm=0.1)
    for task in TASKS[layout]:
        task(layout)


@on_ranks(1)
def test_groups_of_a_job_that_is_over() -> None:
    """An engine of a job that is over, and one of the next; in a world of one."""
    stand_in_for_cuda()
    losses = []
    for _ in range(2):
        engine = start("gpt2", layout=(1, 1, 1))
        losses.append(engine.train_batch(iter(batches(FAMILIES["gpt2"]))).item())
        torch.distributed.destroy_process_group()
        slapo.init_mesh(device="cpu")
    assert losses[0] == losses[1]


# --- bad input -----------------------------------------------------------------------------------
#: Two stages, which take longer to build than two replicas.
STAGED = {"layout": (2, 1, 1)}
#: Arguments of build, made in the process, and what they are met with on both ranks.
REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (
        lambda: {"distributed_optimizer": True},
        "ValueError: distributed_optimizer=True shards the state of Megatron-Core's",
    ),
    (
        lambda: {"distributed_optimizer": True, "optimizer": megatron_sgd()},
        "ValueError: megatron's distributed optimizer supports only Adam",
    ),
    (
        lambda: {"optimizer": megatron_sgd(lr=None)},
        "ValueError: the OptimizerConfig has no learning rate",
    ),
    (
        lambda: {"optimizer": megatron_adam(overlap_param_gather=True)},
        "ValueError: the OptimizerConfig has ['overlap_param_gather']",
    ),
    (
        lambda: {"optimizer": megatron_adam(bf16=True), "dtype": torch.float16},
        "ValueError: the OptimizerConfig is for torch.bfloat16, but dtype is torch.fl",
    ),
    (lambda: {"dtype": torch.float64}, "ValueError: dtype is torch.float64; pass torch.float32"),
    (
        lambda: {"data_parallel_options": {"overlap_param_gather": True}},
        "data_parallel_options' has no option 'overlap_param_gather'",
    ),
    (
        lambda: {"micro_batches": 1 + torch.distributed.get_rank()},
        "micro_batches differs between ranks: 1 on rank 0, 2 on rank 1",
    ),
    # Graphs follow the dtype, and a model of half precision is trained in it.
    (lambda: {"name": "llama", "dtype": torch.bfloat16, **STAGED}, "no error"),
    (lambda: {"model": model_of("gpt2").bfloat16(), **STAGED}, "no error"),
]


@on_ranks(2)
def test_refusals() -> None:
    layout = (2, 1, 1)

    def attempt(**options: Any) -> str:
        return error_of(lambda: start(**{"name": "gpt2", "layout": (1, 2, 1), **options}))

    found = attempt()  # on this machine, or on one without the package
    assert found.startswith('SlapoError: target="megatron" needs CUDA')
    assert 'target="torch" or target="deepspeed"' in found
    with mock.patch("importlib.util.find_spec", return_value=None):
        found = attempt()
    assert found.startswith("MissingPackageError")
    assert 'pip install "slapo[megatron]"' in found

    stand_in_for_cuda()
    for options, text in REFUSED:
        assert text in attempt(**options()), text
    check_groups(layout)


def check_groups(layout: Layout) -> None:
    """Groups that are there already: others, and the right ones."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout[0])
    text = error_of(lambda: start("gpt2", layout=layout))
    assert "SlapoError: megatron-core's groups are {'pp': 1, 'dp': 1, 'tp': 2}" in text
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=layout[0])
    theirs = parallel_state.get_pipeline_model_parallel_group()
    assert error_of(lambda: start("gpt2", layout=layout)) == "no error"
    assert parallel_state.get_pipeline_model_parallel_group() is theirs
