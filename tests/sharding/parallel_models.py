"""Models, and the tensor-parallel schedules of them, that must compute what one process does."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slapo import Schedule, call_module
from slapo.op import FlashAttention, FusedQKV
from slapo.sharding.collectives import reduce_from_group
from slapo.sharding.vocab import masked
from tests.sharding import packed

# Sizes are prime or odd wherever the group's size need not divide them.
BATCH, SEQ, HIDDEN = 7, 5, 12


class Mlp(nn.Module):
    def __init__(
        self, bias: bool = True, width: int = 3 * HIDDEN + 4, out: int = HIDDEN - 1
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(HIDDEN, width, bias=bias)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(width, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class UnequalBlocks(nn.Module):
    """A packed projection whose parts have different sizes, as with grouped key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [8, 4, 4]
        self.packed = nn.Linear(HIDDEN, 16)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.packed(x).split(self.sizes, -1)
        return self.out(torch.cat([torch.tanh(a), b * c], -1))


class Gated(nn.Module):
    """Gate and value in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * 21)
        self.out = nn.Linear(21, 5)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.out(torch.sigmoid(gate) * value)


class GroupedHeads(nn.Module):
    """Attention whose queries share two heads of keys and values, or one."""

    def __init__(self, heads: int = 8, shared: int = 2, eager: bool = False) -> None:
        super().__init__()
        self.heads, self.shared, self.groups, self.eager = heads, shared, heads // shared, eager
        self.q, self.out = nn.Linear(HIDDEN, heads * 2), nn.Linear(heads * 2, HIDDEN)
        self.k, self.v = (nn.Linear(HIDDEN, shared * 2) for _ in range(2))
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k, v = (self.repeated(part) for part in (self.norm(k), v))
        if self.eager:
            mixed = torch.softmax(q @ k.transpose(2, 3) / 2**0.5, -1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def repeated(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return x
        batch, heads, tokens, width = x.shape
        x = x[:, :, None].expand(batch, heads, self.groups, tokens, width)
        return x.reshape(batch, heads * self.groups, tokens, width)


class ConvNet(nn.Module):
    def __init__(
        self, dims: int = 2, norm: type[nn.Module] | None = None, transposed: bool = False
    ) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        last: Any = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        batch_norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
        self.conv1 = conv(3, 8, 3, padding=1)
        self.bn = batch_norm(8) if norm is None else norm(4, 8)
        self.grouped = conv(8, 16, 3, padding=1, groups=4)
        self.conv2 = (last if transposed else conv)(16, 5, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(torch.relu(self.grouped(torch.relu(self.bn(self.conv1(x))))))


class Language(nn.Module):
    """Embedding, MLP and head, which may share the table."""

    def __init__(self, tied: bool = False, padding_idx: int | None = None, rows: int = 24) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, HIDDEN, padding_idx=padding_idx)
        self.fc = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, rows, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.emb(tokens))))


class SequenceParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Identity()
        self.norm = nn.LayerNorm(HIDDEN)
        self.fc1 = nn.Linear(HIDDEN, 16)
        self.fc2 = nn.Linear(16, HIDDEN)
        self.end_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return self.end_norm(x)


class FlattenedTokens(SequenceParallel):
    """Samples and tokens are one dimension in between, as in OPT's layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        rows = x.reshape(-1, HIDDEN)
        rows = rows + self.fc2(F.gelu(self.fc1(self.norm(rows))))
        return self.end_norm(rows.view(x.shape))


class Resharded(nn.Module):
    """Row-wise and column-wise steps, with places in between to change the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Identity() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.a(x))
        x = torch.cos(self.b(x)) * 2
        x = torch.tanh(self.c(x)) + 1
        return self.d(x) ** 2


def twice() -> nn.Module:
    """One layer at two places."""
    layer = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(OrderedDict(first=layer, act=nn.Tanh(), second=layer))


# --- schedules -------------------------------------------------------------------------------
def then(*steps: Callable[[Schedule], Any]) -> Callable[[Schedule], None]:
    """One schedule after the other."""

    def schedule(sch: Schedule) -> None:
        for step in steps:
            step(sch)

    return schedule


def column(sch: Schedule, path: str, **cut: Any) -> Schedule:
    node = sch[path].shard("weight", axis=0, **cut)
    return node if node.mod.bias is None else node.shard("bias", axis=0, **cut)


def traced(sch: Schedule) -> None:
    assert sch.trace()


def summed(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return reduce_from_group(output, None)


def gathered(node: Schedule, axis: int = -1) -> None:
    """All ranks have all of the output, and none has a part of its gradient."""
    node.sync("fwd_post", "all_gather", axis=axis, tensor_parallel_output_grad=False)


def mlp_pair(sch: Schedule, **cut: Any) -> None:
    column(sch, "fc1", **cut).sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1, **cut).sync("fwd_post", "all_reduce")


def mlp_reduced_by_parent(sch: Schedule) -> None:
    mlp = sch["inner"]
    column(mlp, "fc1")
    mlp["fc2"].shard("weight", axis=1)
    mlp.sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")


def mlp_reduced_by_hook(sch: Schedule, is_registered: bool = False) -> None:
    column(sch, "fc1").sync("bwd_post", "all_reduce")
    fc2 = sch["fc2"].shard("weight", axis=1)
    fc2.mod.register_forward_hook(summed) if is_registered else fc2.sync("fwd_post", summed)


def mlp_synced_before_sharded(sch: Schedule) -> None:
    sch["fc1"].sync("bwd_post", "all_reduce")
    column(sch, "fc1")
    sch["fc2"].sync("fwd_post", "all_reduce").shard("weight", axis=1)


def mlp_fused(sch: Schedule) -> None:
    """Bias and activation fused first, and the layer sharded then."""
    sch["fc1"].decompose()
    sch.fuse(sch.find(lambda x, b: F.gelu(x + b)), compiler=None, name="BiasGeLU")
    sch["fc1"].shard("weight", axis=0).shard("bias", axis=0)
    sch.sync("bwd_post", "all_reduce")
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def checkpointed_operations(sch: Schedule) -> None:
    """Layers inside of them are sharded by their names as ever."""
    sch.checkpoint(sch.find(lambda x: F.gelu(call_module("fc1", x))))


def mlp_scattered(sch: Schedule, axis: int) -> None:
    """The reduced sum is kept by samples, or by channels as is the bias then."""
    column(sch, "fc1").sync("bwd_post", "all_reduce")
    gathered(sch["fc2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=axis), axis)


def mlp_reduced_then_scattered(sch: Schedule) -> None:
    column(sch, "fc1").sync("bwd_post", "all_reduce")
    fc2 = sch["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    fc2.sync("fwd_post", "scatter", axis=0)
    gathered(sch, axis=0)


def column_gathered(sch: Schedule) -> None:
    gathered(column(sch, "fc1").sync("bwd_post", "all_reduce"))


def column_gathered_in_parts(sch: Schedule) -> None:
    """The gathered tensor meets a column-parallel layer: its gradient is a sum of parts."""
    column(sch, "fc1").sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    gathered(column(sch, "fc2"), axis=2)


def row_with_resharded_input(sch: Schedule) -> None:
    sch["fc2"].shard("weight", axis=1)
    sch["fc2"].sync("fwd_pre", "RR->RS").sync("fwd_post", "all_reduce")


def shared_layer(sch: Schedule) -> None:
    gathered(column(sch, "first").sync("bwd_post", "all_reduce"))


def flash_attention(sch: Schedule) -> None:
    sch.sync("bwd_post", "all_reduce")
    for name in ["qkv"] if "qkv" in sch else ["query", "key", "value"]:
        blocks = 3 if name == "qkv" else 1
        sch[name].shard("weight", 0, blocks=blocks).shard("bias", 0, blocks=blocks)
    sch["out_proj"].shard("weight", 1).sync("fwd_post", "all_reduce")


def unequal_blocks(sch: Schedule) -> None:
    sch["packed"].shard("weight", axis=0, blocks=(8, 4, 4)).shard("bias", 0, blocks=[8, 4, 4])
    sch["packed"].sync("bwd_post", "all_reduce")
    sch["out"].shard("weight", axis=1, blocks=(8, 4)).sync("fwd_post", "all_reduce")
    sch.set("sizes", [size // sch.world_size for size in sch.mod.sizes])


def packed_heads(sch: Schedule) -> None:
    assert sch.trace(example_inputs=WIDER().to(sch.mod.out.weight))
    sch.replace(FusedQKV(16, 4), sch.find(packed.heads_of))
    column(sch, "FusedQKV_0.fused_linear", blocks=3).sync("bwd_post", "all_reduce")
    sch["out"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def packed_gate(sch: Schedule) -> None:
    assert sch.trace()
    sch.replace(packed.Packed(), sch.find(lambda x: call_module("gate|up", x)))
    column(sch, "Packed_0.both", blocks=2).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def conv_net(sch: Schedule) -> None:
    column(sch, "conv1").sync("bwd_post", "all_reduce")
    for tensor in ("weight", "bias", "running_mean", "running_var"):
        if hasattr(sch["bn"].mod, tensor):
            sch["bn"].shard(tensor, axis=0)
    column(sch, "grouped")
    inputs = 1 if isinstance(sch["conv2"].mod, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 0
    sch["conv2"].shard("weight", axis=inputs).sync("fwd_post", "all_reduce")


def conv_gathered(sch: Schedule) -> None:
    gathered(column(sch, "conv1").sync("bwd_post", "all_reduce"), axis=1)


def conv_scattered(sch: Schedule) -> None:
    """Rank by rank a part of the channels of the sum, and of the bias."""
    sch["grouped"].sync("fwd_post", "scatter", axis=1)
    sch["conv2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=0)
    gathered(sch, axis=0)


def grouped_heads(sch: Schedule) -> None:
    model = sch.mod
    sch["q"].shard("weight", 0).shard("bias", 0)
    for name in "kv":
        sch[name].shard("weight", 0, parts=model.shared).shard("bias", 0, parts=model.shared)
    for leaf in ("weight", "bias"):
        sch["norm"].annotate(leaf, "partial_grad", True)
    sch["out"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch.sync("bwd_post", "all_reduce")
    own = max(1, model.shared // sch.world_size)
    sch.set("groups", model.heads // sch.world_size // own)


def vocabulary(sch: Schedule, table: str = "emb", head: str = "head", **cut: Any) -> None:
    sch[table].shard("weight", axis=0, **cut).sync("fwd_post", "all_reduce")
    gathered(sch[head].shard("weight", axis=0, **cut).sync("bwd_post", "all_reduce"))


#: 25, 25, 25 and 22 of 97 rows: a table, and a head whose gather knows it.
uneven_vocabulary = partial(vocabulary, uneven=True)


def vocabulary_masked_by_hand(sch: Schedule) -> None:
    sch["emb"].shard("weight", axis=0, uneven=True)
    start, count = (-(-97 // sch.world_size) * sch.rank, sch["emb"].mod.weight.shape[0])
    foreign: list[Tensor] = []

    def mask(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        (tokens,) = args
        foreign[:] = [(tokens < start) | (tokens >= start + count)]
        return (masked(tokens, start, count, total=97),)

    def zero(module: Any, args: Any, output: Tensor) -> Tensor:
        kept = output.masked_fill(foreign.pop().unsqueeze(-1), 0.0)
        return reduce_from_group(kept, sch.group)

    sch["emb"].sync("fwd_pre", mask).sync("fwd_post", zero)


def uneven_columns_gathered(sch: Schedule) -> None:
    """By what reads it: that gets a gradient of parts, which the gather's backward sums."""
    column(sch, "fc1", uneven=True).sync("bwd_post", "all_reduce")
    width = sch["fc2"].mod.in_features
    gathered(column(sch, "fc2", uneven=True).sync("fwd_pre", "all_gather", axis=-1, total=width))


def uneven_blocks(sch: Schedule) -> None:
    column(sch, "both", blocks=2, uneven=True).sync("bwd_post", "all_reduce")
    sch["out"].shard("weight", axis=1, uneven=True).sync("fwd_post", "all_reduce")


def vocabulary_synced_before_sharded(sch: Schedule) -> None:
    sch["emb"].sync("fwd_post", "all_reduce").shard("weight", axis=0)


def vocabulary_checkpointed(sch: Schedule) -> None:
    sch["emb"].checkpoint().shard("weight", axis=0).sync("fwd_post", "all_reduce")


def vocabulary_by_tokens(sch: Schedule, uneven: bool = False) -> None:
    """The sum is kept by tokens: what comes after it sees a part of the sequence."""
    sch["emb"].shard("weight", axis=0, uneven=uneven).sync("fwd_post", "reduce_scatter", axis=1)
    for name in ("weight", "bias"):
        sch["fc"].annotate(name, "sequence_parallel", True)
    head = sch["head"].shard("weight", axis=0, uneven=uneven)
    gathered(head.sync("fwd_pre", "all_gather", axis=1))


def embedding_columns(sch: Schedule) -> None:
    gathered(sch["emb"].shard("weight", axis=1))


def tied_by_the_head(sch: Schedule) -> None:
    """The embedding follows; only its reduction is left to place."""
    gathered(sch["head"].shard("weight", axis=0).sync("bwd_post", "all_reduce"))
    sch["emb"].sync("fwd_post", "all_reduce")


def sequence_parallel(sch: Schedule, axis: int = 1) -> None:
    sch["start"].sync("fwd_post", "scatter", axis=1)
    for norm in ("norm", "end_norm"):
        for name in ("weight", "bias"):
            sch[norm].annotate(name, "sequence_parallel", True)
    column(sch, "fc1").sync("fwd_pre", "all_gather", axis=axis)
    sch["fc2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=axis)
    gathered(sch, axis=1)


def reshard_chain(first: str, *rest: str) -> Callable[[Schedule], None]:
    def schedule(sch: Schedule) -> None:
        for name, spec in zip("abcd", (first, *rest), strict=False):
            mode = "fwd_pre" if name in "bd" else "fwd_post"
            sch[name].sync(mode, spec)

    return schedule


# --- cases -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    schedule: Callable[[Schedule], None]
    inputs: Callable[[], Tensor]
    keeps_names: bool = True


def activations(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def tokens() -> Tensor:
    return torch.randint(0, 24, (BATCH, SEQ))


def many_tokens() -> Tensor:
    return torch.randint(0, 97, (BATCH, 12))


X = activations(BATCH, SEQ, HIDDEN)
WIDER = activations(BATCH, SEQ, 16)
EVEN_BATCH = activations(4, SEQ, HIDDEN)
EVEN_SEQ = activations(BATCH, 12, HIDDEN)
IMAGES = activations(BATCH, 3, 9, 11)


class ReadTwice(nn.Module):
    """What an encoder gives is read by two blocks, as by the layers of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.first, self.second = nn.Linear(HIDDEN, HIDDEN), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        states = self.encoder(x)
        return self.first(states) + self.second(states.tanh())


def read_twice(sch: Schedule) -> None:
    sch["encoder"].sync("fwd_post", "all_reduce_grad")
    for block in (sch["first"], sch["second"]):
        column(block, "fc1")
        block["fc2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def gathered_and_read_twice(sch: Schedule) -> None:
    gathered(column(sch, "encoder").sync("bwd_post", "all_reduce"))
    read_twice(sch)


CASES: dict[str, Case] = {
    "whole states read by several blocks": Case(ReadTwice, read_twice, X),
    "gathered states read by several blocks": Case(ReadTwice, gathered_and_read_twice, X),
    "column-row": Case(Mlp, mlp_pair, X),
    "column-row, 2-D input": Case(Mlp, mlp_pair, activations(BATCH, HIDDEN)),
    "column-row without bias": Case(lambda: Mlp(bias=False), mlp_pair, X),
    "row reduced by its parent": Case(
        lambda: nn.Sequential(OrderedDict(inner=Mlp(), act=nn.Tanh())), mlp_reduced_by_parent, X
    ),
    "row reduced by a hook": Case(Mlp, mlp_reduced_by_hook, X),
    "row reduced by a registered hook": Case(
        Mlp, partial(mlp_reduced_by_hook, is_registered=True), X
    ),
    "sync before shard": Case(Mlp, mlp_synced_before_sharded, X),
    "checkpointed, before one is sharded and after the other is": Case(
        Mlp, then(lambda s: s["fc2"].checkpoint(), mlp_pair, lambda s: s["fc1"].checkpoint()), X
    ),
    "fused, then sharded": Case(Mlp, mlp_fused, X),
    "traced": Case(Mlp, then(mlp_pair, traced), X),
    "sharded after a trace": Case(Mlp, then(traced, mlp_pair), X),
    "checkpointed operations": Case(Mlp, then(checkpointed_operations, mlp_pair), X),
    "row scattered by channels": Case(lambda: Mlp(out=HIDDEN), partial(mlp_scattered, axis=-1), X),
    "row scattered by samples": Case(Mlp, partial(mlp_scattered, axis=0), EVEN_BATCH),
    "row reduced, then scattered": Case(Mlp, mlp_reduced_then_scattered, EVEN_BATCH),
    "column gathered": Case(Mlp, column_gathered, X),
    "column gathered for parts": Case(lambda: Mlp(out=HIDDEN), column_gathered_in_parts, X),
    "row with a resharded input": Case(Mlp, row_with_resharded_input, X),
    "one layer at two places": Case(twice, shared_layer, X),
    "FlashAttention": Case(lambda: FlashAttention(16, 4, causal=True), flash_attention, WIDER),
    "FlashAttention, packed": Case(
        lambda: FlashAttention(16, 4, fused_qkv=True, causal=True), flash_attention, WIDER
    ),
    "packed in a capture": Case(packed.Attention, packed_heads, WIDER, keeps_names=False),
    "packed in a trace": Case(packed.MLP, packed_gate, WIDER, keeps_names=False),
    "unequal blocks": Case(UnequalBlocks, unequal_blocks, X),
    "Conv2d and BatchNorm2d": Case(ConvNet, conv_net, IMAGES),
    "Conv1d and BatchNorm1d": Case(lambda: ConvNet(1), conv_net, activations(BATCH, 3, 11)),
    "Conv3d and BatchNorm3d": Case(lambda: ConvNet(3), conv_net, activations(3, 3, 5, 7, 5)),
    "Conv2d and GroupNorm": Case(lambda: ConvNet(norm=nn.GroupNorm), conv_net, IMAGES),
    "ConvTranspose2d": Case(lambda: ConvNet(transposed=True), conv_net, IMAGES),
    "ConvTranspose1d": Case(
        lambda: ConvNet(1, transposed=True), conv_net, activations(BATCH, 3, 11)
    ),
    "ConvTranspose3d": Case(
        lambda: ConvNet(3, transposed=True), conv_net, activations(3, 3, 5, 7, 5)
    ),
    "Conv2d gathered": Case(ConvNet, conv_gathered, IMAGES),
    "Conv2d scattered": Case(ConvNet, conv_scattered, activations(4, 3, 9, 11)),
    "vocabulary": Case(Language, vocabulary, tokens),
    "vocabulary, padding": Case(lambda: Language(padding_idx=13), vocabulary, tokens),
    "vocabulary, sync before shard": Case(Language, vocabulary_synced_before_sharded, tokens),
    "vocabulary, checkpointed": Case(Language, vocabulary_checkpointed, tokens),
    "vocabulary, by tokens": Case(
        Language, vocabulary_by_tokens, lambda: torch.randint(0, 24, (BATCH, 12))
    ),
    "embedding by columns": Case(Language, embedding_columns, tokens),
    "tied table": Case(lambda: Language(tied=True), vocabulary, tokens),
    "tied table, padding": Case(lambda: Language(tied=True, padding_idx=2), vocabulary, tokens),
    "tied table, one side": Case(lambda: Language(tied=True), tied_by_the_head, tokens),
    "uneven vocabulary": Case(lambda: Language(rows=97), uneven_vocabulary, many_tokens),
    "uneven tied table, padding in the last part": Case(
        lambda: Language(tied=True, padding_idx=96, rows=97), uneven_vocabulary, many_tokens
    ),
    "uneven vocabulary, by tokens": Case(
        lambda: Language(rows=97), partial(vocabulary_by_tokens, uneven=True), many_tokens
    ),
    "uneven vocabulary, masked by hand": Case(
        lambda: Language(rows=97), vocabulary_masked_by_hand, many_tokens
    ),
    "uneven column-row": Case(lambda: Mlp(width=41), partial(mlp_pair, uneven=True), X),
    "uneven columns gathered": Case(lambda: Mlp(width=41), uneven_columns_gathered, X),
    "uneven blocks": Case(Gated, uneven_blocks, X),
    "shared heads": Case(GroupedHeads, grouped_heads, X),
    "shared heads, eager": Case(lambda: GroupedHeads(eager=True), grouped_heads, X),
    "shared heads, one for each rank": Case(lambda: GroupedHeads(4), grouped_heads, X),
    "shared heads, one for each rank, eager": Case(
        lambda: GroupedHeads(4, eager=True), grouped_heads, X
    ),
    "one shared head": Case(lambda: GroupedHeads(4, 1), grouped_heads, X),
    "sequence parallel": Case(SequenceParallel, sequence_parallel, EVEN_SEQ),
    "sequence parallel, flattened": Case(
        FlattenedTokens, partial(sequence_parallel, axis=0), EVEN_SEQ
    ),
    "RS to SR": Case(Resharded, reshard_chain("RR->RS", "RS->SR", "SR->RS", "RS->RR"), EVEN_SEQ),
    "SR to RS": Case(Resharded, reshard_chain("RR->SR", "SR->RS", "RS->SR", "SR->RR"), EVEN_SEQ),
}
