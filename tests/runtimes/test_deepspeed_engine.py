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
from tests.runtimes import contract
from tests.runtimes.alone import Alone, compare, compare_by_hand, of_this_rank
from tests.runtimes.contract import SIZE, VOCABULARY, data, halving, sgd
from tests.runtimes.ranks import error_of, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


REPLICAS, STAGES = (1, 2, 1), (2, 1, 1)


class Model(contract.Model):
    """With a float mask and a second state that cross every cut, and a parameter of one number.

    The state needs a gradient, which the last stage may not pass on.
    """

    def __init__(self, detaches: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.temperature, self.detaches = nn.Parameter(torch.tensor(1.3)), detaches

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        first = self.emb(ids) * self.temperature
        x, scale = first, (ids > 3).to(first.dtype) + 0.5
        for block in self.h:
            x = block(x, scale)
        first = first.detach() if self.detaches else first
        return {"logits": self.head(x + 0.1 * first)}


def loss_fn(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return contract.loss_fn(output["logits"].float(), targets)


def make(layout: tuple[int, int, int], model: nn.Module | None = None, **options: Any) -> Any:
    given = {"loss_fn": loss_fn, "micro_batches": 2, **options}
    return contract.make("deepspeed", layout, model=model or Model(), **given)


def alone(model: nn.Module | None = None, optimizer: Any = sgd, **options: Any) -> Alone:
    """The model in one process."""
    return Alone(model or Model(), loss_fn, optimizer, **options)


def refused(layout: tuple[int, int, int], model: nn.Module | None = None, **options: Any) -> str:
    return error_of(lambda: make(layout, model, **options))


# --- without pipeline ----------------------------------------------------------------------------
@on_ranks(2)
def test_call_backward_step() -> None:
    """Drive the engine by hand: each step is one update, whatever micro_batches is."""
    for zero in (0, 1, 2):
        engine = make(REPLICAS, zero=zero)
        assert max(compare_by_hand(engine, alone(), data(3)).values()) < 1e-5, zero
    for zero in (0, 1):
        engine = make(REPLICAS, zero=zero)
        ids, targets = of_this_rank(engine.mesh, next(data()))
        engine.backward(loss_fn(engine(ids), targets))
        loss = loss_fn(engine(ids), targets)
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
        reference = alone(parts=2 * layout[1], clip=0.3, dtype=torch.float16)
        engine = make(layout, dtype=torch.float16, **options)
        found = compare(engine, reference, data(4))
        # Eleven bits for each of a loss's many parts, whose sizes are about 1.
        assert max(found["losses"], found["state"]) <= 3e-3, found
        assert found["norms"] <= 1e-2, found


@on_ranks(2)
def test_optimizer_sizes_and_clipping_out_of_the_config() -> None:
    """With a scheduler of the optimizer that the configuration describes."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "train_micro_batch_size_per_gpu": 2,  # of 8 samples on two ranks
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
    }
    before = copy.deepcopy(config)
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.01)
    reference = alone(None, adamw, clip=0.3, lr_scheduler=halving)
    given = {"optimizer": None, "micro_batches": None, "lr_scheduler": halving}
    engine = make(REPLICAS, config=config, **given)
    assert compare(engine, reference, data(3))["losses"] < 1e-5
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
def frozen_start() -> Model:
    """Nothing to train before the first cut."""
    model = Model()
    model.head = nn.Linear(SIZE, VOCABULARY)
    for part in (model.emb, *model.h[:2], model.temperature):
        part.requires_grad_(False)
    return model


@on_ranks(2)
def test_with_pipeline() -> None:
    # Two engines alive at one time, and a model that arrives in eval mode.
    engines = make(STAGES, Model(detaches=True)), make(STAGES, Model().eval())
    references = alone(Model(detaches=True)), alone()
    for batch in data(2):
        for engine, reference in zip(engines, references, strict=True):
            assert max(compare(engine, reference, [batch]).values()) < 1e-5
    assert all(module.training for module in engine.module.modules())
    make(STAGES, micro_batches=1, zero=1).train_batch(data())

    # Backward comes by the embedding once for each micro-batch, though two tensors that hang on it
    # reach the next stage.
    engine, walks = make(STAGES), []
    is_first = engine.mesh.get_local_rank("pp") == 0
    if is_first:
        engine.module.get_parameter("emb.weight").register_hook(walks.append)
    engine.train_batch(data())
    assert len(walks) == 2 * is_first


@on_ranks(2)
def test_refusals_with_pipeline() -> None:
    """Beside those of the contract."""
    engine = make(STAGES)
    for call in (lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(slapo.SlapoError, match="train_batch"):
            call()
    text = refused(STAGES, frozen_start(), zero=1)
    assert "no parameter on" in text or "rank 0" in text
    assert "ZeRO stage 2 does not fit pp=2" in refused(STAGES, zero=2)


@on_ranks(2)
def test_groups_of_deepspeed_have_the_timeout_of_the_job() -> None:
    slapo.init_mesh(pp=2, timeout=50)
    engine = make(STAGES)
    groups = [g for g in vars(engine.engine.grid).values() if isinstance(g, dist.ProcessGroup)]
    assert groups
    for group in groups:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 50
