"""The tree: names, look-up, selections, users' own primitives, the record."""

import copy
import gc
import inspect
import pydoc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo import Primitive, Schedule
from slapo.primitives import base
from slapo.selection import Selection
from slapo.verify.placement.offline import fake_world
from tests.entries import Entries
from tests.fingerprint import fingerprint
from tests.primitives.models import Block, Stack, Tied


def stack() -> Schedule:
    return slapo.create_schedule(Stack())


#: Schedules and selections, and the paths of their nodes.
ENTRIES = Entries("trees.txt", globals())


@pytest.mark.parametrize("title", ENTRIES.titles)
def test_paths(title: str, update_golden: bool) -> None:
    def tell(found: Any) -> str:
        if isinstance(found, Selection):
            return str([node.path for node in found])
        pairs = found.named_schedules() if isinstance(found, Schedule) else found
        return str([path for path, _ in pairs])

    ENTRIES.check(title, tell, update_golden)


# --- names -----------------------------------------------------------------------------------
def test_list_items_belong_to_the_owner_of_the_list() -> None:
    bert: Any = nn.Module()
    bert.encoder = nn.Module()
    bert.encoder.layer = nn.ModuleList([Block() for _ in range(4)])
    sch = slapo.create_schedule(bert)
    assert list(sch["encoder"].child) == [f"layer.{k}" for k in range(4)]
    node = sch["encoder.layer.3"]
    assert (node.name, node.path, node.parent) == ("layer.3", "encoder.layer.3", sch["encoder"])
    assert node is sch["encoder"]["layer.3"]
    assert node.mod is sch.mod.encoder.layer[3] is sch.get_module("encoder.layer.3")
    assert "encoder.layer" not in sch
    assert 0 not in sch
    assert "encoder.layer.3.fc1" in sch
    assert node.get_top_schedule() is sch


def test_nested_lists_and_other_containers() -> None:
    model: Any = nn.Module()
    inner = [nn.ModuleList([nn.ReLU(), nn.Sequential(nn.Tanh())]) for _ in range(2)]
    model.grid = nn.ModuleList(inner)
    model.register_module("none", None)
    sch = slapo.create_schedule(model)
    assert list(sch.child) == ["grid.0.0", "grid.0.1", "grid.1.0", "grid.1.1"]
    sch["grid.1.1.0"].replace(nn.ReLU())
    sch["grid.0.0"].replace(nn.GELU())
    assert isinstance(sch.mod.grid[1][1][0], nn.ReLU)
    assert isinstance(sch.mod.grid[0][0], nn.GELU)


def test_shared_modules_have_a_node_at_each_place() -> None:
    shared = Block()
    sch = slapo.create_schedule(nn.Sequential(shared, shared))
    assert sch["0"].mod is sch["1"].mod
    sch["1"].checkpoint()
    assert sch.mod[0] is sch.mod[1] is sch["0"].mod
    sch["0"].replace(new := Block())
    assert sch.mod[0].mod is sch.mod[1].mod is new


def test_attributes() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.ReLU()), name="model")
    assert (sch.name, sch.path, sch.parent, sch.rank, sch.world_size) == ("model", "", None, 0, 1)
    assert sch.group is None
    assert (sch.metadata.tie_weights, sch.metadata.param_tags) == ({}, {})
    child = slapo.create_schedule(nn.ReLU(), name="extra", path="extra", parent=sch)
    assert child.get_top_schedule() is sch
    assert child.history is sch.history


# --- selections ------------------------------------------------------------------------------
def test_a_selection_applies_to_all() -> None:
    sch = slapo.create_schedule(Stack())
    chosen = sch.select("layers.*")
    assert chosen.checkpoint() is chosen
    assert [str(r).split("  #")[0] for r in sch.history] == [
        f'sch["layers.{k}"].checkpoint()' for k in range(3)
    ]
    assert all(r.location.startswith(__file__) for r in sch.history)
    sch.select("layers.*.fc1").shard("weight", axis=0).shard("bias", axis=0)
    sch.select("**.drop").replace(lambda path, module: nn.Identity())
    assert isinstance(sch["layers.2.drop"].mod, nn.Identity)
    assert "shard" in dir(chosen)
    assert repr(chosen) == "<Selection 'layers.*' of 3 modules>"


def test_a_selection_that_fails_on_one_changes_none() -> None:
    model = Stack()
    model.layers[2].fc1 = nn.Linear(4, 8, bias=False)
    sch = slapo.create_schedule(model)
    sch["layers.0"].checkpoint()
    sch["layers.1"].trace()
    before = fingerprint(sch)
    attempts = [
        lambda: sch.select("layers.*.fc1").decompose(),
        lambda: sch.select("layers.*.fc1").shard("bias", axis=0),
        lambda: sch.select("layers.*.fc1").annotate("bias", "k", 1),
        lambda: sch.select("**").decompose(),
        lambda: sch.select("layers.*").replace(
            lambda path, m: nn.Identity() if path != "layers.2" else None
        ),
        lambda: sch.select("layers.*").sync("fwd_post", "all_reduce", axis=3),
    ]
    for attempt in attempts:
        with pytest.raises((ValueError, TypeError, slapo.SlapoError)):
            attempt()
        assert fingerprint(sch) == before
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_matches_found_before_a_failed_selection_still_count() -> None:
    sch = slapo.create_schedule(Block())
    match = sch.find(lambda x: nn.functional.gelu(x))
    with pytest.raises(slapo.SlapoError, match="decompose before tracing"):
        sch.select("*").decompose()
    sch.replace(torch.tanh, match)


def test_a_module_at_two_places_is_selected_once() -> None:
    shared = nn.Linear(4, 4)
    sch = slapo.create_schedule(nn.Sequential(shared, nn.ReLU(), shared))
    assert [node.path for node in sch.select("*")] == ["0", "1"]
    sch.select("*").checkpoint()


def test_ties_are_seen_where_the_root_has_a_path() -> None:
    model = Tied()
    sch = slapo.create_schedule(model, name="m", path="m")
    assert sch["head"].path == "m.head"
    sch["head"].shard("weight", 0)
    assert model.head.weight is model.emb.weight
    with pytest.raises(ValueError, match="break the tie"):
        sch["head"].replace(nn.Identity())


# --- users' own primitives -------------------------------------------------------------------
@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def freeze() -> type[Primitive]:
    @slapo.register_primitive()
    class Freeze(Primitive):
        """Stop training of a module."""

        @staticmethod
        def name() -> str:
            return "freeze"

        @staticmethod
        def init_metadata() -> Any:
            return ["fresh"]

        @staticmethod
        def apply(sch: Schedule, name: str, *, value: bool = False) -> None:
            sch.mod.register_forward_hook(lambda m, i, o: o)
            sch.mod.note = "changed"
            sch.metadata.primitives["freeze"].append(name)
            sch.metadata.param_tags["x"] = {}
            for child in list(sch.child.values()):
                child.replace(nn.Identity())
            getattr(sch.mod, name).requires_grad_(value)

    return Freeze


def test_it_appears_as_a_method() -> None:
    primitive = freeze()
    sch = slapo.create_schedule(Stack())
    assert "freeze" in slapo.list_primitives()
    assert slapo.list_primitives(name_only=False)["freeze"] is primitive
    assert "freeze" in dir(sch)
    assert list(inspect.signature(sch.freeze).parameters) == ["name", "value"]
    assert "Stop training" in pydoc.render_doc(sch.freeze, renderer=pydoc.plaintext)
    assert sch["head"].freeze("weight") is sch["head"]
    assert not sch.mod.head.weight.requires_grad
    assert sch["head"].metadata.primitives["freeze"] == ["fresh", "weight"]
    assert sch.history[-1].call() == "sch[\"head\"].freeze(name='weight')"
    assert sch.history[-1].location.startswith(__file__)
    sch.select("layers.*.fc?").freeze("bias")
    assert len(sch.history) == 7


def test_primitives_within_a_primitive_are_part_of_it() -> None:
    freeze()
    sch = slapo.create_schedule(Stack())
    with pytest.raises(AttributeError):
        sch["layers.0"].freeze("weight")
    sch.mod.layers[0].scale = nn.Parameter(torch.ones(1))
    sch["layers.0"].freeze("scale")
    assert [record.primitive for record in sch.history] == ["freeze"]


def test_what_it_changed_before_it_failed_is_undone() -> None:
    freeze()
    sch = slapo.create_schedule(Stack())
    sch["layers.1"].trace()
    before = fingerprint(sch)
    for path in ("", "layers.0", "layers.1"):
        with pytest.raises(AttributeError):
            sch[path].freeze("nothing")
        assert fingerprint(sch) == before


# --- the record ------------------------------------------------------------------------------
def scheduled(axis: int = 0) -> Schedule:
    sch = slapo.create_schedule(Stack())
    sch["layers.0"].checkpoint()
    sch["head"].shard("weight", axis).sync("fwd_pre", print)
    return sch


def test_digests_depend_on_what_was_applied_alone() -> None:
    assert scheduled().digest() == scheduled().digest()
    assert scheduled().digest() != scheduled(axis=1).digest()
    first, second = scheduled().history[0], scheduled().history[0]
    assert first.call() == second.call()


# --- modules that the user puts in -----------------------------------------------------------
def test_the_live_model_is_what_is_scheduled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    sch = slapo.create_schedule(model)
    before = sch["1.0"]
    model[1] = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert sch["1"].mod is model[1]
    assert sch["1.1"].mod is model[1][1]
    assert [path for path, _ in sch.named_schedules()] == ["", "0", "1", "1.0", "1.1"]
    with pytest.raises(slapo.SlapoError, match=r"left the schedule"):
        before.checkpoint()
    model.add_module("2", nn.GELU())
    assert sch["2"].replace(nn.ReLU()).mod is model[2]
    assert len(sch.history) == 1
    del model[2]
    assert "2" not in sch
    held = sch["1"]
    model[1] = nn.Linear(2, 2)
    with pytest.raises(slapo.SlapoError, match=r"the module at '1' was replaced after this node"):
        held.checkpoint()


def test_a_copy_of_a_schedule_is_one_over_a_copy_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    sch["0"].annotate("weight", "kind", "expert")
    new = copy.deepcopy(sch)
    assert str(new) == str(sch)
    assert new.mod is not model
    assert new["0"].mod.weight is not model[0].weight
    assert new["0"].mod.weight.kind == "expert"
    new["1"].replace(nn.GELU())
    assert isinstance(model[1], nn.ReLU)
    assert (len(sch.history), len(new.history)) == (2, 3)


# --- a second schedule over one model ----------------------------------------------------------


def test_a_model_whose_root_was_traced_is_told() -> None:
    model = nn.Sequential(Block(), nn.ReLU())
    sch = slapo.create_schedule(model)
    sch.trace(leaf_modules=["Block"])
    assert sch.mod is model
    for root in (sch.mod, copy.deepcopy(sch).mod):
        with pytest.warns(UserWarning, match="1 primitive,") as caught:
            slapo.create_schedule(root)
        assert caught[0].filename == __file__


def test_copies_can_be_scheduled_again_and_again() -> None:
    model = Stack()
    for _ in range(2):  # as a cell of a notebook
        sch = slapo.create_schedule(copy.deepcopy(model))
        sch.select("layers.*").checkpoint()
    slapo.create_schedule(model)


def test_models_are_not_kept_for_that() -> None:
    sch = slapo.create_schedule(Stack())
    sch["head"].checkpoint()
    model = weakref.ref(sch.mod)
    del sch
    gc.collect()
    assert model() is None


# --- groups and ranks ----------------------------------------------------------------------------
def test_one_of_several_processes_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = "process 1 of 4 .*not initialized.*init_process_group"
    with pytest.warns(UserWarning, match=message):
        assert slapo.create_schedule(nn.ReLU()).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert slapo.create_schedule(nn.ReLU()).world_size == 1
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "4")  # schedulers set it too; alone it says nothing
    assert slapo.create_schedule(nn.ReLU()).world_size == 1


def test_meshes() -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        sch = slapo.create_schedule(nn.Sequential(nn.ReLU()), group=mesh["tp"])
        assert (sch.rank, sch.world_size) == (1, 4)
        assert (sch["0"].rank, sch["0"].world_size) == (1, 4)
        assert sch["0"].group is sch.group
        default = slapo.create_schedule(nn.ReLU())
        assert (default.rank, default.world_size) == (5, 8)
