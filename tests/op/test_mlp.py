"""Gated blocks: against Transformers' own, and what they keep."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import slapo
from slapo.op import liger
from slapo.op.mlp import GatedDense, GatedMLP, _gated, _GatedSiLU, gated_gelu, gated_silu
from tests.distributed import run_distributed

HALVES = [torch.float32, torch.bfloat16]


class MLP(nn.Module):
    """As Transformers has it for Llama."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.hidden_size = 5
        self.gate_proj = nn.Linear(5, 7, bias=False)
        self.up_proj = nn.Linear(5, 7, bias=False)
        self.down_proj = nn.Linear(7, 5, bias=False)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def of_transformers(name: str, act: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "T5DenseGatedActDense":
        from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

        proj = "gated-gelu" if act == "gelu_new" else f"gated-{act}"
        config = transformers.T5Config(d_model=10, d_ff=17, feed_forward_proj=proj)
        return T5DenseGatedActDense(config)
    family = name.removesuffix("MLP")
    place = getattr(transformers.models, family.lower())
    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")(
        hidden_size=10,
        intermediate_size=17,
        num_attention_heads=1,
        num_key_value_heads=1,
        **{"hidden_activation" if family == "Gemma3" else "hidden_act": act},
    )
    return getattr(getattr(place, f"modeling_{family.lower()}"), name)(config)


def numbers(module: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor]:
    """Its output and all gradients."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    output = module(x)
    scale = torch.randn(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], scale)]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("LlamaMLP", "silu"),
        ("MistralMLP", "silu"),
        ("Qwen2MLP", "swish"),
        ("Qwen3MLP", "silu"),
        ("GemmaMLP", "gelu_pytorch_tanh"),
        ("Gemma3MLP", "gelu_pytorch_tanh"),
        ("LlamaMLP", "relu"),
        ("T5DenseGatedActDense", "gelu_new"),
        ("T5DenseGatedActDense", "silu"),
    ],
)
def test_bit_by_bit_as_the_block_of_transformers(name: str, act: str, dtype: torch.dtype) -> None:
    original = of_transformers(name, act).to(dtype)
    cls: Any = GatedDense if name.startswith("T5") else GatedMLP
    block = cls.like(copy.deepcopy(original))
    assert list(block.state_dict()) == list(original.state_dict())
    for shape in [(3, 5, 10), (1, 10), (0, 10), (13, 1, 10)]:
        x = torch.randn(shape).to(dtype)
        same(numbers(block, x), numbers(original, x))
    same(numbers(block.eval(), x), numbers(original.eval(), x))


def test_the_last_layer_of_t5_may_be_of_another_type() -> None:
    original = of_transformers("T5DenseGatedActDense", "gelu_new").bfloat16()
    original.wo.float()
    x = torch.randn(3, 10).bfloat16()
    same(numbers(GatedDense.like(copy.deepcopy(original)), x), numbers(original, x))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float16, torch.float64])
def test_silu_keeps_its_operands_alone(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(3, 7, dtype=dtype, requires_grad=True) for _ in range(2))

    def run(function: Any) -> tuple[list[Tensor], set[int]]:
        kept = set()

        def keep(tensor: Tensor) -> Tensor:
            kept.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            output = function(gate, up)
        return [output, *torch.autograd.grad(output, (gate, up), torch.ones_like(gate))], kept

    found, kept = run(gated_silu)
    wanted, more = run(lambda gate, up: F.silu(gate) * up)
    same(found, wanted)
    assert kept == {gate.untyped_storage().data_ptr(), up.untyped_storage().data_ptr()}
    assert len(more) == 3


@pytest.mark.parametrize("frozen", [0, 1])
def test_an_operand_may_need_no_gradient(frozen: int) -> None:
    operands = [torch.randn(3, 5), torch.randn(3, 5)]
    operands[1 - frozen].requires_grad_()
    gated_silu(*operands).sum().backward()
    other = copy.deepcopy(operands[1 - frozen].detach()).requires_grad_()
    again = [other if number != frozen else operands[frozen] for number in range(2)]
    (F.silu(again[0]) * again[1]).sum().backward()
    assert torch.equal(operands[1 - frozen].grad, other.grad)


def test_gradients_have_gradients() -> None:
    operands = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(_GatedSiLU.apply, operands)
    assert torch.autograd.gradgradcheck(_GatedSiLU.apply, operands)


def test_transforms_of_torch_see_plain_operations() -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    parameters = dict(block.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(block, parameters, (x,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    whole = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    for one, other in zip(each.values(), whole, strict=True):
        torch.testing.assert_close(one.sum(0), other)
    _, moved = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    assert moved.shape == x.shape
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(block(dual)).tangent, moved)
    assert "silu" in make_fx(block)(x).code


def test_under_a_compiler_the_activation_is_called_as_it_is() -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    same(numbers(compiled, x), numbers(block, x))
    assert any("silu" in name for name in seen)
    assert not any("Gated" in name or "autograd" in name for name in seen)


def test_without_memory() -> None:
    with torch.device("meta"):
        block = GatedMLP.like(MLP())
        output = block(torch.empty(3, 5, requires_grad=True))
    output.sum().backward()
    assert output.is_meta
    assert block.gate_proj.weight.grad.shape == (7, 5)


def test_under_a_checkpoint() -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    wanted = numbers(block, x)
    sch = slapo.create_schedule(nn.Sequential(block))
    sch["0"].checkpoint()
    same(numbers(sch.mod, x), wanted)


def test_a_trace_shows_the_modules_of_the_original() -> None:
    sch = slapo.create_schedule(nn.Sequential(GatedMLP.like(MLP())))
    sch["0"].trace()
    called = [node.target for node in sch["0"].mod.graph.nodes if node.op == "call_module"]
    assert called == ["gate_proj", "up_proj", "act_fn", "down_proj"]


# --- instead of a block ---------------------------------------------------------------------
def test_children_hooks_and_sizes_stay() -> None:
    original = MLP()
    calls: list[str] = []
    for name, child in original.named_children():
        child.register_forward_hook(lambda *_, name=name: calls.append(name))
    original.register_forward_hook(lambda *_: calls.append("block"))
    x, children = torch.randn(3, 5), dict(original.named_children())
    wanted, model = numbers(original, x), nn.Sequential(original)
    calls.clear()
    sch = slapo.create_schedule(model)
    sch["0.up_proj"].sync("fwd_post", lambda module, inputs, output: calls.append("sync") or output)
    sch["0"].replace(GatedMLP.like(original))
    assert dict(sch["0"].mod.named_children()) == children
    assert sch["0"].mod.hidden_size == 5
    same(numbers(sch.mod, x), wanted)
    assert sorted(calls[:-2]) == ["act_fn", "gate_proj", "sync", "up_proj"]
    assert calls[-2:] == ["down_proj", "block"]


def test_an_activation_may_be_replaced() -> None:
    block, x = GatedMLP.like(MLP()), torch.randn(3, 5)
    sch = slapo.create_schedule(nn.Sequential(block))
    sch["0.act_fn"].replace(nn.Tanh())
    wanted = F.linear(torch.tanh(block.gate_proj(x)) * block.up_proj(x), block.down_proj.weight)
    assert torch.equal(sch.mod(x), wanted)


# --- by name -------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", [gated_silu, gated_gelu])
def test_a_backend_by_name(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3)
    assert torch.equal(function(x, x, "torch"), function(x, x))
    with pytest.raises(ValueError, match="unknown backend 'flash'"):
        function(x, x, "flash")
    monkeypatch.setattr(liger, "operations", lambda: None)
    with pytest.raises(slapo.MissingPackageError, match="liger-kernel"):
        function(x, x, "liger")
    monkeypatch.setattr(liger, "operations", lambda: object())
    with pytest.raises(ValueError, match="run on CUDA, but the tensors are on 'cpu'; use 'torch'"):
        function(x, x, "liger")


def test_operands_of_other_shapes_and_types() -> None:
    gate, up = torch.randn(3, 1, requires_grad=True), torch.randn(4, requires_grad=True)
    assert torch.equal(gated_silu(gate, up), F.silu(gate) * up)
    assert gated_silu(gate.half(), up).dtype == torch.float32
    gated_silu(gate, up).sum().backward()
    assert gate.grad is not None
    assert gate.grad.shape == (3, 1)


def test_what_is_called_where_there_is_no_function() -> None:
    gate, up = torch.randn(3), torch.randn(3)
    for act in (nn.GELU(), nn.GELU(approximate="tanh"), torch.tanh):
        assert torch.equal(_gated(act, gate, up), act(gate) * up)


# --- over ranks ----------------------------------------------------------------------------------
def t5_over_ranks(rank: int, world_size: int) -> list[dict[str, float]]:
    from tests.model_schedule.equality import difference

    more = {"feed_forward_proj": "gated-gelu"}
    modes: list[dict[str, Any]] = [{}, {"sequence_parallel": True, "ckpt_ratio": 0.5}]
    return [difference("t5", options, dist.group.WORLD, **more) for options in modes]


@pytest.mark.distributed
def test_gated_t5_over_ranks() -> None:
    pytest.importorskip("transformers")
    for found in run_distributed(t5_over_ranks, 2):
        assert all(max(each.values()) < 5e-6 for each in found), found
