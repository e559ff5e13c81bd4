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
import transformers

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


def make_folder(folder: Path, name: str, **settings: Any) -> dict[str, Tensor]:
    """A folder with a small model; gives its weights."""
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or transformers.GPT2LMHeadModel
    model = model_class(model_class.config_class(**settings))
    model.save_pretrained(folder)
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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = finetune_folder.load_tokenizer(str(folder))
    tokens = finetune_folder.read_text(files, tokenizer, model.config)
    draw = Batches(finetune_folder.split(tokens)[1], 4, 32, masked=False, seed=0)
    with torch.no_grad():
        return sum(model(**draw()).loss.item() for _ in range(4)) / 4


@pytest.mark.parametrize(
    ("name", "settings", "reads", "arguments"),
    [
        ("Llama", GATED, True, "--tp 2 --checkpoint-ratio 0.5"),
        ("GPT2", PLAIN, False, "--tp 2"),
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
    assert found[1] == ("auto" if name == "Olmo2" else name.lower())
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


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({"vocab_size": 97}, [], "a vocabulary of 97 tokens, too few for 256 bytes"),
        ({}, ["--length", "64"], "--length 64 is more than the model's 48 positions"),
        ({}, ["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes(
    tmp_path: Path, settings: dict[str, Any], arguments: list[str], message: str
) -> None:
    make_folder(tmp_path / "model", "Llama", **{**GATED, **settings})
    given = ["--model", "model", *SIZES, *arguments]
    done = start("finetune_folder.py", 0, given, tmp_path)
    assert done.returncode == 1
    assert re.search(f"^finetune_folder.py: .*{message}", done.stderr, re.M), done.stderr[-3000:]
    assert "Traceback" not in done.stderr
