"""What Python asks of tensors while a forward is traced, and no graph can answer for every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

#: What a forward does: it is given its module and what the module is called with.
Body = Callable[..., Any]


class Does(nn.Module):
    """Its forward is a function; children may be given."""

    def __init__(self, body: Body, **children: nn.Module) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Any, *others: Any) -> Any:
        return self.body(self, x, *others)


def refused(module: nn.Module, reason: str, **options: Any) -> None:
    """A trace says why it cannot be, and leaves the module."""
    sch = slapo.create_schedule(module)
    with pytest.warns(UserWarning, match=reason):
        assert not sch.trace(**options)
    assert sch.mod is module


def traced(module: nn.Module, *args: Any, **options: Any) -> None:
    """A trace computes what the module does."""
    sch = slapo.create_schedule(copy.deepcopy(module))
    assert sch.trace(**options)
    torch.testing.assert_close(sch.mod(*args), module(*args))


# --- how a tensor lies in memory -----------------------------------------------------------------
def asks_contiguous(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x


def asks_stride(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.stride(0) == x.size(1) else x


def asks_strides(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.stride() == (x.size(1), 1) else x


def asks_offset(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.storage_offset() == 0 else x


@pytest.mark.parametrize("tracer", ["pytorch", "huggingface", "dynamo"])
@pytest.mark.parametrize("ask", [asks_contiguous, asks_stride, asks_strides, asks_offset])
def test_a_branch_on_how_a_tensor_lies_in_memory_is_refused(ask: Body, tracer: str) -> None:
    refused(Does(ask), "lie in memory", tracer=tracer, example_inputs=X)


# --- sizes as keys and words ---------------------------------------------------------------------
def words(module: nn.Module, x: Tensor) -> Tensor:
    return x * {"3": 2.0}.get(str(x.size(0)), 1.0)


def formats(module: nn.Module, x: Tensor) -> Tensor:
    return x * len(f"{x.shape}")


def looks_up(module: nn.Module, x: Tensor) -> Tensor:
    return x * {3: 2.0}.get(x.size(0), 1.0)


def looks_up_set(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if x.size(0) in {3, 5} else x


@pytest.mark.parametrize("ask", [words, formats, looks_up, looks_up_set])
def test_a_size_as_a_word_or_a_key_is_refused(ask: Body) -> None:
    refused(Does(ask), r"asks for a value as a (word|key) .*test_proxies.py:\d+")


# --- what no proxy notices -----------------------------------------------------------------------
class Returns(nn.Module):
    """A child that is a leaf, and returns what the function says."""

    def __init__(self, body: Body = lambda x: (x + 1, None)) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, *args: Any) -> Any:
        return self.body(*args)


def none_of_item(module: nn.Module, x: Tensor) -> Tensor:
    r = module.child(x)
    return r[0] * 3 if r[1] is not None else r[0]


def none_of_name(module: nn.Module, x: Tensor) -> Tensor:
    y, w = module.child(x)
    if w is None:
        return y
    return y * 3


def _last(pair: Any) -> Any:
    return pair[1]


def none_of_call(module: nn.Module, x: Tensor) -> Tensor:
    return x * 3 if _last(module.child(x)) is not None else x


def none_of_walrus(module: nn.Module, x: Tensor) -> Tensor:
    return x * w if (w := module.child(x)[1]) is not None else x


def none_of_listed(module: nn.Module, x: Tensor) -> Tensor:
    outputs = [module.child(x)[1]]
    return x * 3 if outputs[0] is not None else x


def none_of_get(module: nn.Module, x: Tensor) -> Tensor:
    outputs = {"w": module.child(x)[1]}
    return x * 3 if outputs.get("w") is not None else x


def none_of_parameter(module: nn.Module, x: Tensor) -> Tensor:
    return _optional(x, module.child(x)[1])


def _optional(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x if mask is None else x * 3


def none_of_match(module: nn.Module, x: Tensor) -> Tensor:
    match module.child(x)[1]:
        case None:
            return x
    return x * 3


def none_of_gradient(module: nn.Module, x: Tensor) -> Tensor:
    return x * 3 if x.grad is not None else x


NONES = (
    *(none_of_item, none_of_name, none_of_call, none_of_walrus, none_of_listed, none_of_get),
    *(none_of_parameter, none_of_match, none_of_gradient),
)


@pytest.mark.parametrize("ask", NONES)
def test_proxies_refuse_to_say_that_a_part_of_a_result_is_not_none(ask: Body) -> None:
    refused(Does(ask, child=Returns()), r"asks whether .*test_proxies.py:\d+", recursive=False)


def test_a_capture_says_whether_it_is_none() -> None:
    module = Does(none_of_name, child=Returns())
    traced(module, X, recursive=False, example_inputs=X)


def test_attention_returns_no_weights_unless_asked_to() -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        r = module.attention(x, x, x, need_weights=False)
        return r[0] if r[1] is None else r[0] * 3

    module = Does(body, attention=nn.MultiheadAttention(4, 2))
    refused(module, "whether a part of what a child returns is None")
    traced(module, X, example_inputs=X)


def same_object(module: nn.Module, x: Tensor) -> Tensor:
    return x * 2 if module.child(x) is x else x


@pytest.mark.parametrize("tracer", ["huggingface", "dynamo"])
def test_whether_a_leaf_returns_what_it_was_given_is_refused(tracer: str) -> None:
    module = Does(same_object, child=nn.Identity())
    refused(module, "two tensors are one object", tracer=tracer, example_inputs=X)


def ordinary(module: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h, _ = module.child(x)
    n, size = h.shape
    q, k = module.fc(x).chunk(2, -1)
    kv = x
    if mask is not None and getattr(module, "lora", None) is None:
        h = h + mask
    if n is None or size is None or q is None or k is None or kv is not x:
        return x
    y = _optional(h, module.fc(h))
    return y if module.fc.bias is not None and y is not None else h


def test_ordinary_questions_for_none_are_traced() -> None:
    class Ordinary(Does):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.body(self, x, mask)

    module = Ordinary(ordinary, child=Returns())
    traced(module, X, recursive=False)
    traced(module, X, X, recursive=False)


# --- what a leaf does to Python objects ----------------------------------------------------------
class Leaves(nn.Module):
    """It leaves something behind."""

    traceable = False

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.aux, self.seen, self.width = nn.Linear(4, 4), 0, [], 4

    def forward(self, x: Any, to: Any = None) -> Any:
        if isinstance(to, list):
            to.append(x.mean())
        elif isinstance(to, dict):
            to["x"] = x * 2
        self.seen.append(2)
        self.aux = x.size(0)
        return self.fc(x)


def reads_attribute(module: nn.Module, x: Tensor) -> Tensor:
    return module.child(x) * module.child.aux


def reads_by_name(module: nn.Module, x: Tensor) -> Tensor:
    child = module.child
    return child(x) * getattr(child, "aux", 1)


def reads_list(module: nn.Module, x: Tensor) -> Tensor:
    return module.child(x) * len(module.child.seen)


def reads_given_list(module: nn.Module, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    y = module.child(x, found)
    return y + sum(found)


def reads_given_dict(module: nn.Module, x: Tensor) -> Tensor:
    found = {"x": x}
    y = module.child(x, found)
    return y + found["x"]


@pytest.mark.parametrize(
    "read", [reads_attribute, reads_by_name, reads_list, reads_given_list, reads_given_dict]
)
def test_proxies_refuse_what_a_leaf_would_have_left(read: Body) -> None:
    refused(Does(read, child=Leaves()), "reads what a child sets or fills")


def test_other_attributes_of_a_leaf_are_read() -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        y = module.child(x, [x, x]) * module.child.width + module.child.fc.weight.sum()
        return y * module.child.fc.in_features

    traced(Does(body, child=Leaves()), X)
