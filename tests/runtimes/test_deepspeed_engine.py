"""The engine of target "deepspeed" beyond plain training, and what goes wrong on all ranks."""

import copy
import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo
from tests.runtimes.alone import compare, compare_by_hand
from tests.runtimes.contract import SIZE, VOCABULARY, halving
from tests.runtimes.deepspeed_models import Model, alone, batches, loss_fn, make, seeded
from tests.runtimes.ranks import error_of, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


REPLICAS, STAGES = (1, 2, 1), (2, 1, 1)


def refused(layout: tuple[int, int, int], model: nn.Module | None = None, **options: Any) -> str:
    return error_of(lambda: make(layout, Model() if model is None else model, **options))


# --- without pipeline ----------------------------------------------------------------------------
@on_ranks(2)
def test_call_backward_step() -> None:
    """Drive the engine by hand: each step is one update, whatever micro_batches is."""
    for zero in (0, 1, 2):
        model = seeded()
        reference, engine = alone(model, parts=2), make(REPLICAS, model, zero=zero)
        assert max(compare_by_hand(engine, reference, batches(2, 3)).values()) < 1e-5, zero
    for zero in (0, 1):
        engine = make(REPLICAS, Model(), zero=zero)
        inputs, targets = batches(1, 1)[0]
        engine.backward(loss_fn(engine(*inputs), targets))
        loss = loss_fn(engine(*inputs), targets)
        text = error_of(partial(engine.backward, loss))
        assert ("call step() after each" in text) if zero else text == "no error"
        engine.step()  # what it says to do, and the engine is as before


@on_ranks(2, timeout=240)
def test_float16_scales_the_loss() -> None:
    """As if the CPU were a device on which DeepSpeed has float16; torch does compute in it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    from slapo.framework_dialect.deepspeed import config

    merge_dtype = config._merge_dtype
    get_accelerator().is_fp16_supported = lambda: True
    config._merge_dtype = lambda *given: merge_dtype(*given[:-1], "cuda")
    # From the default of 2**16 the first steps overflow and are left out, as DeepSpeed has it.
    options = {"config": {"fp16": {"initial_scale_power": 8}}, "clip_grad_norm": 0.3}
    for layout in (STAGES, REPLICAS):
        reference = alone(seeded(), parts=2 * layout[1], clip=0.3, dtype=torch.float16)
        engine = make(layout, seeded(), dtype=torch.float16, **options)
        found = compare(engine, reference, batches(layout[1], 4))
        # Eleven bits for each of a loss's many parts, whose sizes are about 1.
        assert max(found["losses"], found["state"]) <= 3e-3, found
        assert found["norms"] <= 1e-2, found


@on_ranks(2)
def test_optimizer_sizes_and_clipping_out_of_the_config() -> None:
    """With a scheduler of the optimizer that the configuration describes."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    }
    before = copy.deepcopy(config)
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01)
    reference = alone(seeded(), adamw, 4, clip=0.3, lr_scheduler=halving)
    given = {"optimizer": None, "micro_batches": None, "lr_scheduler": halving}
    engine = make(REPLICAS, seeded(), config=config, **given)
    assert compare(engine, reference, batches(2, 3))["losses"] < 1e-5
    assert list(engine.scheduler.get_last_lr()) == [0.01 / 8]
    assert type(engine.optimizer).__name__ == "AdamW"
    assert config == before


@on_ranks(2)
def test_refusals_without_pipeline() -> None:
    """Beside those of the contract."""
    text = refused(REPLICAS, zero=3)
    assert text.startswith("ValueError")
    assert "temperature" in text
    text = "no parameter on this rank needs a gradient"
    assert text in refused(REPLICAS, Model().requires_grad_(False), zero=1)
    assert "mesh= and topology=" in refused(REPLICAS, topology=object())
    assert "clip_grad_norm is -1" in refused(REPLICAS, config={"gradient_clipping": -1})
    text = "clip_grad_norm differs between ranks"
    assert text in refused(REPLICAS, config={"gradient_clipping": 1.0 + dist.get_rank()})


# --- with pipeline -------------------------------------------------------------------------------
class Detached(Model):
    """The second stage passes no gradient on to one of the floats that it gets."""

    def forward(self, ids: Tensor, flags: Tensor) -> dict[str, Tensor]:
        first = self.emb(ids)
        x = first
        for block in self.h:
            x = block(x, flags.float() + 0.5)
        return {"logits": self.head(x * self.temperature + first.detach())}


def frozen_start() -> Model:
    """Nothing to train before the first cut."""
    model = Model()
    model.head = nn.Linear(SIZE, VOCABULARY)
    for part in (model.emb, *model.h[:2], model.temperature):
        part.requires_grad_(False)
    return model


@on_ranks(2)
def test_with_pipeline() -> None:
    torch.manual_seed(0)
    model = Detached()
    reference, engine = alone(model, parts=2), make(STAGES, model)
    found = compare(engine, reference, batches(1, 3))
    assert max(found["losses"], found["state"]) < 1e-5
    # A model that arrives in eval mode trains; so does one with a single micro-batch.
    for model, options in ((seeded().eval(), {}), (seeded(), {"micro_batches": 1, "zero": 1})):
        engine = make(STAGES, model, **options)
        engine.train_batch(iter(batches(1, 1)))
        assert all(module.training for module in engine.module.modules())

    # Two engines alive at one time.
    references = [alone(seeded(), parts=2) for _ in range(2)]
    engines = [make(STAGES, seeded()) for _ in range(2)]
    for batch in batches(1, 2):
        for engine, reference in zip(engines, references, strict=True):
            assert abs(engine.train_batch(iter([batch])).item() - reference.step(batch)) < 1e-5

    # Backward comes by the embedding once for each micro-batch, though two tensors that hang on it
    # reach the next stage.
    engine, walks = make(STAGES, Model()), []
    is_first = engine.mesh.get_local_rank("pp") == 0
    if is_first:
        engine.module.get_parameter("emb.weight").register_hook(walks.append)
    engine.train_batch(iter(batches(1, 1)))
    assert len(walks) == 2 * is_first


@on_ranks(2)
def test_refusals_with_pipeline() -> None:
    """Beside those of the contract."""
    engine = make(STAGES, seeded())
    inputs, targets = batches(1, 1)[0]
    for call in (lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(slapo.SlapoError, match="train_batch"):
            call()
    text = error_of(lambda: engine.train_batch(iter([(inputs, targets)[:1]])))
    assert text.startswith("TypeError")
    assert "inputs" in text
    assert "flags" in error_of(lambda: engine.train_batch(iter([(inputs[:1], targets)])))
    text = refused(STAGES, frozen_start(), zero=1)
    assert "no parameter on" in text or "rank 0" in text
    assert "ZeRO stage 2 does not fit pp=2" in refused(STAGES, zero=2)


@on_ranks(2)
def test_groups_of_deepspeed_have_the_timeout_of_the_job() -> None:
    slapo.init_mesh(pp=2, timeout=50)
    engine = make(STAGES, Model())
    groups = [g for g in vars(engine.engine.grid).values() if isinstance(g, dist.ProcessGroup)]
    assert groups
    for group in groups:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 50
