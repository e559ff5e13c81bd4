"""Folders of Hugging Face: into any layout, and out of it the same, byte for byte."""

import copy
import csv
import filecmp
import gc
import math
import os
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

import slapo
from benchmark import draft_cases
from benchmark.report import RESULTS
from slapo.op import FusedQKV
from slapo.weights import export
from slapo.weights.folders import Folder
from slapo.weights.pieces import index_of
from tests.distributed import run_distributed
from tests.model_schedule.models import MODELS, tokens
from tests.runtimes.ranks import RUNTIMES, error_of, on_ranks, stand_in_for_cuda
from tests.sharding.packed import MLP, Attention, Packed, heads_of
from tests.verify.test_verify import Turned, interleave

LIMIT = "60KB"
#: Of Transformers; the others have no folders.
KEYS = [key for key in MODELS if key != "wideresnet"]


def loss_of(output: Any, _: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output.square().mean()


def contents(path: str | Path) -> dict[str, Tensor]:
    with Folder(path) as folder:
        return {n: folder.read(n, t.pieces[0].source) for n, t in folder.leaves().items()}


def differences(left: str | Path, right: str | Path) -> list[str]:
    """What two folders do not have alike."""
    one, two = contents(left), contents(right)
    found = sorted(one.keys() ^ two.keys())
    for name in one.keys() & two.keys():
        if one[name].dtype != two[name].dtype or not torch.equal(one[name], two[name]):
            found.append(name)
    for config in ("config.json", "generation_config.json"):
        pair = [Path(path, config) for path in (left, right)]
        if pair[0].exists() and not (pair[1].exists() and filecmp.cmp(*pair, shallow=False)):
            found.append(config)
    return found


def local(parameter: Any) -> Tensor:
    share = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return getattr(parameter, "ds_tensor", share)


def bytes_held(module: nn.Module) -> int:
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    saved = [t for t in tensors.values() if hasattr(t, "slapo_origin")]
    return sum(local(t).nbytes for t in saved)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("folders")
    for key in KEYS:
        MODELS[key].build().save_pretrained(where / key, max_shard_size=LIMIT)
    return where


def scheduled(key: str, mesh: Any, on_meta: bool, **options: Any) -> slapo.Schedule:
    with slapo.init_empty_weights(enable=on_meta):
        model = MODELS[key].build()
    if not on_meta:
        for parameter in model.parameters():
            parameter.data.zero_()
    pp = mesh.shape[0]
    cuts = {"pipeline_cuts": pp, "example_inputs": MODELS[key].inputs(2, 8)} if pp > 1 else {}
    return slapo.apply_schedule(model, key, group=mesh["tp"], **cuts, **options)


def there_and_back(
    rank: int,
    world: int,
    where: str,
    keys: list[str],
    layout: tuple[int, int, int],
    target: str,
    options: dict[str, Any],
    on_meta: bool,
) -> None:
    """From a folder to this rank's slices, before build or after it, and out again."""
    if target == "megatron":
        stand_in_for_cuda()
    mesh = slapo.init_mesh(*layout, device="cpu")
    for key in keys:
        sch = scheduled(key, mesh, on_meta)
        late = "late" in options
        given = {name: value for name, value in options.items() if name != "late"}
        if layout[0] > 1:
            given["micro_batches"] = 2
        found = None if late else slapo.load_pretrained(sch, f"{where}/{key}")
        engine, _ = slapo.build(
            sch, target, mesh=mesh, loss_fn=loss_of, optimizer=torch.optim.SGD, **given
        )
        if found is None:
            found = slapo.load_pretrained(engine, f"{where}/{key}")
        assert (found.missing, found.unexpected) == ((), ()), key
        divides = given.get("zero") == 3
        is_whole = given.get("data_parallel") == "fsdp" or (divides and not on_meta)
        if late or not is_whole:
            share = sum(bytes_held(m) for m in engine.lowering.stages.values() or [engine.module])
            if not (late or divides) and mesh.get_local_rank("dp") > 0:
                share = 0  # it takes what the first replica has read
            assert abs(found.bytes_read - share) <= 64 * divides, key
        out = f"{where}/{key}_out"
        slapo.save_pretrained(engine, out, max_shard_size=LIMIT)
        if rank == 0:
            assert differences(f"{where}/{key}", out) == [], key
            shutil.rmtree(out)
        torch.distributed.barrier()


#: Layout, engine, options, and whether the model has no values before.
PLACES: dict[str, tuple[Any, ...]] = {
    "tp 2": ((1, 1, 2), "torch", {}, True),
    "tp 2 in place": ((1, 1, 2), "torch", {}, False),
    "pp 2": ((2, 1, 1), "torch", {}, True),
    "dp 2": ((1, 2, 1), "torch", {}, True),
    "fsdp late": ((1, 2, 1), "torch", {"data_parallel": "fsdp", "late": True}, False),
    "fsdp": ((1, 2, 1), "torch", {"data_parallel": "fsdp", "dtype": torch.bfloat16}, True),
    "zero 1 late": ((1, 2, 1), "deepspeed", {"zero": 1, "late": True}, False),
    "zero 3 late": ((1, 2, 1), "deepspeed", {"zero": 3, "late": True}, False),
    "zero 2": ((1, 2, 1), "deepspeed", {"zero": 2}, True),
    "zero 3": ((1, 2, 1), "deepspeed", {"zero": 3}, True),
    "megatron tp 2": ((1, 1, 2), "megatron", {"late": True}, False),
    "pp 2 tp 2": ((2, 1, 2), "torch", {}, True),
    "tp 4": ((1, 1, 4), "torch", {}, True),
    "pp 2 fsdp": ((2, 2, 1), "torch", {"data_parallel": "fsdp"}, True),
    "hsdp tp 2": ((1, 2, 2), "torch", {"data_parallel": "fsdp", "late": True}, False),
}
#: With all families alone.
WIDE: dict[str, tuple[Any, ...]] = {
    "dp 2 tp 2": ((1, 2, 2), "torch", {}, True),
    "fsdp tp 2": ((1, 2, 2), "torch", {"data_parallel": "fsdp"}, True),
    **{f"zero {n} tp 2": ((1, 2, 2), "deepspeed", {"zero": n}, True) for n in (1, 2, 3)},
}
#: Families of a place; of the others one for each way of packing and tying weights.
FAMILIES = {
    "tp 2": KEYS,
    "pp 2": ["gpt2", "t5", "vit"],  # a capture takes seconds
    "megatron tp 2": ["gpt2", "llama"],
    "pp 2 tp 2": ["llama"],
    "pp 2 fsdp": ["gpt2"],
}
SOME = ["gpt2", "llama", "mixtral", "t5"]


def rows() -> Iterator[Any]:
    """Places with some families, and with all of them."""
    for name, place in PLACES.items():
        marks = [pytest.mark.slow] if math.prod(place[0]) == 4 else []
        yield pytest.param(place, FAMILIES.get(name, SOME), 280, id=name, marks=marks)
    of_all = [
        "pp 2",
        "tp 2 in place",
        "fsdp",
        "fsdp late",
        "dp 2",
        "tp 4",
        "pp 2 tp 2",
        "pp 2 fsdp",
    ]
    marks = [pytest.mark.wide, pytest.mark.timeout(600)]
    for name, place in {**{name: PLACES[name] for name in of_all}, **WIDE}.items():
        keys = [key for key in KEYS if key != "albert" or place[0][0] == 1]
        yield pytest.param(place, keys, 550, id=f"{name}, all families", marks=marks)


@pytest.mark.distributed
@pytest.mark.parametrize(("place", "keys", "timeout"), [*rows()])
def test_folders_come_back_the_same(
    folders: Path, place: tuple[Any, ...], keys: list[str], timeout: float
) -> None:
    layout, target, *_ = place
    pytest.importorskip(RUNTIMES[target])
    ranks = math.prod(layout)
    run_distributed(there_and_back, ranks, str(folders), keys, *place, timeout=timeout)


@pytest.mark.wide
@pytest.mark.timeout(600)
@on_ranks(2, timeout=550)
def test_folders_of_all_drafts_come_back(tmp_path: Path) -> None:
    mesh = slapo.init_mesh(tp=2, device="cpu")
    with (RESULTS / "drafts.csv").open() as file:
        known = {row["config"]: row["variant"] for row in csv.DictReader(file)}
    count = 0
    for case in draft_cases.configs(draft_cases.PLANS):
        if not known.get(case.name):  # its model runs by itself with none of the settings
            continue
        model = case.build(int(known[case.name]))
        folder, out = tmp_path / case.name, tmp_path / f"{case.name}_out"
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
        with slapo.init_empty_weights():
            empty = type(model)(case.load().from_pretrained(folder))
        sch = slapo.apply_schedule(empty, "draft", mesh=mesh)
        found = slapo.load_pretrained(sch, folder)
        built, _ = slapo.build(sch)
        slapo.save_pretrained(built, out)
        assert (found.missing, found.unexpected, differences(folder, out)) == ((), (), []), case
        count += 1
        torch.distributed.barrier()
    assert count >= 122


# --- one process ---------------------------------------------------------------------------------
def llama(**changes: Any) -> nn.Module:
    return MODELS["llama"].build(**changes)


def on_meta(**changes: Any) -> slapo.Schedule:
    with slapo.init_empty_weights():
        return slapo.create_schedule(llama(**changes))


def test_a_model_from_a_folder_computes_what_it_did(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sch = on_meta()
    slapo.load_pretrained(sch, folders / "llama")
    model, _ = slapo.build(sch)
    kind = transformers.LlamaForCausalLM
    given = tokens(2, 8)
    expected = kind.from_pretrained(folders / "llama")(**given)
    assert torch.equal(model(**given).logits, expected.logits)
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    slapo.save_pretrained(model, tmp_path / "half", dtype=torch.bfloat16)
    half = kind.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())


def test_a_dtype_of_the_schedule(folders: Path) -> None:
    sch = on_meta()
    slapo.load_pretrained(sch, folders / "llama", dtype=torch.bfloat16)
    model, _ = slapo.build(sch)
    assert model.lm_head.weight.dtype == torch.bfloat16
    whole = contents(folders / "llama")["lm_head.weight"]
    assert torch.equal(model.lm_head.weight, whole.bfloat16())


def test_a_new_head_is_initialized(folders: Path) -> None:
    settings = transformers.LlamaConfig.from_pretrained(folders / "llama", num_labels=3)
    torch.manual_seed(0)
    with slapo.init_empty_weights():
        model = transformers.LlamaForSequenceClassification(settings)
    sch = slapo.create_schedule(model)
    found = slapo.load_pretrained(sch, folders / "llama")
    assert (found.missing, found.unexpected) == (("score.weight",), ("lm_head.weight",))
    model, _ = slapo.build(sch)
    assert 0.01 < float(model.score.weight.detach().std()) < 0.03
    whole = contents(folders / "llama")
    assert torch.equal(model.model.embed_tokens.weight, whole["model.embed_tokens.weight"])


class Own(nn.Module):
    """Not of Transformers: a tied head, a norm with buffers, a square weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.attention, self.mlp, self.square = Attention(), MLP(), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.mlp(x + self.attention(x))
        return self.head(self.norm(self.square(x).flatten(0, 1)))


def rebuilt(sch: slapo.Schedule) -> None:
    """Change all that a schedule can change, and keep what is computed."""
    sch["mlp"].trace()
    found = sch["mlp"].find(lambda x: slapo.call_module("gate|up", x))
    sch["mlp"].replace(Packed(), found)
    sch["square"].replace(Turned())
    sch["square"].replace(Turned(is_turned=False))
    sch["square"].replace(Turned())


def test_weights_by_code_of_any_kind(tmp_path: Path) -> None:
    """Read from a folder, verified; written only as far as boxes go."""
    torch.manual_seed(0)
    model, inputs = MLP(), torch.randn(2, 3, 16)
    expected = model(inputs)
    slapo.save_pretrained(
        slapo.build(slapo.create_schedule(copy.deepcopy(model)))[0], tmp_path / "a"
    )
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(MLP())
        interleave(sch)
    found = slapo.load_pretrained(sch, tmp_path / "a")
    built, _ = slapo.build(sch)
    torch.testing.assert_close(built(inputs), expected)
    assert found.bytes_read > 0
    with pytest.raises(slapo.SlapoError, match="code that cannot be inverted"):
        slapo.save_pretrained(built, tmp_path / "b")


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2)], ids=["one", "two"])
@on_ranks()
def test_rebuilt_models_go_out_under_their_names(tmp_path: Path, layout: Any) -> None:
    world = layout[2]
    group = torch.distributed.group.WORLD if world > 1 else None
    torch.manual_seed(0)
    model = Own().eval()
    before = {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}
    ids = torch.randint(0, 11, (2, 3))
    expected = model(ids)
    sch = slapo.create_schedule(model, group=group)
    rebuilt(sch)
    if world > 1:
        both = sch["mlp.Packed_0.both"]
        both.shard("weight", axis=0, blocks=2).sync("bwd_post", "all_reduce")
        sch["mlp.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    built, _ = slapo.build(copy.deepcopy(sch))
    torch.testing.assert_close(built(ids), expected)
    for number, version in enumerate((built, copy.deepcopy(built), slapo.build(sch)[0])):
        out = tmp_path / str(number)
        slapo.save_pretrained(version, out)
        after = contents(out / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())


# --- bad input: more in ``tests/golden/mistakes/load_pretrained.txt`` -----------------------------
def test_a_folder_of_nothing_that_the_model_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a config nothing says of which class it is."""
    built, _ = slapo.build(slapo.create_schedule(nn.Sequential(nn.Linear(2, 2))))
    slapo.save_pretrained(built, tmp_path / "out")
    head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    with caplog.at_level("WARNING", "slapo"):
        found = slapo.load_pretrained(slapo.create_schedule(head), tmp_path / "out")
    assert found.missing == ("1.bias", "1.weight")
    assert "lacks ['1.bias', '1.weight'], which are initialized" in caplog.text


class _Code:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("it_ran"),))


def test_old_files_are_read_and_code_in_them_is_not_run(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(folders / "llama" / "config.json", tmp_path)
    whole = contents(folders / "llama")
    torch.save(whole, tmp_path / "pytorch_model.bin")
    sch = on_meta()
    slapo.load_pretrained(sch, tmp_path)
    model, _ = slapo.build(sch)
    assert torch.equal(model.lm_head.weight, whole["lm_head.weight"])
    both = tmp_path / "both"
    shutil.copytree(folders / "llama", both)
    shutil.copy(tmp_path / "pytorch_model.bin", both)
    with caplog.at_level("INFO", logger="slapo"):
        slapo.load_pretrained(on_meta(), both)
    assert "also has pytorch_model.bin; reading the safetensors" in caplog.text
    torch.save({"x": _Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(slapo.SlapoError, match="code in it is not run"):
        slapo.load_pretrained(on_meta(), tmp_path)
    assert not Path("it_ran").exists()


@on_ranks(2)
def test_a_folder_is_overwritten_on_request(tmp_path: Path) -> None:
    mesh = slapo.init_mesh(tp=2, device="cpu")
    folder, rank = tmp_path / "out", torch.distributed.get_rank()
    model, _ = slapo.build(slapo.apply_schedule(llama(), "llama", group=mesh["tp"]))
    slapo.save_pretrained(model, folder, max_shard_size=LIMIT)
    if rank == 0:
        for name in ("tokenizer.json", "adapter_config.json", "pytorch_model.bin"):
            (folder / name).touch()
    torch.distributed.barrier()
    unlike = error_of(lambda: slapo.save_pretrained(model, folder, overwrite=rank == 0))
    assert "overwrite" in unlike
    refused = error_of(lambda: slapo.save_pretrained(model, folder))
    assert "is not empty; pass a new folder, or overwrite=True" in refused
    for parameter in model.parameters():
        parameter.data.mul_(2)
    slapo.save_pretrained(model, folder, overwrite=True)
    slapo.save_pretrained(model, tmp_path / "new", overwrite=True)
    assert differences(tmp_path / "new", folder) == []
    # Neither the several files of the first call nor weights of another format are left.
    files = {path.name for path in folder.iterdir()}
    assert files - {path.name for path in (tmp_path / "new").iterdir()} == {"tokenizer.json"}


def test_files_that_come_in_the_meantime_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = slapo.build(slapo.create_schedule(nn.Linear(2, 2)))
    other = tmp_path / "model.safetensors"
    monkeypatch.setattr(export, "_close", lambda opened, error: other.write_text("of another job"))
    with pytest.raises(OSError, match="not empty"):
        slapo.save_pretrained(built, tmp_path)
    assert other.read_text() == "of another job"


# --- on meta, and in the hands of others ---------------------------------------------------------
def test_a_packed_layer_on_meta_is_read_and_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, _ = slapo.build(slapo.create_schedule(Attention()))
    slapo.save_pretrained(plain, tmp_path / "plain")
    with slapo.init_empty_weights():
        sch = slapo.create_schedule(Attention())
        packed = FusedQKV(16, 4)
    sch.trace()
    sch.replace(packed, sch.find(heads_of))
    slapo.load_pretrained(sch, tmp_path / "plain")
    built, _ = slapo.build(sch)
    assert "query.weight" not in dict(built.named_parameters())
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(built(x), plain(x))
    slapo.save_pretrained(built, tmp_path / "out")
    assert differences(tmp_path / "plain", tmp_path / "out") == []


@on_ranks(2)
def test_a_sharded_model_saves_itself(folders: Path, tmp_path: Path) -> None:
    """By the method of Transformers."""
    mesh = slapo.init_mesh(tp=2, device="cpu")
    sch = slapo.apply_schedule(llama(), "llama", group=mesh["tp"])
    with pytest.raises(slapo.SlapoError, match="build the schedule first"):
        sch.mod.save_pretrained(tmp_path / "early")
    model, _ = slapo.build(sch)
    model.save_pretrained(tmp_path / "out", max_shard_size=LIMIT)
    copy.deepcopy(model).save_pretrained(tmp_path / "copied", max_shard_size=LIMIT)
    # As with Transformers, a second call overwrites.
    model.save_pretrained(tmp_path / "copied", max_shard_size=LIMIT)
    with pytest.raises(slapo.SlapoError, match="takes only a folder and max_shard_size"):
        model.save_pretrained(tmp_path / "other", state_dict={})
    assert differences(folders / "llama", tmp_path / "out") == []
    assert differences(folders / "llama", tmp_path / "copied") == []


@on_ranks(2)
def test_what_ranks_do_not_have_alike(folders: Path, tmp_path: Path) -> None:
    mesh, rank = slapo.init_mesh(tp=2, device="cpu"), torch.distributed.get_rank()
    sch = slapo.apply_schedule(llama(), "llama", group=mesh["tp"])
    source = folders / ("gpt2" if rank else "llama")
    assert "folder" in error_of(lambda: slapo.load_pretrained(sch, source))
    model, _ = slapo.build(sch)
    own = tmp_path / f"rank{rank}"
    assert "folder" in error_of(lambda: slapo.save_pretrained(model, own))


@on_ranks(2)
def test_averages_go_out_in_place_of_the_model(folders: Path, tmp_path: Path) -> None:
    """Values in place of the model's, in their own precision."""
    pytest.importorskip("deepspeed")
    for target, layout, options in (
        ("torch", (1, 1, 2), {}),
        ("torch", (1, 2, 1), {"data_parallel": "fsdp"}),
        ("torch", (2, 1, 1), {"micro_batches": 2}),
        ("deepspeed", (1, 2, 1), {"zero": 3}),
    ):
        mesh = slapo.init_mesh(*layout, device="cpu")
        sch = scheduled("llama", mesh, False)
        engine, _ = slapo.build(sch, target, mesh=mesh, loss_fn=loss_of, **options)
        slapo.load_pretrained(engine, folders / "llama")
        state = engine.state_dict()
        out = tmp_path / f"{target}_{layout}"
        doubled = {name: 2 * value.double() for name, value in state.items()}
        slapo.save_pretrained(engine, out, values=doubled)
        whole, saved = contents(folders / "llama"), contents(out)
        assert whole.keys() == saved.keys()
        assert all(torch.equal(saved[n], 2 * value.double()) for n, value in whole.items())
        one = next(iter(state))
    wrong = {**doubled, one: doubled[one][:1]}
    for values, message in (
        ({}, "values lack ['model.embed_tokens.weight'"),
        (wrong, "has the shape (1, "),
    ):
        told = error_of(lambda v=values: slapo.save_pretrained(engine, tmp_path / "no", values=v))
        assert message in told
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(
    not (find_spec("deepspeed") and find_spec("megatron")), reason="an engine is not installed"
)
@on_ranks(2)
def test_float32_copies_are_of_the_folders_precision(folders: Path) -> None:
    """They come from the folder, not from what a recipe has rounded to; and so do losses."""
    stand_in_for_cuda()
    mesh = slapo.init_mesh(1, 2, 1, device="cpu")
    whole, batch = contents(folders / "llama"), tokens(2, 8)
    expected = float(llama()(**batch).loss.detach())
    for options in (
        {"target": "torch", "data_parallel": "fsdp"},
        {"target": "torch"},
        {"target": "deepspeed", "zero": 1},
        {"target": "deepspeed", "zero": 3},
        {"target": "megatron"},
    ):
        for is_late in (False, True):
            with slapo.init_empty_weights(enable=not is_late):
                model = llama()
            if is_late:
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
            sch = slapo.apply_schedule(model, "llama", group=mesh["tp"], bf16=True)
            if not is_late:
                slapo.load_pretrained(sch, folders / "llama")
            given = {**options, "optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
            engine, _ = slapo.build(sch, mesh=mesh, loss_fn=loss_of, **given)
            if is_late:
                slapo.load_pretrained(engine, folders / "llama")
            for cells in engine.cells().values():
                for piece, values in (each for cell in cells for each in cell.pieces()):
                    wanted = whole[str(piece.leaf)][index_of(piece.source)]
                    assert torch.equal(values, wanted), (options, is_late, piece.leaf)
            for _ in range(2):  # the second after a step, which may copy them
                loss = float(engine.train_batch(iter([(batch, batch["labels"])])))
                assert loss == pytest.approx(expected, rel=5e-3), (options, is_late)


# --- models as they are met ----------------------------------------------------------------------
def test_copies_of_a_schedule_read_the_same_folder(folders: Path) -> None:
    sch = on_meta()
    slapo.load_pretrained(sch, folders / "llama")
    whole = contents(folders / "llama")
    for _ in range(3):
        model, _ = slapo.build(copy.deepcopy(sch))
        assert all(torch.equal(t, whole[name]) for name, t in model.state_dict().items())
        del model


def test_equal_values_of_a_tied_weight(folders: Path, tmp_path: Path) -> None:
    whole = contents(folders / "llama")  # whose head is a tensor of its own
    sch = on_meta(tie_word_embeddings=True)
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    slapo.load_pretrained(sch, tmp_path)
    model, _ = slapo.build(sch)
    assert torch.equal(model.lm_head.weight, whole["lm_head.weight"])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("given", "trained", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "", r"modules_to_save=\['lm_head'\]"),
        ({}, "model.norm", r"\['model.norm.weight'\] are trained, but not in the adapters"),
    ],
)
def test_adapters_are_not_all_that_is_trained(
    tmp_path: Path, given: dict[str, Any], trained: str, message: str
) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], **given))
    inner = adapted.base_model.model
    if trained:
        inner.get_submodule(trained).requires_grad_(True)
    model, _ = slapo.build(slapo.create_schedule(inner))
    with pytest.raises(slapo.SlapoError, match=message):
        slapo.save_pretrained(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_adapters_of_other_kinds_are_written_as_peft_does(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], **kind})
    adapted = peft.get_peft_model(llama(tie_word_embeddings=False), config)
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = contents(tmp_path / "theirs")
    for name, scheduled_part in (("inner", adapted.base_model.model), ("outer", adapted)):
        model, _ = slapo.build(slapo.create_schedule(scheduled_part))
        slapo.save_pretrained(model, tmp_path / name)
        ours = contents(tmp_path / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_config_that_is_no_data(tmp_path: Path) -> None:
    layer: Any = nn.Linear(2, 2)
    layer.config = iter([])
    model, _ = slapo.build(slapo.create_schedule(layer))
    slapo.save_pretrained(model, tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["bias", "weight"]


def test_files_are_closed(folders: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before = count()
    sch = on_meta()
    slapo.load_pretrained(sch, folders / "llama")
    del sch
    gc.collect()
    assert count() == before


# --- shares of what is on meta -------------------------------------------------------------------
def shares_of_meta(
    rank: int,
    world: int,
    where: str,
    keys: list[str],
    layout: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    """Shared out on meta: the same values as in one process, read or drawn, and the same steps."""
    mesh = slapo.init_mesh(*layout, device="cpu")
    torch.rand(rank)  # ranks that draw differently
    for key in keys:
        losses = {}
        for kind in ("read", "drawn", "whole"):
            sch = scheduled(key, mesh, on_meta=kind != "whole")
            if kind != "drawn":
                found = slapo.load_pretrained(sch, f"{where}/{key}")
            torch.manual_seed(3 + rank)
            engine, _ = slapo.build(
                sch,
                mesh=mesh,
                loss_fn=loss_of,
                micro_batches=layout[0],
                **options,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
                clip_grad_norm=1.0,
            )
            if kind == "read" and "zero" not in options:
                parts = engine.lowering.stages.values() or [engine.module]
                assert found.bytes_read == sum(map(bytes_held, parts)), key
            if kind == "drawn":
                slapo.save_pretrained(engine, f"{where}/{key}_drawn")
            batch = MODELS[key].inputs(4, 8)
            losses[kind] = [
                float(engine.train_batch(iter([(batch, batch["labels"])]))) for _ in range(3)
            ]
        assert losses["read"] == pytest.approx(losses["whole"], rel=1e-6), (key, losses)
        assert losses["drawn"][0] != pytest.approx(losses["read"][0], rel=1e-4)
        drawn = type(MODELS[key].build()).from_pretrained(f"{where}/{key}_drawn")
        alone = loss_of(drawn(**batch), None).item()
        rounding = 1e-2 if "dtype" in options else 1e-5  # it runs in float32 alone
        assert losses["drawn"][0] == pytest.approx(alone, rel=rounding), (key, losses, alone)


FSDP = {"target": "torch", "data_parallel": "fsdp"}
DIVIDED = {"target": "deepspeed", "zero": 3}
DIVIDED_HALF = {**DIVIDED, "dtype": torch.bfloat16}


@pytest.mark.parametrize("options", [FSDP, DIVIDED])
@on_ranks(2)
def test_what_has_values_keeps_them_beside_what_is_on_meta(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    if "zero" in options:
        pytest.importorskip("deepspeed")
    mesh = slapo.init_mesh(dp=2, device="cpu")
    with slapo.init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    torch.manual_seed(0)
    model[1] = nn.Linear(4, 4)
    weight = model[1].weight.detach().clone()
    engine, _ = slapo.build(
        slapo.create_schedule(model, group=mesh["tp"]),
        mesh=mesh,
        # torch 2.11 has no backward for a loss of two dtypes
        loss_fn=lambda out, target: nn.functional.mse_loss(out.float(), target),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        dtype=torch.bfloat16,
        **options,
    )
    slapo.save_pretrained(engine, tmp_path / "out")
    saved = contents(tmp_path / "out")["1.weight"].float()
    torch.testing.assert_close(saved, weight, rtol=2**-8, atol=0)
    x = torch.ones(2, 4)
    losses = [float(engine.train_batch(iter([(x, x)]))) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "options", "keys"),
    [
        ((1, 2, 2), FSDP, ["llama"]),
        pytest.param((2, 2, 1), FSDP, ["gpt2"], marks=pytest.mark.wide),
        pytest.param((1, 2, 1), DIVIDED_HALF, ["llama"], marks=pytest.mark.wide),
        ((1, 2, 2), DIVIDED, ["mixtral"]),
        *(
            pytest.param(*given, ["llama", "gpt2", third], marks=pytest.mark.wide)
            for *given, third in (
                ((1, 2, 2), FSDP, "mixtral"),
                ((2, 2, 1), FSDP, "vit"),
                ((1, 2, 1), DIVIDED_HALF, "mixtral"),
                ((1, 2, 2), DIVIDED, "mixtral"),
                ((1, 2, 1), FSDP, "mixtral"),
                ((1, 2, 1), DIVIDED, "mixtral"),
            )
        ),
    ],
)
def test_what_is_on_meta_is_shared_out_first(
    folders: Path,
    tmp_path: Path,
    layout: tuple[int, int, int],
    options: dict[str, Any],
    keys: list[str],
) -> None:
    if "zero" in options:
        pytest.importorskip("deepspeed")
    for key in keys:
        shutil.copytree(folders / key, tmp_path / key)
    run_distributed(shares_of_meta, math.prod(layout), str(tmp_path), keys, layout, options)
    # Stages draw from seeds of their own, and what computes in half precision is written so.
    for key in keys if layout[0] == 1 and "dtype" not in options else ():
        with slapo.init_empty_weights():
            sch = slapo.apply_schedule(MODELS[key].build(), key)
        torch.manual_seed(3)
        model, _ = slapo.build(sch)
        slapo.save_pretrained(model, tmp_path / f"{key}_alone")
        assert differences(tmp_path / f"{key}_drawn", tmp_path / f"{key}_alone") == []
