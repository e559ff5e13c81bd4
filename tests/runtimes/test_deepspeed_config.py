"""The configuration of target "deepspeed", and what is refused before any process group is used."""

import copy
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
import slapo.framework_dialect.deepspeed.runtime  # registers the target
from slapo.framework_dialect.deepspeed.config import Layout, load, merge
from slapo.framework_dialect.deepspeed.initialize import check_output

CPU = Layout(1, 2, 1, "cpu")
PIPE = Layout(2, 2, 1, "cpu")


def merged(config: dict[str, Any], layout: Layout = CPU, **given: Any) -> dict[str, Any]:
    return merge(config, {"optimizer": torch.optim.SGD, **given}, layout)


def test_arguments_fill_the_config_in() -> None:
    config = merged(
        {"zero_optimization": {"reduce_bucket_size": 7}},
        micro_batches=3,
        zero=2,
        clip_grad_norm=0.5,
    )
    assert config["zero_optimization"] == {"reduce_bucket_size": 7, "stage": 2}
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["train_batch_size"] == 6
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["zero_allow_untested_optimizer"] is True
    assert config["steps_per_print"] > 10**6
    assert not {"bf16", "fp16"} & set(config)


def test_the_config_speaks_where_arguments_are_silent() -> None:
    config = {
        "train_batch_size": 24,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 2,
        "bf16": {"enabled": True},
        "steps_per_print": 5,
    }
    before = copy.deepcopy(config)
    found = merged(config)
    assert config == before
    assert found.pop("data_types") == {"grad_accum_dtype": "fp32"}
    assert found["train_micro_batch_size_per_gpu"] == 3
    assert config.items() <= found.items()


def test_auto_entries_are_filled_in() -> None:
    config = merged(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "zero_optimization": {"stage": "auto"},
        },
        micro_batches=2,
        dtype=torch.bfloat16,
    )
    assert "auto" not in json.dumps(config)
    assert config["bf16"]["enabled"] is True
    assert config["fp16"]["enabled"] is False
    assert config["zero_optimization"]["stage"] == 1


def test_bfloat16_adds_up_in_float32() -> None:
    config = merged({}, dtype=torch.bfloat16)
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["communication_data_type"] == "fp32"
    own = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}
    config = merged(own, dtype=torch.bfloat16)
    assert config["data_types"] == {"grad_accum_dtype": "bf16"}


def test_a_pipeline_sends_whole_tensors() -> None:
    assert merged({}, PIPE)["pipeline"] == {
        "pipe_partitioned": False,
        "grad_partitioned": False,
        "use_reentrant": False,
    }
    assert "pipeline" not in merged({}, CPU)


def test_adam_of_the_config_is_not_compiled_on_a_cpu() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    params = merged(config, optimizer=None)["optimizer"]["params"]
    assert params == {"lr": 0.1, "torch_adam": True}
    gpu = merged(config, Layout(1, 2, 1, "cuda"), optimizer=None)
    assert gpu["optimizer"] == config["optimizer"]


#: Layout -> configuration, arguments, and what the message names.
REFUSED: dict[Layout, list[tuple[dict[str, Any], dict[str, Any], list[str]]]] = {
    CPU: [
        ({"gradient_accumulation_steps": 4}, {"micro_batches": 2}, ["=4", "micro_batches=2"]),
        ({"zero_optimization": {"stage": 3}}, {"zero": 1}, ["zero_optimization.stage=3", "zero=1"]),
        ({"gradient_clipping": 1.0}, {"clip_grad_norm": 2.0}, ["1.0", "clip_grad_norm=2.0"]),
        ({"bf16": {"enabled": True}}, {"dtype": torch.float32}, ["bf16", "torch.float32"]),
        ({"bf16": {"enabled": False}}, {"dtype": torch.bfloat16}, ["bf16", "torch.bfloat16"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, ["bf16 and fp16"]),
        ({"optimizer": {"type": "Lamb"}}, {}, ["optimizer='Lamb'", "optimizer="]),
        ({"scheduler": {"type": "W"}}, {"lr_scheduler": print}, ["'W'", "lr_scheduler="]),
        ({"train_batch_size": 9}, {"micro_batches": 2}, ["train_batch_size=9", "dp=2"]),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3},
            {"micro_batches": 2},
            ["train_batch_size=8", "train_micro_batch_size_per_gpu=3"],
        ),
        ({"managed_gradient_accumulation": False}, {}, ["managed_gradient_accumulation=False"]),
        ({}, {"dtype": torch.bfloat16, "zero": 0}, ["ZeRO stage 0", "zero=1"]),
        ({}, {"dtype": torch.float16}, ["float16", "CPU"]),
        ({}, {"zero": 4}, ["4"]),
        ({}, {"zero": 1, "optimizer": None}, ["ZeRO stage 1", "optimizer="]),
        ({"gradient_accumulation_steps": 0}, {}, ["micro_batches is 0"]),
        ({"zero_optimization": 2}, {}, ["zero_optimization is 2"]),
    ],
    PIPE: [
        ({}, {"zero": 2}, ["ZeRO stage 2 does not fit pp=2"]),
        ({"zero_optimization": {"stage": 3}}, {}, ["ZeRO stage 3 does not fit pp=2"]),
        ({"pipeline": {"pipe_partitioned": True}}, {}, ["pipeline.pipe_partitioned=True"]),
    ],
    Layout(1, 1, 2, "cpu"): [({"tensor_parallel": {"autotp_size": 2}}, {}, ["autotp_size=2"])],
}


@pytest.mark.parametrize(
    ("layout", "config", "request_", "values"),
    [(layout, *row) for layout, rows in REFUSED.items() for row in rows],
)
def test_contradictions_name_both_values(
    layout: Layout, config: dict[str, Any], request_: dict[str, Any], values: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^deepspeed: ") as error:
        merged(config, layout, **request_)
    for value in values:
        assert value in str(error.value)


def test_a_config_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"steps_per_print": 3}')
    assert load(path) == load(str(path)) == {"steps_per_print": 3}
    assert load(None) == {}
    path.write_text("[1]")
    with pytest.raises(TypeError, match="list"):
        load(path)
    with pytest.raises(TypeError, match="int"):
        load(3)  # type: ignore[arg-type]


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    sch = slapo.create_schedule(nn.Linear(2, 2))
    with pytest.raises(slapo.MissingPackageError, match=r"slapo\[deepspeed\]"):
        slapo.build(sch, target="deepspeed")


def test_something_to_run_on_is_needed(monkeypatch: Any) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    sch = slapo.create_schedule(nn.Linear(2, 2))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="mesh="):
        slapo.build(sch, target="deepspeed")
    with pytest.raises(slapo.SlapoError, match=r"init_distributed"):
        slapo.build(sch, target="deepspeed", config={"train_batch_size": 1})
    with pytest.raises(TypeError, match="no option 'surprise'; it takes"):
        slapo.build(sch, target="deepspeed", surprise=1)


def test_outputs_that_deepspeed_does_not_look_into() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor

    for output in (torch.ones(1), (1, 2), {"logits": torch.ones(1)}):
        assert check_output(output) is output
    with pytest.raises(slapo.SlapoError, match=r"returns a Output.* a list or a dict"):
        check_output(Output(torch.ones(1)))
