"""What a recipe does not know: models of other families, wrappers, adapters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import slapo
from slapo.model_schedule import apply_schedule
from slapo.sharding.state import sharding_of
from slapo.verify.placement.offline import fake_world
from tests.fingerprint import refused
from tests.model_schedule.models import MODELS, decoder, tokens, transformers
from tests.runtimes.ranks import on_ranks


# --- other families ------------------------------------------------------------------------------
def test_a_recipe_of_another_family_that_fails_the_proof() -> None:
    """``tests/golden/mistakes/apply_schedule.txt`` has those that fail before it."""
    model = decoder("StableLm").build()
    before = str(model)
    says = "the recipe of another family, given for StableLmForCausalLM, fails"
    with fake_world(2, 1), pytest.raises(slapo.PlacementError, match=says):
        apply_schedule(model, "llama")
    assert str(model) == before


@pytest.mark.parametrize("name", ["Granite", "Olmo"])
def test_a_recipe_of_another_family_that_is_proved(name: str) -> None:
    """Of the same modules, with numbers of its own between them."""
    with fake_world(2, 1):
        apply_schedule(decoder(name).build(), "llama")


def test_heads_that_differ_from_layer_to_layer() -> None:
    config = transformers.EmbeddingGemma2TextConfig(num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.EmbeddingGemma2TextModel(config)
    with fake_world(2, 1), pytest.raises(ValueError, match="num_key_value_heads is not one number"):
        apply_schedule(model, "gemma3_text")


def test_layers_in_a_list_of_lists() -> None:
    """Funnel pools between lists of layers, which are a stack each."""
    sizes = {"block_sizes": [2, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
    config = transformers.FunnelConfig(vocab_size=131, num_decoder_layers=1, **sizes)
    torch.manual_seed(0)
    model = transformers.FunnelForMaskedLM(config).eval()
    batch = tokens(2, 8)
    wanted = model(**batch).logits
    sch = apply_schedule(model, "auto", ckpt_ratio=1.0)
    layers = ["encoder.blocks.0.0", "encoder.blocks.0.1", "encoder.blocks.1.0", "decoder.layers.0"]
    assert [record.path for record in sch.history if record.primitive == "checkpoint"] == [
        f"funnel.{layer}" for layer in layers
    ]
    torch.testing.assert_close(slapo.build(sch)[0].eval()(**batch).logits, wanted)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Layered(nn.Module):
    """Layers in an ``nn.Sequential``, as in timm, or in lists of their parts, as in vit-pytorch."""

    def __init__(self, in_lists: bool) -> None:
        super().__init__()
        kind = nn.ModuleList if in_lists else nn.Sequential
        pairs = [nn.ModuleList([Block(), Block()]) for _ in range(2)]
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = kind(pairs) if in_lists else kind(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if isinstance(self.layers, nn.Sequential):
            return self.head(self.layers(x))
        for first, second in self.layers:
            x = second(first(x))
        return self.head(x)


@pytest.mark.parametrize("in_lists", [False, True])
def test_layers_of_own_models(in_lists: bool) -> None:
    torch.manual_seed(0)
    model, x = Layered(in_lists), torch.randn(2, 8)
    wanted = model(x)
    sch = apply_schedule(copy.deepcopy(model), "auto", ckpt_ratio=1.0)
    assert sum(record.primitive == "checkpoint" for record in sch.history) == 4
    torch.testing.assert_close(slapo.build(sch)[0](x), wanted)
    cut = apply_schedule(model, "auto", pipeline_cuts=2, example_inputs=(x,))
    pipelined = slapo.pipeline.generate_pipeline_partition(cut).mod
    kinds = [[type(part) for part in stage.modules()] for stage in pipelined.stages]
    assert [own.count(Block) for own in kinds] == [2, 2]
    torch.testing.assert_close(pipelined(x), wanted)


def test_small_groups_of_the_same_blocks_are_layers() -> None:
    sch = apply_schedule(MODELS["wideresnet"].build(), "auto", ckpt_ratio=1.0)
    found = [record.path for record in sch.history if record.primitive == "checkpoint"]
    assert found == [f"layer{group}.{block}" for group in range(1, 5) for block in range(2)]


# --- adapters ------------------------------------------------------------------------------------
def adapted(model: nn.Module, *targets: str, seed: int = 3, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    transposed = any(target.startswith("c_") for target in targets)  # of GPT-2
    config = peft.LoraConfig(
        r=2,
        target_modules=list(targets),
        init_lora_weights=False,
        fan_in_fan_out=transposed,
        **options,
    )
    return peft.get_peft_model(model, config)


#: Layers with adapters, by key: rows and columns, packed and with biases.
ADAPTED = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
SPREAD, DRAFT, HALF = {"sequence_parallel": True}, {"recipe": "draft"}, {"ckpt_ratio": 0.5}


def lively(model: Any) -> Any:
    """No matrix of adapters is zero, and none is the other's."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("key", "options", "comes_last"),
    [
        ("llama", {}, False),
        ("gpt2", {}, False),
        pytest.param("llama", SPREAD, False, marks=pytest.mark.wide),
        pytest.param("gpt2", SPREAD, False, marks=pytest.mark.wide),
        ("llama", HALF, False),
        ("llama", DRAFT, False),
        pytest.param("gpt2", DRAFT, False, marks=pytest.mark.wide),
        pytest.param("gpt2", {}, True, marks=pytest.mark.wide),
        ("llama", SPREAD, True),
        ("llama", HALF, True),
    ],
)
@on_ranks(2)
def test_adapters_are_split_with_their_layers(
    tmp_path: Path, key: str, options: dict[str, Any], comes_last: bool
) -> None:
    """Whether they come before the schedule or after it."""
    pytest.importorskip("peft")
    where, rank = str(tmp_path), dist.get_rank()
    mesh, inputs = slapo.init_mesh(tp=2, device="cpu"), tokens(3, 8)
    slapo.set_random_seed(1, mesh=mesh)
    plain = adapted(MODELS[key].build(), *ADAPTED[key])
    given = {"recipe": key, **options}
    model = None if comes_last else copy.deepcopy(lively(plain))
    inner = MODELS[key].build() if model is None else model.base_model.model
    sch = apply_schedule(inner, given.pop("recipe"), group=mesh["tp"], **given)
    built, _ = slapo.build(sch)
    if model is None:  # the first rank's random values count
        model = adapted(built, *ADAPTED[key], seed=3 + rank)
    wanted, loss = plain(**inputs).loss, model(**inputs).loss
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=1e-5)
    wanted.backward()
    loss.backward()
    compare_adapters(model, plain)
    slapo.save_pretrained(built, f"{where}/adapters")
    if rank == 0:  # the files that PEFT writes, for the full model or for this one
        plain.save_pretrained(f"{where}/plain")
        model.save_pretrained(f"{where}/own")
        files = sorted(path.name for path in Path(where, "adapters").iterdir())
        assert files == ["adapter_config.json", "adapter_model.safetensors"]
        read, theirs, own = (
            load_file(f"{where}/{n}/{files[1]}") for n in ("adapters", "plain", "own")
        )
        assert read.keys() == theirs.keys() == own.keys()
        for name, value in theirs.items():
            assert torch.equal(read[name], value)
            assert torch.equal(own[name], value)
    dist.barrier()
    # They go into the full model, and into the slices of another one.
    shards, _ = slapo.build(apply_schedule(MODELS[key].build(), key, group=mesh["tp"]))
    for other in (MODELS[key].build(), shards):
        again = type(plain).from_pretrained(other, f"{where}/adapters")
        torch.testing.assert_close(again(**inputs).loss, loss, atol=1e-6, rtol=1e-5)
    merged_alone = plain.eval().merge_and_unload()
    wanted = merged_alone(**inputs).logits
    merged = model.eval().merge_and_unload()
    torch.testing.assert_close(merged(**inputs).logits, wanted, atol=1e-5, rtol=1e-4)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    slapo.save_pretrained(merged, f"{where}/merged")
    opened = type(merged_alone).from_pretrained(f"{where}/merged")
    torch.testing.assert_close(opened.state_dict(), merged_alone.state_dict())


def compare_adapters(model: Any, plain: Any) -> None:
    """Adapters and their gradients equal those of `plain`, whole on every rank."""
    found = zip(model.parameters(), plain.parameters(), strict=True)
    adapters = [(mine, whole) for mine, whole in found if whole.requires_grad]
    assert len(adapters) > 3
    for mine, whole in adapters:
        torch.testing.assert_close(mine, whole, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(mine.grad, whole.grad, atol=2e-6, rtol=1e-4)
    # Each rank computes with a part of one matrix of each pair.
    used = [m for m in model.modules() if getattr(sharding_of(m), "used", None)]
    uses = [m for m in used if m.weight.requires_grad]
    assert len(uses) * 2 == sum(
        "weight" in name for name, p in model.named_parameters() if p.requires_grad
    )
    assert all(
        2 * m.used["weight"].local_shape.numel() == m.used["weight"].full_shape.numel()
        for m in map(sharding_of, uses)
    )


def pair_by_hand(inner: nn.Module) -> Any:
    sch = slapo.create_schedule(inner, group=dist.group.WORLD)
    sch["layers.0"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
    sch["layers.2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


@pytest.mark.parametrize(
    "order", ["adapters, schedule", "schedule, adapters, build", "schedule, build, adapters"]
)
@on_ranks(2)
def test_adapters_by_hand(order: str) -> None:
    config = pytest.importorskip("peft").LoraConfig
    plain = lively(adapted(Pair(), "0", "2"))
    if order == "adapters, schedule":
        model = copy.deepcopy(plain)
        sch = pair_by_hand(model.base_model.model)
    else:
        sch = pair_by_hand(Pair())
    if order == "schedule, build, adapters":
        slapo.build(sch)
        model = lively(adapted(sch.mod, "0", "2"))
    elif order == "schedule, adapters, build":
        model = lively(adapted(sch.mod, "0", "2"))
    if order != "schedule, build, adapters":
        slapo.check(sch, torch.ones(2, 4))
        slapo.build(sch)
    compare_pair(model, plain)
    compare_adapters(model, plain)
    second = config(r=3, target_modules=["0", "2"], init_lora_weights=False)
    for one in (model, plain):
        torch.manual_seed(7 + dist.get_rank() * (one is model))  # the first rank's values count
        one.add_adapter("second", second)
        one.set_adapter("second")
    compare_pair(model, plain)
    compare_adapters(model, plain)
    for one in (model, plain):
        one.base_model.set_adapter(["default", "second"])
    compare_pair(model, plain)
    # The merged layers have their syncs again.
    merged, alone = (one.merge_and_unload().requires_grad_() for one in (model, plain))
    compare_pair(merged, alone)
    again, alone = (adapted(one, "0", "2") for one in (merged, alone))
    compare_pair(again, alone)
    compare_adapters(again, alone)
    with pytest.raises(ValueError, match="are not two matrices of LoRA"):
        again.add_adapter("dora", config(target_modules=["0"], use_dora=True))


def compare_pair(model: Any, plain: Any) -> None:
    """Compare outputs and the gradients of inputs, and compute those of parameters."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for one in (model, plain):
        own = x.clone().requires_grad_()
        output = one(own)
        output.square().sum().backward()
        found.append((output, own.grad))
    torch.testing.assert_close(*found)


class Pair(nn.Module):
    """Two layers, the second of which has a bias that is added once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("comes_last", [False, True])
def test_dropout_of_adapters(comes_last: bool) -> None:
    """Each rank draws its own mask for a slice, and the common one for a replicated input."""
    pytest.importorskip("peft")
    slapo.set_random_seed(3)
    inputs, state = torch.ones(64, 4), torch.get_rng_state()
    with fake_world(2):
        if comes_last:
            sch = pair_by_hand(Pair())
            model = adapted(sch.mod, "0", "2", lora_dropout=0.5)
        else:
            model = adapted(Pair(), "0", "2", lora_dropout=0.5)
            sch = pair_by_hand(model.base_model.model)
        slapo.check(sch, inputs)
        kept = []
        layers = model.base_model.model.layers
        for layer, width in ((layers[0], 4), (layers[2], 4)):
            torch.set_rng_state(state)
            kept.append(layer.lora_dropout["default"](torch.ones(64, width)))
            torch.set_rng_state(state)
            kept.append(torch.dropout(torch.ones(64, width), 0.5, True))
        assert torch.equal(kept[0], kept[1])
        assert not torch.equal(kept[2], kept[3])
        dropout = layers[2].lora_dropout["default"].eval()
        assert torch.equal(dropout(inputs), inputs)


def test_adapters_of_other_kinds_change_nothing() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
    model = peft.get_peft_model(Pair(), config)
    with fake_world(2):
        sch = slapo.create_schedule(model.base_model.model)
        with refused(sch, ValueError, "are not two matrices of LoRA"):
            sch["layers.0"].shard("weight", axis=0)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


@on_ranks(4)
def test_adapters_in_other_layouts(tmp_path: Path) -> None:
    """Adapters between schedule and build: replicas by FSDP2, and stages; later is too late."""
    pytest.importorskip("peft")
    batch, rank = tokens(4, 8), dist.get_rank()
    plain = adapted(MODELS["llama"].build(), *ADAPTED["llama"])
    optimizer, wanted = adamw(plain.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        wanted.append(plain(**batch).loss)
        wanted[-1].backward()
        optimizer.step()
    for sizes, cuts, options in (
        ({"dp": 2}, {}, {"data_parallel": "fsdp"}),
        ({"pp": 2}, {"pipeline_cuts": 2, "example_inputs": batch}, {"micro_batches": 2}),
    ):
        mesh = slapo.init_mesh(tp=2, device="cpu", **sizes)
        sch = apply_schedule(MODELS["llama"].build(), "llama", mesh=mesh, **cuts)
        adapted(sch.mod, *ADAPTED["llama"], seed=3 + rank % 2)
        given: Any = {"loss_fn": lambda output, labels: output.loss, "optimizer": adamw, **options}
        engine, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
        part = dict(batch)
        if "dp" in sizes:
            part = {name: t.chunk(2)[mesh["dp"].get_local_rank()] for name, t in batch.items()}
        for loss in wanted:
            found = engine.train_batch(iter([(dict(part), part["labels"])]))
            torch.testing.assert_close(found, loss.detach(), atol=1e-5, rtol=1e-5)
        engine.save(tmp_path / next(iter(sizes)))
    sch = apply_schedule(MODELS["llama"].build(), "llama", mesh=mesh, **cuts)
    late, _ = slapo.build(sch, target="torch", mesh=mesh, **given)
    adapted(late.module, *ADAPTED["llama"])
    with pytest.raises(slapo.SlapoError, match=r"lora_A\.default\.weight, require gradients"):
        late.train_batch(iter([(dict(part), part["labels"])]))


SLICED = "made from this rank's slice of it; pass init_lora_w"
NOT_LORA = "has adapters of Linear that are not two"


@pytest.mark.parametrize(
    ("kind", "options", "error", "says"),
    [
        ("LoraConfig", {"r": 2, "init_lora_weights": "pissa"}, slapo.SlapoError, SLICED),
        ("LoraConfig", {"r": 2, "init_lora_weights": "olora"}, slapo.SlapoError, SLICED),
        ("IA3Config", {"feedforward_modules": []}, ValueError, NOT_LORA),
    ],
)
def test_adapters_that_slices_cannot_have_are_refused(
    kind: str, options: dict[str, Any], error: Any, says: str
) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(target_modules=["0", "2"], **options)
    with fake_world(2), pytest.raises(error, match=says):
        peft.get_peft_model(pair_by_hand(Pair()).mod, config)
