"""Megatron-Core's own GPT in a process where the CPU stands in for CUDA."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import slapo
from benchmark import train_megatron
from benchmark.train_options import TrainOptions
from benchmark.train_side import batch_of
from tests.runtimes.cuda_standin import cuda_on_cpu


def steps(rank: int, world: int, options: TrainOptions, count: int) -> tuple[list[float], int]:
    """Losses, and the parameters of this rank."""
    mesh = slapo.init_mesh(pp=options.pp, dp=options.dp, tp=options.tp, device="cpu")
    batch = batch_of(options, mesh)
    with cuda_on_cpu(), _without_states_of_cuda():
        step, modules = train_megatron.make(options, mesh, batch)
        losses = [step() for _ in range(count)]
    return losses, sum(p.numel() for module in modules for p in module.parameters())


@contextlib.contextmanager
def _without_states_of_cuda() -> Iterator[None]:
    """Random states that only a card has, for which there is no dropout; nothing is compiled."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    made = TransformerConfig.__init__

    @functools.wraps(made)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, use_cpu_initialization=True, **kwargs)

    def no_fork(self: Any, *args: Any) -> Any:
        return contextlib.nullcontext()

    with (
        mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", no_fork),
        mock.patch.object(random, "_get_all_rng_states", return_value=()),
        mock.patch.object(random, "_set_all_rng_states"),
        mock.patch.object(random, "_fork_rng", contextlib.nullcontext),
        mock.patch.object(TransformerConfig, "__init__", on_cpu),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
