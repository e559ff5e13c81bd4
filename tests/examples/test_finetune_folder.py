"""``examples/finetune_folder.py``: from a folder to a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.examples.launch import start

pytest.importorskip("transformers")
pytest.importorskip("rich")
import transformers
from safetensors.torch import load_file, save_file

import slapo
from examples import finetune_folder
from examples.text import Batches

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

#: Odd: ranks have shares of two sizes of a vocabulary.
VOCABULARY = 301
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GATED = {**PLAIN, "intermediate_size": 72, "num_key_value_heads": 2, "pad_token_id": 0}
SIZES = ["--steps", "30", "--lr", "3e-3", "--length", "32", "--device", "cpu"]


def make_folder(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> dict[str, Tensor]:
    """A folder with a small model, in several files; gives its weights."""
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or transformers.GPT2LMHeadModel
    model = model_class(model_class.config_class(**settings)).to(dtype)
    model.save_pretrained(folder, max_shard_size="50KB")
    assert (folder / "model.safetensors.index.json").exists()
    return model.state_dict()


def add_tokenizer(folder: Path, text: str) -> None:
    """One of byte pairs, trained on a text."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def loss_in_one_process(folder: Path, files: list[str]) -> float:
    """Of the text that is kept for the evaluation, by the unscheduled model of the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = finetune_folder.load_tokenizer(str(folder))
    tokens = finetune_folder.read_text(files, tokenizer, model.config)
    draw = Batches(finetune_folder.split(tokens)[1], 4, 32, masked=False, seed=0)
    with torch.no_grad():
        return sum(model(**draw()).loss.item() for _ in range(4)) / 4


@pytest.mark.parametrize(
    ("name", "settings", "reads", "arguments"),
    [
        ("Llama", GATED, True, "--tp 2 --checkpoint-ratio 0.5"),
        pytest.param("GPT2", PLAIN, False, "--tp 2", marks=pytest.mark.wide),
        ("Olmo2", GATED, False, "--tp 2"),
        ("Llama", GATED, False, "--data-parallel fsdp"),
    ],
    ids=["tokenizer", "bytes", "auto", "fsdp"],
)
def test_a_folder_becomes_another(
    tmp_path: Path, name: str, settings: dict[str, Any], reads: bool, arguments: str
) -> None:
    before = make_folder(tmp_path / "model", name, **settings)
    files: list[str] = []
    if reads:
        text = "".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(2000))
        (tmp_path / "sums.txt").write_text(text)
        add_tokenizer(tmp_path / "model", text)
        files = [str(tmp_path / "sums.txt")]
    given = ["--model", "model", "--text", *files, "--output", "tuned", *arguments.split()]
    done = start("finetune_folder.py", 2, [*given, *SIZES], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

    found = re.search(r"^(\w+): loss .* (\d\.\d+) -> (\d\.\d+)$", done.stdout, re.M)
    assert found, done.stdout
    assert found[1] == name.lower()
    assert float(found[2]) == pytest.approx(
        loss_in_one_process(tmp_path / "model", files), abs=1e-4
    )
    assert float(found[3]) == pytest.approx(
        loss_in_one_process(tmp_path / "tuned", files), abs=1e-4
    )
    assert float(found[3]) < 0.9 * float(found[2])

    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").state_dict()
    assert {k: (v.shape, v.dtype) for k, v in tuned.items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }
    assert not any(torch.equal(tuned[k], before[k]) for k in before)
    if reads:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
        assert tokenizer.decode(tokenizer("3 and 4")["input_ids"]) == "3 and 4"


def test_one_process_trains_weights_of_half_precision(tmp_path: Path) -> None:
    """They are float32 while they are trained, and are rounded once, at the end."""
    settings = {**GATED, "tie_word_embeddings": True}
    before = make_folder(tmp_path / "model", "Llama", torch.bfloat16, **settings)
    given = ["--model", "model", "--output", "tuned", *SIZES]
    done = start("finetune_folder.py", 0, given, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^llama: loss .* (\d\.\d+) -> (\d\.\d+)$", done.stdout, re.M)
    assert found, done.stdout
    for folder, loss, tolerance in (("model", found[1], 1e-4), ("tuned", found[2], 1e-2)):
        plain = loss_in_one_process(tmp_path / folder, [])
        assert float(loss) == pytest.approx(plain, abs=tolerance)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight
    assert {k: (v.shape, v.dtype) for k, v in tuned.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }


# --- mistakes ------------------------------------------------------------------------------------
def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = start("finetune_folder.py", 0, ["--model", "nowhere"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "finetune_folder.py: --model nowhere is not a folder with a config.json; pass one that "
        "save_pretrained has written (names of a hub are not looked up)"
    )
    assert "Traceback" not in done.stderr


def refused(folder: Path, *arguments: str) -> str:
    """What is said about a folder, in a world of one."""
    output = [] if "--output" in arguments else ["--output", str(folder.parent / "tuned")]
    given = ["--model", str(folder), *SIZES, *output, *arguments]
    with pytest.raises((ValueError, OSError, slapo.SlapoError)) as caught:
        finetune_folder.run(finetune_folder.parse(given))
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "model", "Llama", **GATED)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tp 2", "--tp 2 does not divide the number of processes, which is 1; start 2 or a "),
        ("--output {folder}", "is the folder of the model; pass another one"),
        ("--output {folder}/config.json", "File exists: "),
        ("--output {folder}/..", "holds files already; pass a new folder"),
        ("--length 1", "--length 1 leaves no next token to learn"),
        ("--length 64", "--length 64 is more than the model's 48 positions"),
        ("--text nowhere.txt", "No such file or directory: 'nowhere.txt'"),
        ("--text {folder}/generation_config.json", "tokens, .. of them for the evaluation, which"),
        ("--checkpoint-ratio 1.5", "ckpt_ratio is 1.5; pass a share of the layers, from 0 to 1"),
    ],
)
def test_wrong_options(folder: Path, arguments: str, message: str) -> None:
    assert re.search(message, refused(folder, *arguments.format(folder=folder).split()))


@pytest.mark.parametrize("option", ["--batch 0", "--steps 0", "--tp -1"])
def test_wrong_counts(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_folder.parse(["--model", "model", *option.split()])
    name, value = option.split()
    assert f"argument {name}: {value} is not a number from 1 up" in capsys.readouterr().err


def test_wrong_families(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    bert.save_pretrained(tmp_path / "bert")
    assert "the folder of a BertForMaskedLM, and this trains causal" in refused(tmp_path / "bert")
    transformers.T5Config(d_model=32, d_ff=64).save_pretrained(tmp_path / "t5")
    assert "the folder of a t5, and this trains causal" in refused(tmp_path / "t5")


def test_vocabularies_that_do_not_fit(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", "Llama", **{**GATED, "vocab_size": 97})
    message = refused(tmp_path / "model")
    assert "a vocabulary of 97 tokens, too few for 256 bytes" in message
    add_tokenizer(tmp_path / "model", "some text")
    assert re.search(
        r"gives token \d+, and the model's vocabulary has 97", refused(tmp_path / "model")
    )


def test_weights_that_are_not_there(folder: Path) -> None:
    first = min(folder.glob("*.safetensors"))
    weights = load_file(first)
    name = sorted(weights)[0]
    save_file({k: v for k, v in weights.items() if k != name}, first, {"format": "pt"})
    assert f"the index and its files differ, which lack ['{name}']" in refused(folder)
    first.write_bytes(first.read_bytes()[:-100])
    assert "the file is cut off or damaged" in refused(folder)
    first.unlink()
    assert f"the index names ['{first.name}'], which are not there" in refused(folder)
