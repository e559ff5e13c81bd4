"""Sharding of parameters at creation for ZeRO stage 3, so that no rank holds the full model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.framework_dialect.deepspeed.load import quiet
from slapo.weights.holdings import Held, HeldRange
from slapo.weights.pieces import Pieced


class Shares:
    """Shards parameters over the data-parallel ranks, by DeepSpeed's own ``zero.Init``."""

    def __init__(self, config: Any, mpu: Any, mesh: DeviceMesh, half: torch.dtype | None) -> None:
        self._config, self._mpu, self._half = config, mpu, half
        self._group, self._rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        self._divide: Any = None
        #: parameter -> this rank's range of it in float32, if DeepSpeed has rounded it
        self.exact: dict[nn.Parameter, Tensor] = {}

    def divide(self, tensors: list[Tensor], blank: Collection[int] = ()) -> None:
        """Broadcast the first replica's values, and keep only a range of every parameter.

        Parameters whose ids are in `blank` have no values, and get none.
        """
        source = dist.get_global_rank(self._group, 0)
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        wholes: dict[Tensor, Tensor] = {}
        for tensor in tensors:
            is_parameter = isinstance(tensor, nn.Parameter)
            half = self._half if is_parameter and tensor.is_floating_point() else None
            if is_parameter and id(tensor) in blank:
                tensor.data = torch.empty(
                    tensor.shape, dtype=half or tensor.dtype, device=tensor.device
                )
                continue
            tensor.data = tensor.data.contiguous()
            dist.broadcast(tensor.data, src=source, group=self._group)
            if half is not None:
                wholes[tensor] = tensor.detach()
                tensor.data = tensor.data.to(half)
        if parameters:
            with quiet():
                self._convert(parameters)
        for parameter, whole in wholes.items():
            if parameter.requires_grad:
                self._keep(parameter, whole)

    def of(self, held: list[Held]) -> list[Held]:
        """Return the local parts of tensors; of sharded parameters, ranges."""
        return shares_of(held, self._rank)

    def put_exact(self, model: nn.Module) -> None:
        """Set the optimizer's parameters to the values before rounding."""
        from deepspeed.utils import safe_set_local_fp32_param  # optional package

        for parameter in model.parameters():
            if parameter in self.exact:
                safe_set_local_fp32_param(parameter, self.exact[parameter])
        self.exact.clear()

    def _convert(self, parameters: list[nn.Parameter]) -> None:
        if self._divide is None:
            self._divide = _init_class()(
                data_parallel_group=self._group,
                config_dict_or_path=self._config,
                mpu=self._mpu,
            )
        self._divide._convert_to_zero_parameters(parameters)

    def _keep(self, parameter: Any, whole: Tensor) -> None:
        size = parameter.ds_tensor.numel()
        # ZeRO-3 pads the flat parameter to a multiple of the ranks, so the last range may be
        # shorter.
        mine = whole.flatten()[self._rank * size :][:size].float()
        self.exact[parameter] = F.pad(mine, (0, size - len(mine)))


def _init_class() -> Any:
    import deepspeed  # optional package

    class Init(deepspeed.zero.Init):
        """DeepSpeed's class, without its broadcast of full parameters: replicas are equal."""

        def _zero_init_param(self, param: Any) -> None:
            self._convert_to_deepspeed_param(param)
            param.partition()

    return Init


class Share(HeldRange):
    """A parameter of which this rank holds a range under ZeRO stage 3."""

    def parts(self) -> Iterator[tuple[Tensor, Pieced]]:
        flat = cast(Any, self.tensor).ds_tensor
        yield from HeldRange.of(self, flat, self.start, self.at, self.count).parts()


def shares_of(held: list[Held], rank: int) -> list[Held]:
    """Return the local parts of tensors on a data-parallel rank; of sharded parameters, ranges."""
    return [_share_of(item, rank) if hasattr(item.tensor, "ds_tensor") else item for item in held]


def _share_of(held: Held, rank: int) -> Share:
    tensor: Any = held.tensor
    length = tensor.ds_tensor.numel()
    start = rank * length
    count = max(0, min(length, tensor.ds_numel - start))
    return Share.of(held, tensor, start, 0, count)
