"""Special handling of Transformers models for a capture.

- Models collect hidden states, attentions and router logits by hooks. The first call that needs
  them installs the hooks under a lock that dynamo does not follow. So the hooks are installed
  before a capture and removed afterwards. A leaf's hooks run after its call, as part of the graph.
  Results of modules *within* a leaf are unreachable, so collecting them is refused.
- Configs enable a key/value cache, which a graph cannot hold and training does not use.
- Some functions cache their results for the process, which must not be fake tensors.
- Under tracing they make a mask even if it is only causal, as they cannot see whether position ids
  are those of packed samples. Attention with a mask misses the fastest kernels. Position ids that
  are no input count up, so no mask is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from slapo.errors import TraceError

_HOME = "transformers.utils.output_capturing"
_FLAG = "_output_capturing_hooks_installed"


class _Collector:
    """Substitute for a ``ContextVar``, which dynamo does not follow."""

    value: Any = None

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        self.value = value

    def reset(self, token: Any) -> None:
        self.value = None


#: Results collected in the current capture; empty or None if nothing is collected.
COLLECTOR = _Collector()


def collects(hook: Any) -> bool:
    """Return whether a hook collects results for Transformers."""
    return getattr(hook, "__module__", "") == _HOME


def collecting_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks on `module` that collect its results."""
    return tuple(hook for hook in module._forward_hooks.values() if collects(hook))


def inner_keys(module: nn.Module) -> frozenset[str]:
    """Return the names, such as ``"router_logits"``, that hooks within `module` collect."""
    inner = (child for child in module.modules() if child is not module)
    return frozenset(_key_of(hook) for child in inner for hook in collecting_hooks(child))


def _key_of(hook: Any) -> str:
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return str(cells["key"].cell_contents) if "key" in cells else ""


def refuse_collected(root: nn.Module, entered: Iterable[str], keys: Collection[str]) -> None:
    """Refuse a capture that collects results of entered modules."""
    for path in entered if keys else ():
        for hook in collecting_hooks(root.get_submodule(path)):
            if _key_of(hook) in keys:
                raise TraceError(
                    f"{_key_of(hook)} was requested, but comes from {path!r}, whose operations are "
                    f"part of the graph of {type(root).__name__}; leave it out, or trace with "
                    f"leaf_modules=[{path!r}]"
                )


def refuse_inner(path: str, key: str) -> None:
    """Refuse a capture that collects results of modules within a leaf."""
    raise TraceError(
        f"{key} was requested, but comes from inside {path!r}, which is one call in the graph; "
        "leave it out, or trace with flatten=True"
    )


# Like ``torch.compiler.assume_constant_result``, which would import dynamo here.
refuse_inner._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def as_captured(root: nn.Module) -> Iterator[None]:
    """Prepare Transformers models at or below `root` for a capture within the block."""
    with ExitStack() as stack:
        for block in (_hooks_installed(root), caches_off(root), no_results_kept()):
            stack.enter_context(block)
        yield


@contextmanager
def _hooks_installed(root: nn.Module) -> Iterator[None]:
    home = sys.modules.get(_HOME)
    if home is None:
        yield
        return
    before = [(m, dict(m._forward_hooks), vars(m).get(_FLAG)) for m in root.modules()]
    try:
        with mock.patch.object(home, "_active_collector", COLLECTOR):
            for module in root.modules():
                if hasattr(module, "config") and is_pretrained(module):
                    home.maybe_install_capturing_hooks(module)
            yield
    finally:
        COLLECTOR.value = None
        for module, hooks, flag in before:
            if list(module._forward_hooks) != list(hooks):
                module._forward_hooks.clear()
                module._forward_hooks.update(hooks)
            if flag is None:
                vars(module).pop(_FLAG, None)


@contextmanager
def caches_off(root: nn.Module) -> Iterator[None]:
    """Disable the key/value cache in configs below `root` within the block."""
    held = (vars(module).get("config") for module in root.modules())
    configs = {id(each): each for each in held if hasattr(each, "__dict__")}.values()
    asking = [config for config in configs if vars(config).get("use_cache") is True]
    for config in asking:
        vars(config)["use_cache"] = False
    try:
        yield
    finally:
        for config in asking:
            vars(config)["use_cache"] = True


@contextmanager
def causal_masks_left_out(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let models leave out masks that are only causal, unless position ids are given."""
    home = sys.modules.get("transformers.masking_utils")
    if home is None:
        yield
        return
    # Older releases of dynamo take ``torch.compiler.is_exporting()`` for True, and masks are never
    # left out while exporting. Older releases of Transformers leave out none while tracing, even
    # without padding whose values would decide.
    replaced: dict[str, Any] = {"is_torchdynamo_exporting": _no, "is_tracing": _is_given}
    if arguments.get("position_ids") is None:
        replaced["find_packed_sequence_indices"] = _not_packed
    with mock.patch.multiple(home, create=True, **replaced):
        yield


def _no() -> bool:
    return False


def _is_given(tensor: Any = None) -> bool:
    return tensor is not None


def _not_packed(position_ids: Any) -> None:
    return None


@contextmanager
def no_results_kept() -> Iterator[None]:
    """Disable caching of function results in Transformers within the block."""
    home = sys.modules.get("transformers.pytorch_utils")
    if home is None:
        yield
        return
    # Transformers caches results by arguments unless it is compiling; a fake result would stay
    # there.
    with mock.patch.object(home, "is_torchdynamo_compiling", _yes, create=True):
        yield


def _yes() -> bool:
    return True


def is_pretrained(module: nn.Module) -> bool:
    """Return whether this is a ``PreTrainedModel``, without importing transformers."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    return "transformers.modeling_utils.PreTrainedModel" in names
