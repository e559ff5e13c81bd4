"""State of schedulers, data and random generators as JSON, with its tensors stored separately.

Reading yields only numbers, strings, tensors and nests of them: no code runs.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from slapo.errors import SlapoError

# Key that marks a JSON object as an encoded value.
_TAG = "="

_PLAIN = (str, bool, int, float, type(None))

# Class of a nest -> class that is rebuilt with the same values.
_LISTS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
# The factory of a defaultdict is code, and is not saved.
_DICTS: dict[type, str] = {OrderedDict: "dict", Counter: "Counter", defaultdict: "dict"}
_MADE: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "dict": dict,
    "Counter": Counter,
}


def encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Encode a nest as JSON; appends its tensors to `tensors`. `where` names it in an error."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {_TAG: "tensor", "number": len(tensors) - 1}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TAG: "torch", "name": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "text": base64.b64encode(value).decode()}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, where)
    if type(value) is list or type(value) in _LISTS:
        items = [encode(v, tensors, f"{where}[{k}]") for k, v in enumerate(value)]
        if type(value) is list:
            return items
        length = {"maxlen": value.maxlen} if type(value) is deque else {}
        return {_TAG: _LISTS[type(value)], "items": items, **length}
    if type(value) is dict or type(value) in _DICTS:
        pairs = [(k, encode(v, tensors, f"{where}[{k!r}]")) for k, v in value.items()]
        if type(value) is dict and all(type(k) is str and k != _TAG for k, _ in pairs):
            return dict(pairs)
        keyed = [[encode(k, tensors, f"a key of {where}"), v] for k, v in pairs]
        return {_TAG: _DICTS.get(type(value), "dict"), "pairs": keyed}
    raise SlapoError(
        f"{where} is a {type(value).__name__}, which cannot be saved; use numbers, strings, "
        "tensors, arrays, or lists and dicts of them"
    )


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """Decode the result of `encode`."""
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(each, tensors) for key, each in value.items()}
    if kind == "tensor":
        return tensors[value["number"]]
    if kind == "torch":
        found = getattr(torch, value["name"], None)
        return found if isinstance(found, torch.dtype) else torch.device(value["name"])
    if kind == "bytes":
        return base64.b64decode(value["text"])
    if kind == "numpy":
        return _decode_numpy(value)
    if "items" in value:
        items = (decode(each, tensors) for each in value["items"])
        return _MADE[kind](items, *([value["maxlen"]] if "maxlen" in value else []))
    pairs = [(decode(key, tensors), decode(each, tensors)) for key, each in value["pairs"]]
    return _MADE[kind](dict(pairs))


def _encode_numpy(value: Any, where: str) -> Any:
    # The bytes of an array of objects are pointers; those of records lack the fields' names.
    if value.dtype.kind in "OV":
        raise SlapoError(
            f"{where} is an array of dtype {value.dtype}, which cannot be saved; use lists or "
            "dicts of arrays of numbers"
        )
    data = base64.b64encode(value.tobytes()).decode()
    shape = list(value.shape)
    return {_TAG: "numpy", "dtype": value.dtype.str, "shape": shape, "data": data}


def _decode_numpy(value: dict[str, Any]) -> Any:
    import numpy  # there is an array only where it is installed

    flat = numpy.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"])
    array = flat.reshape(value["shape"]).copy()
    return array if value["shape"] else array[()]
