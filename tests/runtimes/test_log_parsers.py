"""Logs of the runtimes, read again."""

from pathlib import Path

import pytest

from slapo.framework_dialect import get_dialect_cls

TARGETS = ["torch", "deepspeed", "megatron"]
OWN = "parameters per rank: 2,000, samples/s: 12.50, peak memory: 300 MiB\n"
LOGS = {
    "torch": OWN,
    "deepspeed": (
        "[INFO] RANK=0 STAGE=0 LAYERS=2 [0, 2) STAGE_PARAMS=1000 (0.001M) TOTAL_PARAMS=3000\n"
        "[INFO] RANK=1 STAGE=1 LAYERS=2 [2, 4) STAGE_PARAMS=2000 (0.002M) TOTAL_PARAMS=3000\n"
        "epoch=0/micro_step=1/global_step=1, RunningAvgSamplesPerSec=3.0, CurrSamplesPerSec=1.5, "
        "MemAllocated=0.1GB, MaxMemAllocated=0.25GB\n"
        "steps: 2 loss: 3.1415 iter time (s): 0.640 samples/sec: 12.500\n"
        "steps: 3 loss: 3.1415 iter time (s): 0.640 samples/sec: 12.500\n"
    ),
    "megatron": (
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 2000\n"
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 1000\n"
        " iteration 1/ 3 | consumed samples: 8 | elapsed time per iteration (ms): 9000.0 | "
        "learning rate: 1.0E-04 | global batch size:     8 | lm loss: 1.0E+00 |\n"
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: 256.0 | "
        "reserved: 300.0 | max reserved: 310.0\n"
        " iteration 2/ 3 | consumed samples: 16 | elapsed time per iteration (ms): 640.0 | "
        "learning rate: 1.0E-04 | global batch size:     8 | lm loss: 1.0E+00 |\n"
        " iteration 3/ 3 | consumed samples: 24 | elapsed time per iteration (ms): 640.0 | "
        "learning rate: 1.0E-04 | global batch size:     8 | lm loss: 1.0E+00 |\n"
    ),
}


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_run_measured(target: str, tmp_path: Path) -> None:
    parser = get_dialect_cls("log_parser", target)
    memory = 300.0 if target == "torch" else 256.0
    assert parser.parse_log(LOGS[target]) == (2000, 12.5, memory, 0)
    file = tmp_path / "run.log"
    file.write_text(LOGS[target])
    assert parser.parse_log(file) == parser.parse_log(str(file)) == (2000, 12.5, memory, 0)
    assert parser.parse_log(OWN) == (2000, 12.5, 300.0, 0)  # the example's, whatever the target


@pytest.mark.parametrize("target", TARGETS)
def test_what_became_of_it(target: str) -> None:
    parse = get_dialect_cls("log_parser", target).parse_log
    trace = "Traceback (most recent call last):\n"
    assert parse(f"{trace}torch.OutOfMemoryError: CUDA out of memory.\n").error_code == 1
    assert parse(f"{LOGS[target]}{trace}RuntimeError: shapes\n").error_code == 2
    assert parse("killed\n") == parse("") == (0, 0.0, 0.0, 2)
    with pytest.raises(FileNotFoundError):
        parse("no/such/file.log")


def test_the_kind_comes_first() -> None:
    with pytest.raises(ValueError, match=r"no kind .* 'torch'; known are \['log_parser', 'runtime"):
        get_dialect_cls("torch", "log_parser")
    with pytest.raises(ValueError, match="no log_parser is registered for target 'jax'; known"):
        get_dialect_cls("log_parser", "jax")
