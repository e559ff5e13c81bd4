"""What a way to train is, and what all of them start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmark.train_options import TrainOptions

#: A loss, as a number or a tensor.
Step = Callable[[], Any]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Side:
    """A step, and what it trains.

    Parameters
    ----------
    step
        Forward, backward, optimizer.
    modules
        This rank's.
    """

    step: Step
    modules: list[nn.Module]

    @property
    def parameters(self) -> int:
        """Of this rank; of a distributed one, its share."""
        found = {id(p): p for module in self.modules for p in module.parameters()}
        return sum(_numel(p) for p in found.values())


def _numel(parameter: Any) -> int:
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3 keeps a share of it, and an empty tensor
        return int(parameter.ds_tensor.numel())
    return int((parameter._local_tensor if isinstance(parameter, DTensor) else parameter).numel())


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's."""
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    return torch.device(mesh.device_type, index)


def batch_of(options: TrainOptions, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Every replica has its own."""
    seed = 1 + mesh.get_local_rank("dp")
    made = options.spec.batch(options.batch_size, options.seq_len, options.small, seed)
    return {name: tensor.to(device_of(mesh)) for name, tensor in made.items()}


def zero_buckets(model: nn.Module) -> dict[str, int]:
    """Of ZeRO, as "auto" in Transformers' own use of DeepSpeed: by the width of the model."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return {}
    width = config.hidden_size
    return {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
