"""build: checks before lowering, agreement of ranks, runtimes as plug-ins."""

import dataclasses
import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo
from slapo.framework_dialect import Lowering, Runtime, get_dialect_cls, register_framework_dialect
from slapo.framework_dialect.registry import _DIALECTS
from tests.primitives.models import Stack


def test_runtimes_are_plug_ins() -> None:
    class Recorder(Runtime):
        def __init__(self, sch: slapo.Schedule, **options: Any) -> None:
            self.options = options

        def stages_of_this_rank(self, n_stages: int) -> tuple[int, ...]:
            assert n_stages == 2
            return (1,)

        def lower(self, lowering: Lowering) -> tuple[Any, Any]:
            return (lowering, self.options), "optimizer"

    try:
        register_framework_dialect("recorder")(Recorder)
        assert get_dialect_cls("runtime", "recorder") is Recorder
        with pytest.raises(ValueError, match="taken by Recorder"):
            register_framework_dialect("recorder")(Recorder)
        with slapo.init_empty_weights():
            sch = slapo.create_schedule(Stack(2))
        sch.trace(recursive=False)
        sch["layers.0"].cut_pipeline_stage()
        (lowering, options), optimizer = slapo.build(sch, target="recorder", config={"a": 1})
        assert options == {"config": {"a": 1}}
        assert optimizer == "optimizer"
        assert lowering.model is sch.mod
        assert list(lowering.stages) == [1]
        # Only this rank's stage has values.
        assert all(p.is_meta for p in sch.mod.submod_0.parameters())
        assert not any(p.is_meta for p in sch.mod.submod_1.parameters())
        assert lowering.state_dict().keys() == {
            name for name in Stack(2).state_dict() if not name.startswith("layers.0")
        }
    finally:
        _DIALECTS.pop(("runtime", "recorder"), None)


def test_the_help_of_build_tells_the_options_of_every_target() -> None:
    from slapo.framework_dialect.deepspeed.runtime import DeepSpeedOptions
    from slapo.framework_dialect.megatron.options import MegatronOptions
    from slapo.framework_dialect.pytorch.options import TorchOptions

    text = slapo.build.__doc__ or ""
    for options in (TorchOptions, DeepSpeedOptions, MegatronOptions):
        for field in dataclasses.fields(options):
            assert f"``{field.name}" in text, (options.__name__, field.name)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from then on")
def test_an_error_in_a_call_names_its_module() -> None:
    """Torch says no place of mixed dtypes, or of a wrong size."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4)))
    model[1][1].to(torch.bfloat16)
    built, _ = slapo.build(slapo.create_schedule(model))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        built(torch.ones(2, 4))
    assert caught.value.__notes__ == ["slapo: raised in '1.1', a Linear of bfloat16"]

    mesh, loss_fn = slapo.init_mesh(device="cpu"), nn.functional.mse_loss
    sch = slapo.create_schedule(nn.Sequential(nn.GELU(), nn.Linear(4, 4)))
    given = {"mesh": mesh, "loss_fn": loss_fn, "optimizer": torch.optim.SGD}
    engine, _ = slapo.build(sch, "torch", **given)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        engine.train_batch(iter([(torch.ones(2, 3), torch.ones(2, 4))]))
    assert caught.value.__notes__ == ["slapo: raised in '1', a Linear of float32"]


def test_the_digest_sees_what_a_partial_is_given() -> None:
    def scale(by: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * by

    digests = set()
    for by in (2, 3):
        sch = slapo.create_schedule(nn.Sequential(nn.ReLU()))
        sch["0"].sync("fwd_post", functools.partial(scale, by))
        digests.add(sch.digest())
    assert len(digests) == 2
