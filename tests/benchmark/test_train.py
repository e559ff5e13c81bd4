"""``train`` and ``nodes``: points run, whatever ends them is a row, and pictures are drawn."""

import csv
import json
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from benchmark import node_plots, nodes, report, train, train_ranks
from benchmark.experiments import EXPERIMENTS, Point
from benchmark.measure import peak_of, profiled_peak_of
from benchmark.train_models import MODELS, model_named
from benchmark.train_options import IMPLS, TRIAL, Refused, TrainOptions, parse
from benchmark.train_plans import dtensor_plan
from benchmark.train_sides import SIDES, make_side, recomputing
from slapo.framework_dialect import get_dialect_cls
from slapo.model_schedule import recipe_keys
from tests.benchmark import megatron_gpt
from tests.distributed import run_distributed

SMALL = TrainOptions(model="gpt2", impl="eager", warmup=0, steps=1).shrunk()


# --- runs ----------------------------------------------------------------------------------------
def _train(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    train.main([*arguments, "--small", "--warmup", "0", "--steps", "1"])
    text = capsys.readouterr().out
    summary = get_dialect_cls("log_parser", "torch").parse_log(text)
    row: dict[str, Any] = json.loads(text.splitlines()[-1])
    assert summary.error_code == 0, text
    assert summary.samples_per_sec == row["throughput"]
    assert summary.param_per_gpu == row["parameters"]
    return row


@pytest.mark.distributed
def test_two_ranks_compute_what_one_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = _train(capsys, "--model", "gpt2", "--impl", "eager")
    command = ("--model", "gpt2", "--impl", "slapo-torch", "--gpus", "2", "--tp", "2")
    split = _train(capsys, *command, "--results", str(tmp_path))
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-4)
    assert split["parameters"] < 0.6 * whole["parameters"]
    assert split["peak_mib"] < 0.7 * whole["peak_mib"]
    assert split["tokens_s"] == pytest.approx(32 * split["throughput"], rel=1e-3)
    with (tmp_path / "train.csv").open() as file:
        (kept,) = csv.DictReader(file)
    assert kept["command"].startswith("python -m benchmark train --model gpt2")
    assert (kept["outcome"], kept["torch"]) == ("ok", torch.__version__)


@pytest.mark.distributed
def test_no_memory_is_an_outcome(capfd: pytest.CaptureFixture[str]) -> None:
    options = replace(SMALL, batch_size=1024, memory_limit=128)
    row = train.run(options, 60, apart=True)
    assert (row["outcome"], row["throughput"]) == ("out_of_memory", "")
    assert "can't allocate memory" in row["reason"]
    train.show(row)
    assert get_dialect_cls("log_parser", "torch").parse_log(capfd.readouterr().out).error_code == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (Refused("no such thing"), "refused"),
        (RuntimeError("broken"), "failed"),
        (ValueError("a fault of the peer's"), "failed"),
    ],
)
def test_an_error_is_an_outcome(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(train_ranks, "make_side", fails)
    row = train.run(SMALL, 60)
    assert row["outcome"] == outcome
    assert row["reason"] == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"impl": "megatron"}, "sees no CUDA device"),
        ({"impl": "megatron", "model": "t5"}, "there is none of t5"),
        ({"impl": "slapo-megatron"}, "needs CUDA"),
        ({"impl": "slapo-torch", "zero": 1}, "DDP (--zero 0) and FSDP2 (--zero 3)"),
        ({"impl": "dtensor"}, "no plan of DTensor's styles for gpt2"),
        ({"impl": "tp_plan"}, "no tensor-parallel plan for gpt2"),
        ({"model": "albert", "checkpoint_ratio": 0.25}, "recomputes all layers or none"),
        ({"impl": "slapo-torch", "model": "wideresnet", "kernels": "fused"}, "fused_loss"),
    ],
)
def test_what_a_side_cannot_do_is_a_row(given: dict[str, Any], words: str) -> None:
    row = train.run(replace(SMALL, **given), 60)
    assert row["outcome"] == "refused", row["reason"]
    assert words in row["reason"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 2}, "--impl dtensor or tp_plan"),
        ({"pp": 2}, "pass --pp 1"),
        ({"impl": "compile", "compile": True}, "--compile is for schedules"),
        ({"schedule": "gpipe"}, "is one of slapo-torch"),
        ({"zero": 3}, "no ZeRO stage 3"),
    ],
)
def test_options_of_other_sides_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        make_side(replace(SMALL, gpus=2, **given), cast(Any, None))


def test_how_ranks_ended(tmp_path: Path) -> None:
    def outcome(*words: Any) -> tuple[str, str]:
        row = train_ranks._outcome(dict(enumerate(words)), 5.0, str(tmp_path))
        return row["outcome"], row["reason"]

    fine = {"outcome": "ok", "reason": ""}
    failed = train_ranks.without_figures("failed", "peer gone")
    full = train_ranks.without_figures("out_of_memory", "full")
    (tmp_path / "rank1.log").write_text("Fatal:\nsegmentation")
    assert outcome(fine, fine) == ("ok", "")
    assert outcome(failed, full) == ("out_of_memory", "full")
    assert outcome(None, -11) == (
        "failed",
        "rank 1 ended with exit code -11; Fatal: segmentation",
    )
    assert "where memory is short" in outcome(-9, None)[1]
    assert outcome(fine, None) == ("timeout", "no response from ranks [1] for 5 s")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
def test_megatrons_own_gpt_on_two_stages() -> None:
    """The CPU stands in for CUDA; the size is that of the model of Transformers."""
    options = replace(SMALL, impl="megatron", gpus=2, pp=2, checkpoint_ratio=0.5)
    (losses, first), (others, last) = run_distributed(megatron_gpt.steps, 2, options, 3)
    assert losses == others
    assert 5.5 < losses[2] < losses[1] < losses[0] < 7.0  # from about log(512) = 6.2
    whole = model_named("gpt2").build(small=True, length=32)
    tied = whole.get_input_embeddings().weight.numel()
    assert first + last == sum(p.numel() for p in whole.parameters()) + tied


def test_some_layers_of_transformers_recompute() -> None:
    model = recomputing(model_named("bert").build(small=True, length=8), 0.5)
    layers: Any = model.get_submodule("bert.encoder.layer")
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False, False]


@pytest.mark.parametrize("name", ["albert", "wideresnet"])
def test_layers_recompute_by_pytorchs_own_checkpoints(name: str) -> None:
    plain, recomputed = (
        train.run(replace(SMALL, model=name, batch_size=4, checkpoint_ratio=ratio), 60)
        for ratio in (0.0, 1.0)
    )
    assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert recomputed["peak_mib"] < 0.99 * plain["peak_mib"]


# --- options -------------------------------------------------------------------------------------
def test_a_trial_of_a_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL, '{"batch_size": 2, "checkpoint_ratio": 0.25, "pp": 2}')
    options, _ = parse(
        ["--model", "opt", "--batch-size", "64", "--gpus", "2", "--micro-batches", "2"]
    )
    assert (options.batch_size, options.checkpoint_ratio, options.pp) == (2, 0.25, 2)
    for text, words in (
        ('{"batchsize": 2}', "did you mean 'batch_size'"),
        ("[1]", "pass an object"),
        ("{", "no JSON"),
        ('{"tp": "x"}', "tp is 'x', a str; pass a value of type int"),
        ('{"micro_batches": 1.5}', "pass a value of type int"),
    ):
        with pytest.raises(ValueError, match=words):
            options.with_trial({TRIAL: text})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "3", "--tp", "2"], "gpus=3 is not divisible by tp=2 x pp=1"),
        (["--batch-size", "3", "--micro-batches", "2"], "not divisible by micro_batches=2"),
        (["--checkpoint-ratio", "1.5"], "pass a share"),
        (["--steps", "0"], "{'steps': 0} must be whole numbers"),
        (["--small", "--device", "cuda"], "--small trains on a CPU"),
        (["--small", "--results", f"{__file__}/results"], "cannot be made"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.main(arguments)
    assert words in capsys.readouterr().err


def test_points_of_the_tuners_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point is options of a command, which its trial understands, and a dry run."""
    pytest.importorskip("optuna")
    from benchmark import train_space
    from slapo.autotune.space import survey

    points = survey(train_space.space).points
    asked = {name for point in points for name in point.values}
    assert {"tp", "pp", "zero", "schedule", "micro_batches", "kernels"} < asked
    for point in points[:: len(points) // 8]:
        words = train_space.command(point.values)
        monkeypatch.delenv(TRIAL, raising=False)
        options, _ = parse(words[words.index("train") + 1 :])
        assert {name: getattr(options, name) for name in point.values} == point.values
        assert options.batch_size * options.dp == train_space.SAMPLES
        monkeypatch.setenv(TRIAL, json.dumps(point.values))
        assert parse(words[words.index("train") + 1 :])[0] == options
        found = train_space.predict(point.values)
        assert found.throughput > 0
        assert found.layout.ranks == options.gpus


def test_names() -> None:
    assert set(SIDES) == set(IMPLS)
    assert {model.key for model in MODELS.values()} <= set(recipe_keys())
    with pytest.raises(ValueError, match="did you mean 'gpt2'"):
        model_named("gpt-2")
    with pytest.raises(Refused):
        dtensor_plan("opt")


# --- experiments ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_points_are_commands(name: str) -> None:
    points = EXPERIMENTS[name].points
    places = [(point.panel, point.group, point.side) for point in points]
    assert len(set(places)) == len(places), "each bar has one place"
    for point in points:
        point.options.check()
        assert _parsed(name, point) == point.options
        small = point.shrunk()
        assert _parsed(name, small) == small.options
        assert small.options.gpus <= 2
        assert small.options.small


def _parsed(name: str, point: Point) -> TrainOptions:
    words = shlex.split(nodes.command_of(name, point))
    options, given = parse(words[words.index("train") + 1 :])
    assert (given.experiment, given.place) == (name, [point.panel, point.group, point.side])
    return options


def test_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    nodes.main(["multi_node", "--list"])
    title, *commands = capsys.readouterr().out.splitlines()
    assert title == "# multi_node: Nodes of eight V100"
    assert all(line.startswith("torchrun --nnodes") for line in commands)
    with pytest.raises(SystemExit):
        nodes.main(["single_nodes"])
    assert "did you mean 'single_node'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        nodes.main(["single_node", "--small", "--results", f"{__file__}/results"])
    assert "cannot be made" in capsys.readouterr().err


def test_a_machine_without_so_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    row = nodes.run_point(TrainOptions(gpus=8, tp=8, device="cuda"), 1.0)
    assert row["outcome"] == "refused"
    assert "it needs 8 GPUs, and this machine has 1" in row["reason"]


@pytest.mark.distributed
def test_an_experiment_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    nodes.main(["ablation", "--small", "--first", "2", "--results", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "ablation_small (2 of 2):" in shown
    with (tmp_path / "ablation_small.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["group"] for row in rows] == ["as it comes", "+ kernels"]
    assert [row["outcome"] for row in rows] == ["ok", "ok"], rows
    assert (tmp_path / "ablation_small.png").stat().st_size > 1000


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_picture_from_the_csv_file(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    experiment = EXPERIMENTS[name]
    assert node_plots.draw(name, experiment, tmp_path) is None, "nothing was measured yet"
    outcomes = ("ok", "out_of_memory", "refused", "failed", "timeout")
    for number, point in enumerate(experiment.points[:10]):
        outcome = outcomes[number % len(outcomes)]
        row = {
            "panel": point.panel,
            "group": point.group,
            "side": point.side,
            "small": point.options.small,
            "outcome": outcome,
            "throughput": 10.0 + number if outcome == "ok" else "",
        }
        report.extend(name, row, "command", tmp_path)
    picture = node_plots.draw(name, experiment, tmp_path)
    assert picture == tmp_path / f"{name}.png"
    assert picture.stat().st_size > 1000
    with pytest.raises(ValueError, match="has other columns"):
        report.extend(name, {"a": 1}, "command", tmp_path)


# --- memory --------------------------------------------------------------------------------------
@pytest.mark.parametrize("measure", [peak_of, profiled_peak_of])
def test_peak_of_a_step(measure: Any) -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        if not kept:  # as an optimizer's state
            kept.append(torch.zeros(1000))
        kept[0].add_(1.0)
        first = torch.ones(500)
        second = first + 1.0
        del first
        second.view(2, 250).mul_(2.0)

    module = nn.Linear(10, 10, bias=False)
    # The profiler sees the numbers 1.0 and 2.0 too.
    assert measure(step, module) == pytest.approx(4 * (100 + 1000 + 500 + 500), abs=64)
