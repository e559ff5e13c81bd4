"""A module tree is the same after a recording as before."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slapo.errors import TraceError

_SLOTS = ("_parameters", "_buffers", "_modules")


class ModuleState:
    """The attributes of all modules under `root`, to be put back.

    A forward may store things on its module; run on fake tensors it would leave fakes there. The
    same goes for its ``config``: heads of Transformers note there what their labels look like.
    """

    def __init__(self, root: nn.Module) -> None:
        self._fakes: dict[int, torch.Tensor] = {}
        self._saved = [
            (path, module, dict(vars(module)), {s: dict(vars(module)[s]) for s in _SLOTS})
            for path, module in root.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # its state lies in C++
        ]
        configs = {
            id(c): c for m in root.modules() if hasattr(c := vars(m).get("config"), "__dict__")
        }
        self._configs = [(config, dict(vars(config))) for config in configs.values()]

    def conceal_values(self, fake_mode: FakeTensorMode) -> None:
        """Make tensors of one element fake; the others become so when they are first used.

        Of these, fake tensors remember the real one: ``if self.flag:`` would see it, and
        ``self.count.add_(1)`` would change it.
        """
        for _, module, attributes, slots in self._saved:
            for slot in (attributes, slots["_parameters"], slots["_buffers"]):
                here = vars(module) if slot is attributes else None
                for name, value in slot.items():
                    if isinstance(value, torch.Tensor) and value.numel() <= 1:
                        self._conceal(module, here, name, fake_mode.from_tensor(value))

    def _conceal(
        self, module: nn.Module, attributes: dict[str, Any] | None, name: str, fake: torch.Tensor
    ) -> None:
        self._fakes[id(fake)] = fake
        if attributes is None:
            slot = "_parameters" if name in module._parameters else "_buffers"
            attributes = vars(module)[slot]
        attributes[name] = fake

    def restore(self) -> None:
        """Put back every attribute as it was."""
        for config, values in self._configs:
            vars(config).clear()
            vars(config).update(values)
        for _, module, attributes, slots in self._saved:
            state = vars(module)
            if state.keys() != attributes.keys() or any(
                state[k] is not attributes[k] for k in state
            ):
                state.clear()
                state.update(attributes)
            for slot, content in slots.items():
                now = state[slot]
                if now.keys() != content.keys() or any(now[k] is not content[k] for k in now):
                    now.clear()
                    now.update(content)

    def check(self, entered: Collection[str]) -> None:
        """Refuse a recording whose forward stores tensors on its modules.

        Raises
        ------
        TraceError
            Naming the attribute. Only modules whose forward went into the graph count; the
            others do this themselves when the graph calls them.
        """
        for path, module, attributes, slots in self._saved:
            if path not in entered:
                continue
            for name, value in _tensors_of(vars(module)):
                before = attributes.get(name, slots["_buffers"].get(name))
                before = slots["_parameters"].get(name) if before is None else before
                if value is not before and id(value) not in self._fakes:
                    where = f"{path}.{name}" if path else name
                    raise TraceError(
                        f"the forward stores a tensor in attribute {where!r}, which a graph cannot "
                        f"do; make {path or 'the module'} a leaf"
                    )


def _tensors_of(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    own = [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor)]
    slots = [item for slot in ("_parameters", "_buffers") for item in state[slot].items()]
    return own + [(k, v) for k, v in slots if v is not None]
