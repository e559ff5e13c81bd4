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
from tests.entries import Entries

CPU = Layout(1, 2, 1, "cpu")
PIPE = Layout(2, 2, 1, "cpu")  # of the golden file


#: A configuration and arguments, and what is made of them.
ENTRIES = Entries("deepspeed_config.txt", globals())


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_arguments_and_configuration_are_merged_or_refused(title: str, update_golden: bool) -> None:
    def tell(config: dict[str, Any], given: dict[str, Any]) -> str:
        before, given = copy.deepcopy(config), {"optimizer": torch.optim.SGD, **given}
        layout = given.pop("layout", CPU)
        try:
            found = merge(config, given, layout)
        except ValueError as error:
            return str(error)
        assert config == before
        return json.dumps(found, sort_keys=True)

    ENTRIES.check(title, tell, update_golden)


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
