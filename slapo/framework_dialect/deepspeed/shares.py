"""ZeRO stage 3 shards parameters as they are created, so that no rank holds the whole model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slapo.framework_dialect.deepspeed.load import quiet


class Shares:
    """Divides parameters over the data-parallel ranks, by DeepSpeed's own ``zero.Init``."""

    def __init__(self, config: Any, mpu: Any, mesh: DeviceMesh, half: torch.dtype | None) -> None:
        self._config, self._mpu, self._half = config, mpu, half
        self._group, self._rank = mesh.get_group("dp"), mesh.get_local_rank("dp")
        self._divide: Any = None
        #: parameter -> this rank's range of it in float32, where DeepSpeed has rounded it
        self.exact: dict[nn.Parameter, Tensor] = {}

    def divide(self, tensors: list[Tensor]) -> None:
        """Give replicas the values of the first one, and leave each a range of every parameter."""
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        for tensor in tensors:
            tensor.data = tensor.data.contiguous()
            if self._half is not None or not isinstance(tensor, nn.Parameter):
                source = dist.get_global_rank(self._group, 0)
                dist.broadcast(tensor.data, src=source, group=self._group)
        wholes = [parameter.detach() for parameter in parameters if self._half is not None]
        for parameter in parameters:
            if self._half is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._half)
        if parameters:
            with quiet():
                self._convert(parameters)
        for parameter, whole in zip(parameters, wholes, strict=False):
            if parameter.requires_grad:
                self._keep(parameter, whole)

    def put_exact(self, model: nn.Module) -> None:
        """Set the optimizer's parameters to what was not rounded."""
        from deepspeed.utils import safe_set_local_fp32_param  # optional package

        for parameter in model.parameters():
            if parameter in self.exact:
                safe_set_local_fp32_param(parameter, self.exact[parameter])
        self.exact.clear()

    def _convert(self, parameters: list[nn.Parameter]) -> None:
        if self._divide is not None:
            self._divide(param_list=parameters)
            return
        import deepspeed  # optional package

        deepspeed.zero.Init(
            module=nn.ParameterList(parameters),
            data_parallel_group=self._group,
            config_dict_or_path=self._config,
            mpu=self._mpu,
        )
        first: Any = parameters[0]
        self._divide = first.convert_to_zero_parameters

    def _keep(self, parameter: Any, whole: Tensor) -> None:
        size = parameter.ds_tensor.numel()
        mine = whole.flatten()[self._rank * size :][:size].float()
        self.exact[parameter] = F.pad(mine, (0, size - len(mine)))
