"""Train mode without randomness: random functions are recorded and made deterministic.

Random masks of slices differ from masks of the full tensor by design, so runs in train mode cannot
be compared by their masks. They are compared by their requests instead. Every dropout records its
probability and passes its input through, and other draws return one constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slapo.random import get_rng_tracker

#: Function -> positions of its probability and of its flag; None for one that always drops.
_DROPS: dict[Any, tuple[tuple[int, str], tuple[int, str, bool] | None]] = {
    F.dropout: ((1, "p"), (2, "training", True)),
    F.dropout1d: ((1, "p"), (2, "training", True)),
    F.dropout2d: ((1, "p"), (2, "training", True)),
    F.dropout3d: ((1, "p"), (2, "training", True)),
    F.alpha_dropout: ((1, "p"), (2, "training", False)),
    F.feature_alpha_dropout: ((1, "p"), (2, "training", False)),
    F.scaled_dot_product_attention: ((4, "dropout_p"), None),
    F.multi_head_attention_forward: ((10, "dropout_p"), (13, "training", True)),
    torch.dropout: ((1, "p"), (2, "train", True)),
    torch.dropout_: ((1, "p"), (2, "train", True)),
    torch.feature_dropout: ((1, "p"), (2, "train", True)),
    torch.alpha_dropout: ((1, "p"), (2, "train", True)),
    torch.native_dropout: ((1, "p"), (2, "train", True)),
}
#: Default probability of functions.
_DEFAULT = {F.scaled_dot_product_attention: 0.0}

#: Random functions -> their constant result.
_DRAWS: dict[Any, float] = {
    torch.rand: 0.5,
    torch.rand_like: 0.5,
    torch.randn: 0.5,
    torch.randn_like: 0.5,
    Tensor.uniform_: 0.5,
    Tensor.normal_: 0.5,
    Tensor.exponential_: 0.5,
    torch.bernoulli: 1.0,
    Tensor.bernoulli: 1.0,
    Tensor.bernoulli_: 1.0,
}

_STATISTICS = (F.batch_norm, F.instance_norm)


@dataclass(frozen=True)
class Drop:
    """One call of a dropout function."""

    #: its probability
    p: float
    #: shape of its input
    shape: tuple[int, ...]
    #: true if each rank draws its own values
    forked: bool
    #: the running module, if recorded
    where: str


class DropoutRecorder(TorchFunctionMode):
    """Disables dropout and makes random draws constant while active."""

    def __init__(self, place: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.drops: list[Drop] = []
        self.differs = False
        self.place = place

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPS:
            args = self._kept_whole(func, args, kwargs)
        elif func in _DRAWS:
            self.differs = True
            # Draw first: the function gives the right shape and dtype, and fills an `out` or
            # in-place argument.
            drawn: Tensor = func(*args, **kwargs)
            with torch.no_grad():
                return drawn.fill_(_DRAWS[func])
        elif func in (F.rrelu, torch.rrelu):  # in eval mode the slope is the mean
            self.differs |= bool(args[3] if len(args) > 3 else kwargs.pop("training", False))
            args = (*args[:3], *(False for _ in args[3:4]), *args[4:])
        elif func in _STATISTICS:
            index, name = (5, "training") if func is F.batch_norm else (5, "use_input_stats")
            self.differs |= bool(args[index] if len(args) > index else kwargs.get(name))
        return func(*args, **kwargs)

    def _kept_whole(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a dropout's probability and set it to 0."""
        (index, name), flag = _DROPS[func]
        given = args[index] if len(args) > index else kwargs.get(name, _DEFAULT.get(func, 0.5))
        active = True
        if flag is not None:
            active = args[flag[0]] if len(args) > flag[0] else kwargs.get(flag[1], flag[2])
        if active and given:
            forked = get_rng_tracker().is_forked
            self.drops.append(Drop(float(given), tuple(args[0].shape), forked, self.place()))
        if len(args) > index:
            return (*args[:index], 0.0, *args[index + 1 :])
        kwargs[name] = 0.0
        return args
