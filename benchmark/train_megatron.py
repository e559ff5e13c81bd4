"""Megatron-Core's own GPT, as a script of its own would train it: for CUDA."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmark.train_options import DTYPES, Refused, TrainOptions

_LEARNING_RATE = 1e-4


def make(
    options: TrainOptions, mesh: DeviceMesh, batch: dict[str, Tensor]
) -> tuple[Any, list[nn.Module]]:
    """A step of Megatron-Core's own GPT-2, and this rank's stage.

    Raises
    ------
    Refused
        If it has no such model, is not installed, or there is no CUDA.
    """
    _check(options)
    from slapo.framework_dialect.megatron.load import megatron_core, quiet

    megatron_core()
    with quiet(), warnings.catch_warnings():
        # About settings that are Megatron-Core's own defaults.
        warnings.filterwarnings("ignore", "full scope is deprecated")
        step, modules = _make(options, mesh, batch)

    def quiet_step() -> float:
        with quiet():
            return step()

    return quiet_step, modules


def _check(options: TrainOptions) -> None:
    if options.spec.key != "gpt2":
        raise Refused(
            f"Megatron-Core's own GPT is the like of gpt2, and there is none of {options.model} "
            "here; pass a gpt2, or --impl slapo-megatron"
        )
    if not torch.cuda.is_available():
        raise Refused(
            "Megatron-Core's own GPT makes its random states and buffers on CUDA, and this process "
            "sees no CUDA device"
        )
    try:
        import megatron.core  # noqa: F401
    except ImportError as error:
        raise Refused(f"{error}; pip install megatron-core") from error


def _make(
    options: TrainOptions, mesh: DeviceMesh, batch: dict[str, Tensor]
) -> tuple[Callable[[], float], list[nn.Module]]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(options.tp, options.pp)
    model_parallel_cuda_manual_seed(1)
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(options.dtype)
    precision = {half: True} if half else {}
    model, config = _model(options, precision)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(overlap_grad_reduce=options.pp == 1), model
    )
    wrapped.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=_LEARNING_RATE, clip_grad=0.0, **precision),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    config.grad_scale_func = optimizer.scale_loss
    run = functools.partial(
        get_forward_backward_func(),
        forward_step_func=_forward,
        model=[wrapped],
        num_microbatches=options.parts,
        seq_length=options.seq_len,
        micro_batch_size=options.batch_size // options.parts,
        forward_only=False,
    )

    def step() -> float:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(data_iterator=_parts(batch, options.parts))
        optimizer.step()
        mean = sum(each["loss"] for each in losses) / max(1, len(losses))
        return _from_last(mean, mesh)

    return step, [model]


def _from_last(loss: Any, mesh: DeviceMesh) -> float:
    """Stages before the last one have none: the sum over all is that of replicas and copies."""
    found = torch.tensor([float(loss)], device=mesh.device_type)
    dist.all_reduce(found, group=mesh.get_group("pp"))
    return found.item()


def _model(options: TrainOptions, precision: dict[str, bool]) -> tuple[nn.Module, Any]:
    """With the kernels of Transformer Engine where it is installed, else with Megatron's own."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    sizes = options.spec.sizes(options.small)
    layers = sizes["num_hidden_layers"]
    recomputed = round(options.checkpoint_ratio * layers / options.pp)
    recompute = (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": recomputed,
        }
        if recomputed
        else {}
    )
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        pipeline_dtype=DTYPES[options.dtype],
        params_dtype=DTYPES[options.dtype],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        **precision,
        **recompute,
    )
    has_te = getattr(gpt_layer_specs, "HAVE_TE", False)
    spec = "get_gpt_layer_with_transformer_engine_spec" if has_te else "get_gpt_layer_local_spec"
    vocabulary = -(-sizes["vocab_size"] // (128 * options.tp)) * 128 * options.tp
    model = GPTModel(
        config,
        getattr(gpt_layer_specs, spec)(),
        vocab_size=vocabulary,
        max_sequence_length=max(options.seq_len, sizes["max_position_embeddings"]),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    return model.cuda(), config


def _parts(batch: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    ids = batch["input_ids"]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
    for part, place in zip(ids.chunk(count), places.chunk(count), strict=True):
        yield {"ids": part, "places": place, "mask": mask[None, None]}


def _forward(data: Iterator[dict[str, Tensor]], model: nn.Module) -> Any:
    part = next(data)
    # Each token is asked for the next one; the last one has none, and does not count.
    labels = part["ids"].roll(-1, dims=1)
    losses = model(part["ids"], part["places"], part["mask"], labels=labels)
    return losses, _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = losses[:, :-1].float().mean()
    # A copy: the schedule divides the first one in place.
    return mean, {"loss": mean.detach().clone()}
