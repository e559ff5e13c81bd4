"""A wrong schedule does not train: the first batch is checked, and gradients are compared."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo
from tests.primitives.models import Computes
from tests.runtimes import contract
from tests.runtimes.contract import copied, data, is_unchanged, loss_fn, make, scheduled, seeded
from tests.runtimes.ranks import on_ranks, on_ranks_by_rows

TARGETS = [
    ("torch", (1, 2, 2), {}),  # FSDP2
    ("torch", (1, 2, 2), {"data_parallel": "ddp"}),
    ("torch", (1, 2, 2), {"dtype": torch.bfloat16}),
    ("torch", (2, 1, 2), {}),
    ("deepspeed", (1, 2, 2), {"zero": 1}),
    ("deepspeed", (1, 2, 2), {"zero": 3}),
    ("deepspeed", (2, 1, 2), {}),
]


FORGOTTEN = ["h.2.up"]


@on_ranks_by_rows(
    [
        *((*row, True) for row in TARGETS),
        # Past that check, the gradients of whole parameters are compared.
        *((*row, False) for row in (TARGETS[0], *TARGETS[3:5])),
    ]
)
def test_a_forgotten_sync_is_named(
    target: str, layout: Any, given: dict[str, Any], checks: bool
) -> None:
    check = "first batch" if checks else False
    engine = make(target, layout, forgets=FORGOTTEN, micro_batches=2, check=check, **given)
    before = copied(engine)
    with pytest.raises(slapo.PlacementError) as told:
        engine.train_batch(data())
    assert is_unchanged(engine, before)
    # Under ZeRO-3 modules hold nothing that could be checked.
    if checks and given.get("zero") != 3:
        text = 'add sch["h.2.up"].sync("bwd_post", "all_reduce")'
    else:
        text = "the gradients of " + ("" if layout[0] > 1 else "'h.1.down.bias'")
    assert text in str(told.value)


@on_ranks(2)
def test_without_a_target_the_first_gradients_are_compared() -> None:
    mesh = slapo.init_mesh(tp=2, device="cpu")
    x, y = next(data())
    for forgets in ([], FORGOTTEN):
        model, _ = slapo.build(scheduled(seeded(), mesh["tp"], forgets=forgets))
        with torch.no_grad():
            model(x)
        loss = loss_fn(model(x), y)
        if not forgets:
            loss.backward()
            assert not any(p._backward_hooks for p in model.parameters())
            continue
        with pytest.raises(slapo.PlacementError, match=r"'h\.1\.down\.bias'"):
            loss.backward()
    model, _ = slapo.build(scheduled(seeded(), mesh["tp"]))
    with pytest.raises(slapo.PlacementError, match="different batches"):
        loss_fn(model((x + dist.get_rank()) % contract.VOCABULARY), y).backward()
    model, _ = slapo.build(scheduled(seeded(), mesh["tp"], forgets=FORGOTTEN), check=False)
    loss_fn(model(x), y).backward()


@on_ranks(2)
def test_what_the_check_cannot_follow_is_said_and_trains() -> None:
    mesh = slapo.init_mesh(tp=2, device="cpu")
    torch.manual_seed(0)
    # No rule follows it over slices; it has no effect here.
    unknown = Computes(lambda x: torch.renorm(x, 2, 0, 1e9))
    model = nn.Sequential(nn.Linear(4, 8), unknown, nn.Linear(8, 4))
    sch = slapo.create_schedule(model, group=mesh["tp"])
    sch["0"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", 1).sync("fwd_post", "all_reduce")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slapo").addHandler(handler)
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": contract.sgd}
    engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
    engine.train_batch(iter([(torch.ones(3, 4), torch.zeros(3, 4))]))
    told = any("could not follow" in line and "renorm" in line for line in lines)
    assert told == (dist.get_rank() == 0)
