"""Mistakes planted in the right schedules of six families, in the second layer or at the head.

Each says in which modules it is: a message is right that names one of them, or one inside.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import slapo
from slapo.sharding.collectives import all_gather, copy_to_group, reduce_from_group, reduce_scatter
from slapo.sharding.vocab import vocabulary_hooks
from tests.sharding.families import (
    FAMILIES,
    VOCABULARY,
    Experts,
    Family,
    Region,
    Stack,
    Steps,
    is_whole,
)

#: The layer that mistakes are in.
AT = 1

Node = slapo.Schedule
Row, Column = tuple[str, int], tuple[str, int, int]
#: Whether a decision is the one to make wrong: of the steps, and what the method is given.
Where = Callable[..., bool]
#: The wrong decision: of the steps, a function that makes the right one, or that about other items,
#: and what the method is given but for the layer's number.
Change = Callable[..., object]


class Planted(Steps):
    """The right schedule, of which some decisions are made in another way."""

    def __init__(
        self, family: Family, sequence_parallel: bool, *mistakes: tuple[str, Where, Change]
    ) -> None:
        super().__init__(family, sequence_parallel)
        self.places: list[str] = []
        self.last_stack = family.stacks[-1]
        for method, where, change in mistakes:
            setattr(self, method, self._wrong(getattr(self, method), where, change))

    def _wrong(self, right: Callable[..., None], where: Where, change: Change) -> Change:
        def decide(node: Node, *about: Any) -> None:
            if not where(self, node, *about):
                right(node, *about)
                return
            items = [each for each in about if not isinstance(each, int)]
            number = about[len(items) :]
            change(self, lambda *others: right(node, *(others or items), *number), node, *items)

        return decide

    def here(self, layer: Node, *paths: str) -> None:
        """Note where the mistake is."""
        self.places += [f"{layer.path}.{path}".strip(".") for path in paths]


# --- where ---------------------------------------------------------------------------------------
def anywhere(steps: Planted, *about: Any) -> bool:
    return True


def in_layer(steps: Planted, layer: Node, *about: Any) -> bool:
    """In the second layer of any stack."""
    return bool(about[-1] == AT)


def one_of(items: Callable[[Stack], tuple[Any, ...]]) -> Where:
    """In the second layer of the last stack, one of these."""

    def where(steps: Planted, layer: Node, item: Any, number: int) -> bool:
        is_last = layer.path.startswith(steps.last_stack.layers.removesuffix("*"))
        return number == AT and is_last and item in items(steps.last_stack)

    return where


def at(name: str) -> Where:
    """In the second layer of any stack, what is about this module or number."""

    def where(steps: Planted, layer: Node, *about: Any) -> bool:
        return about[-1] == AT and name in map(path_of, about[:-1])

    return where


def path_of(item: Any) -> str:
    """The module that a row of a region is about."""
    if isinstance(item, Region):
        return item.enter
    return str(item[0] if isinstance(item, tuple) else item)


FIRST_REGION = one_of(lambda stack: stack.regions[:1])
LAST_REGION_COLUMN = one_of(lambda stack: stack.regions[-1].columns[-1:])
FIRST_REGION_COLUMN = one_of(lambda stack: stack.regions[0].columns[-1:])
FIRST_REGION_ROW = one_of(lambda stack: stack.regions[0].rows[-1:])


# --- what ----------------------------------------------------------------------------------------
def left_out(steps: Planted, right: Any, layer: Node, *about: Any) -> None:
    for item in about[:1]:
        steps.here(layer, path_of(item))


def instead(act: Callable[[Node], object]) -> Change:
    """Do something else to the module."""
    return lambda steps, right, layer, item: act(layer[path_of(item)])


def then(act: Callable[[Node], object]) -> Change:
    """Do the right, and something more."""

    def change(steps: Planted, right: Any, layer: Node, item: Any) -> None:
        right()
        act(layer[path_of(item)])

    return change


Mistake = tuple[str, Where, Change]
MISTAKES: dict[str, list[Mistake]] = {}


def mistake(method: str, where: Where) -> Callable[[Change], Change]:
    """Enter a mistake that is made in a method of the steps."""

    def add(change: Any) -> Any:
        MISTAKES.setdefault(change.__name__, []).append((method, where, change))
        return change

    return add


@mistake("row", FIRST_REGION_ROW)
def no_forward_sync(steps: Planted, right: Any, layer: Node, row: Row) -> nn.Module:
    steps.here(layer, row[0])
    return layer[row[0]].shard("weight", axis=row[1]).mod


@mistake("enter", FIRST_REGION)
def no_backward_sync(steps: Planted, right: Any, layer: Node, region: Region) -> None:
    steps.here(layer, region.enter, *(path for path, *_ in region.columns))
    if steps.spreads:
        argument = region.arguments[0] if region.arguments else None
        options = {"argument": argument, "tensor_parallel_output_grad": False}
        layer[region.enter].sync("fwd_pre", "all_gather", axis=1, **options)


@mistake("column", FIRST_REGION_COLUMN)
def wrong_axis(steps: Planted, right: Any, layer: Node, column: Column) -> None:
    layer[column[0]].shard("weight", axis=1 - column[1])
    steps.here(layer, column[0])


class OwnLinear(nn.Module):
    """A user's own layer, of which nothing is known: it adds its bias to what is a partial sum."""

    def __init__(self, like: Any, axis: int) -> None:
        super().__init__()
        self.weight, self.transposed = like.weight, axis == 0
        bias = getattr(like, "bias", None)
        self.bias = (
            nn.Parameter(like.weight.new_ones(like.weight.shape[1 - axis]))
            if bias is None
            else bias
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight if self.transposed else F.linear(x, self.weight)) + self.bias


@mistake("row", FIRST_REGION_ROW)
def bias_on_partial_sum(steps: Planted, right: Any, layer: Node, row: Row) -> None:
    def reduced(module: Any, args: Any, output: Tensor) -> Tensor:
        return reduce_scatter(output, None, 1) if steps.spreads else reduce_from_group(output)

    layer[row[0]].replace(OwnLinear(layer[row[0]].mod, row[1]))
    no_forward_sync(steps, right, layer, row).register_forward_hook(reduced)


@mistake("row", FIRST_REGION_ROW)
def summed_twice(steps: Planted, right: Any, layer: Node, row: Row) -> None:
    right()
    steps.here(layer, row[0])
    layer[row[0]].mod.register_forward_hook(lambda m, a, out: reduce_from_group(out))


@mistake("row", FIRST_REGION_ROW)
def gathered_for_summed(steps: Planted, right: Any, layer: Node, row: Row) -> None:
    def gathered(module: Any, args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1]
        whole = all_gather(output, None, axis=-1)[..., :size]
        return whole.chunk(2, 1)[0] if steps.spreads else whole

    no_forward_sync(steps, right, layer, row).register_forward_hook(gathered)


@mistake("column", one_of(lambda stack: stack.regions[0].columns[1:]))
def only_one_column_split(steps: Planted, right: Any, layer: Node, column: Column) -> None:
    """Ranks keep the whole weight of one column layer whose siblings are split."""
    steps.here(layer, steps.last_stack.regions[0].enter, column[0])


def vocabulary_mistake(name: str, around: Callable[[Node, nn.Module], None]) -> None:
    """The hooks of a table that is split are put around it by hand, and wrong."""

    def change(steps: Planted, right: Any, sch: Node) -> None:
        sch[steps.family.embeddings[0]].shard("weight", axis=0)
        for path in steps.family.embeddings:
            steps.places.append(path)
            around(sch, sch[path].mod)

    MISTAKES[name] = [("vocabulary", anywhere, change)]


def unmasked(sch: Node, table: nn.Module) -> None:
    table.register_forward_hook(lambda module, args, out: reduce_from_group(out))
    table.register_forward_pre_hook(lambda module, args: (args[0] % (VOCABULARY // 2),))


def masked(table: nn.Module, rank: int, ranks: int, reduce: Callable[[Tensor], Tensor]) -> None:
    pre, post = vocabulary_hooks(rank, ranks, VOCABULARY, reduce)
    table.register_forward_pre_hook(pre)
    table.register_forward_hook(post)


vocabulary_mistake("no_vocabulary_mask", unmasked)
vocabulary_mistake(
    "mask_of_rank_0", lambda sch, table: masked(table, 0, sch.world_size, reduce_from_group)
)
vocabulary_mistake(
    "vocabulary_not_summed",
    lambda sch, table: masked(table, sch.rank, sch.world_size, lambda part: part),
)
MISTAKES["norm_not_tagged"] = [
    ("sees_tokens", one_of(lambda stack: stack.norms[:1]), left_out),
]
MISTAKES["inner_norm_not_tagged"] = [("whole_inside", in_layer, left_out)]


def is_first_fork(steps: Planted, layer: Node, path: str, number: int) -> bool:
    is_last = layer.path.startswith(steps.last_stack.layers.removesuffix("*"))
    return number == AT and is_last and not steps.places


MISTAKES["dropout_not_forked"] = [("fork", is_first_fork, left_out)]


@mistake("apply", anywhere)
def whole_dropout_forked(steps: Planted, right: Any, sch: Node) -> None:
    """A dropout of what is whole on every rank draws from each rank's own state."""
    right()
    stack = steps.last_stack
    if stack.dropouts and not steps.spreads:
        path = f"{stack.layers.removesuffix('*')}{AT}.{stack.dropouts[0]}"
        sch[path].fork_rng()
        steps.places.append(path)


@mistake("column", LAST_REGION_COLUMN)
def gradient_summed_twice(steps: Planted, right: Any, layer: Node, column: Column) -> None:
    right()
    steps.here(layer, column[0], steps.last_stack.regions[-1].enter)
    group = layer.group
    layer[column[0]].mod.register_forward_pre_hook(
        lambda module, args: (copy_to_group(copy_to_group(args[0], group), group),)
    )


@mistake("head", anywhere)
def logits_gradient_summed(steps: Planted, right: Any, sch: Node) -> None:
    """Logits that every rank uses alike are gathered as if each rank used them otherwise."""
    head = sch[steps.family.head]
    steps.places.append(head.path)
    if is_whole(head):
        head.shard("weight", axis=0)
    if getattr(head.mod, "bias", None) is not None:
        head.shard("bias", axis=0)
    if not (steps.spreads and steps.last_stack.reads_parts):
        head.sync("bwd_post", "all_reduce")
    head.sync("fwd_post", "all_gather", axis=-1)


def _not_in_blocks(steps: Planted, right: Any, layer: Node, column: Column) -> None:
    path, axis, blocks = column
    if blocks > 1:
        steps.here(layer, path, "attn")
    right((path, axis, 1))


@mistake("experts", in_layer)
def not_in_blocks(steps: Planted, right: Any, layer: Node, experts: Experts) -> None:
    steps.here(layer, experts.path)
    node = layer[experts.path].shard("gate_up_proj", axis=1)
    node.shard("down_proj", axis=2).sync("bwd_post", "all_reduce").sync("fwd_post", "all_reduce")
    if steps.spreads:
        block = layer[experts.block]
        block.sync("fwd_pre", "all_gather", axis=1, tensor_parallel_output_grad=False)
        block.sync("fwd_post", "scatter", axis=1)


MISTAKES["not_in_blocks"].append(("column", in_layer, _not_in_blocks))


@mistake("region", one_of(lambda stack: stack.regions))
def head_size_cut(steps: Planted, right: Any, layer: Node, region: Region) -> None:
    """Half the size of a head where half the number of heads was meant: every shape fits."""
    right()
    module = layer[region.enter].mod
    names = ("head_dim", "attention_head_size", "key_value_proj_dim")
    name = next((n for n in names if hasattr(module, n)), None)
    if name and not steps.places:
        steps.here(layer, region.enter)
        setattr(module, name, getattr(module, name) // layer.world_size)
        for path, attribute in region.counts:
            if attribute in ("num_heads", "num_attention_heads", "n_heads"):
                whole = getattr(layer[path].mod, attribute) * layer.world_size
                setattr(layer[path].mod, attribute, whole)


@mistake("experts", in_layer)
def router_summed(steps: Planted, right: Any, layer: Node, experts: Experts) -> None:
    """A router's whole gradient goes through a gather that sums."""
    right()
    if not steps.spreads:
        layer[experts.block].mod.register_forward_pre_hook(
            lambda module, args: (copy_to_group(args[0]), *args[1:])
        )
        steps.here(layer, experts.block)


@mistake("enter", in_layer)
def states_not_summed(steps: Planted, right: Any, layer: Node, region: Region) -> None:
    """Cross attention sends back a part of the gradient of the encoder's states."""
    if len(region.arguments) > 1:
        steps.here(layer, region.enter, *(path for path, *_ in region.columns))
        region = replace(region, arguments=region.arguments[:1])
    right(region)


@mistake("enter", FIRST_REGION)
def gathered_along_batch(steps: Planted, right: Any, layer: Node, region: Region) -> None:
    if not steps.spreads:
        right()
        return
    steps.here(layer, region.enter)
    argument = region.arguments[0] if region.arguments else None
    layer[region.enter].sync("fwd_pre", "all_gather", axis=0, argument=argument)


@mistake("reduce", in_layer)
def summed_for_scattered(steps: Planted, right: Any, node: Node) -> None:
    """All ranks get all tokens where each goes on with its own."""
    if steps.spreads and not steps.places:
        steps.places += [node.path, node.path.rpartition(".")[0]]
        node.sync("fwd_post", "all_reduce")
    else:
        right()


@mistake("together", lambda steps, sch, stack: stack == steps.last_stack)
def not_together(steps: Planted, right: Any, sch: Node, stack: Stack) -> None:
    """Tokens are not gathered again behind the last norm."""
    steps.places += [stack.last, steps.family.head, stack.last.rpartition(".")[0]]


@dataclass(frozen=True)
class Case:
    """One planted mistake."""

    mistake: str
    family: str
    sequence_parallel: bool

    def __str__(self) -> str:
        return f"{self.mistake}-{self.family}-{'sp' if self.sequence_parallel else 'tp'}"

    def steps(self) -> Planted:
        return Planted(FAMILIES[self.family], self.sequence_parallel, *MISTAKES[self.mistake])


def cases() -> Iterator[Case]:
    for name in MISTAKES:
        for family in FAMILIES:
            for spreads in (False, True):
                yield Case(name, family, spreads)


def names_the_place(path: str, places: list[str]) -> bool:
    """Whether a module that a message names is where the mistake is, or inside."""
    return any(path == place or (place and path.startswith(f"{place}.")) for place in places)
