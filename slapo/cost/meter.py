"""Dispatch mode that counts live bytes, FLOPs, memory traffic and collectives of a run."""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from slapo.op.dispatch import only_counted

aten = torch.ops.aten

#: Views and uninitialized tensors, which cost neither time nor traffic.
_FREE_NAMES = (
    "view _unsafe_view reshape t transpose permute expand split split_with_sizes slice select "
    "unsqueeze squeeze detach alias unbind as_strided lift_fresh empty empty_like new_empty "
    "empty_strided view_as unfold diagonal movedim narrow chunk set_ resize_ "
    "_local_scalar_dense is_same_size"
)
_FREE = frozenset(_FREE_NAMES.split())


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Keys and values may have fewer heads, which older formulas of torch refuse.
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    # The scores once more; gradients of scores, queries, keys and values.
    widths = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * query.shape[:-1].numel() * key.shape[-2] * widths


def _grouped_shape(
    left: Tensor, right: Tensor, offs: Any = None, *_: Any, **__: Any
) -> tuple[int, ...]:
    """Return the shape of a grouped product; groups of rows or columns end at `offs`."""
    if left.dim() == 2 and right.dim() == 2:
        return len(offs), left.shape[0], right.shape[1]
    if left.dim() == 3 and right.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2]
    if left.dim() == 3:
        return left.shape[1], right.shape[1]
    return left.shape[0], right.shape[2]


def _grouped(*args: Any, **kwargs: Any) -> int:
    left, shape = args[0], _grouped_shape(*args, **kwargs)
    # Groups of columns: each product uses one group's columns only.
    shares = shape[0] if len(shape) == 3 and left.dim() == 2 else 1
    return int(2 * math.prod(shape) * left.shape[-1] // shares)


#: FLOP formulas that torch's own table lacks.
_FORMULAS: dict[str, Callable[..., int]] = {"_grouped_mm": _grouped}
for _kernel_name in (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
):
    _FORMULAS[_kernel_name] = _attention
    _FORMULAS[f"{_kernel_name}_backward"] = _attention_backward


#: Collective of c10d, or functional one -> its name in :attr:`.machine.Machine.links`.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


def collective_name(operation: str) -> str:
    """Return the name of a collective, the same for both names that torch has for it."""
    plain = operation.strip("_")
    return _COLLECTIVES.get(plain, plain)


@dataclass(frozen=True)
class Kernel:
    """A kernel, with the figures that determine its time."""

    name: str
    #: FLOPs of its matrix products; 0 for other kernels.
    flops: int
    #: Bytes read and written; broadcast dimensions count once.
    moved: int
    #: Elements of the largest tensor that it reads or writes.
    elements: int
    dtype: torch.dtype
    #: Number of matrices that it multiplies.
    products: int = 1


@dataclass(frozen=True)
class Collective:
    """A collective or a message, with the bytes of the full tensor and the number of ranks."""

    name: str
    size: int
    ranks: int


class Meter(TorchDispatchMode):
    """Dispatch mode that counts costs on fake, meta and real tensors.

    A tensor lives from the operator that creates it until its storage is released. The count
    matches an allocator without rounding or cache.

    Parameters
    ----------
    *modules
        Modules whose parameters and buffers are alive from the start.
    rounding
        Bytes that each storage takes a multiple of: 512 on CUDA.
    kernels
        True records kernels in addition to memory.
    fakes
        True counts fake tensors; by default they take no memory, as when an engine infers shapes.

    Examples
    --------
    >>> layer = nn.Linear(4, 4, bias=False)
    >>> with Meter(layer) as meter:
    ...     y = layer(torch.ones(2, 4))
    >>> meter.alive, meter.peak  # the weight; the input; the output
    (128, 128)
    >>> [kernel.flops for kernel in meter.kernels if kernel.flops]
    [64]
    """

    def __init__(
        self, *modules: nn.Module, rounding: int = 1, kernels: bool = True, fakes: bool = False
    ) -> None:
        super().__init__()
        self.rounding, self.alive, self.peak = rounding, 0, 0
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []
        #: Storage key -> name of the tensors of :meth:`watch`, and the names of those used.
        self.watched: dict[int, str] = {}
        self.touched: set[str] = set()
        #: Bytes of the gradients of :meth:`made`, and the peak without them. A later micro-batch
        #: adds its gradients to these, and then frees its own.
        self.gradients, self.later_peak = 0, 0
        #: Called once, before the next operator.
        self.before_next: Callable[[], None] | None = None
        self._notes_kernels, self._fakes = kernels, fakes
        self._sizes: dict[int, tuple[int, Any]] = {}
        self._made: set[int] = set()
        for module in modules:
            self.hold([*module.parameters(), *module.buffers()])

    def __enter__(self) -> Meter:
        """Start counting; kernels of ``slapo.op`` run as they would without the meter."""
        self._plain = only_counted(FakeTensor)
        self._plain.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._plain.__exit__(*error)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count already existing tensors as alive."""
        for tensor in tensors:
            self._hold(tensor)

    def watch(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Record in :attr:`touched` which of these tensors an operator reads or writes."""
        for name, tensor in named:
            # By the storage object: the data pointer of a fake tensor is 0.
            self.watched.setdefault(tensor.untyped_storage()._cdata, name)

    def made(self, gradient: Tensor) -> bool:
        """Record a gradient that stays; return True if it is new and not sparse."""
        if gradient.layout is not torch.strided:
            return False
        key = gradient.untyped_storage()._cdata
        if key in self._made:
            return False
        self._made.add(key)
        self.gradients += self._sizes.get(key, (0, None))[0]
        return True

    def _hold(self, tensor: Tensor) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # the shard of a DTensor
        is_held = self._fakes if isinstance(tensor, FakeTensor) else not tensor.is_meta
        if tensor.layout is not torch.strided or not is_held:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        # Python's storage object lives as long as the storage itself, also if only autograd holds
        # the tensor.
        self._sizes[key] = size, weakref.ref(storage, lambda _: self._release(key))
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self.later_peak = max(self.later_peak, self.alive - self.gradients)

    def _release(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, (0, None))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_distributed, types)):
            return NotImplemented  # its operators on local tensors are dispatched here next
        # the most frequent call: fake tensors read their device this way
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        if self.before_next is not None:
            self.before_next()
        is_question = func is aten._local_scalar_dense.default and args[0].dtype == torch.bool
        if is_question and isinstance(args[0], FakeTensor):
            # Models test masks for the absence of padding and of packed sequences.
            return getattr(args[0], _LIKELY, True)
        if func is aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            # Torch infers shapes of fake tensors as on CUDA only, in half precision.
            out = args[0].new_empty(_grouped_shape(*args, **kwargs))
        else:
            out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in made:
            self._hold(tensor)
        _guess(func, args, out)
        if self.watched or self._notes_kernels:
            self._note(func, args, kwargs, out, made)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func.overloadpacket.__name__
        is_free = func.namespace == "aten" and name in _FREE
        if self.watched and not is_free:
            keys = (t.untyped_storage()._cdata for t in read if t.layout is torch.strided)
            self.touched.update(self.watched[key] for key in keys if key in self.watched)
        if not self._notes_kernels:
            return
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(name, args, [*made, *read])
        elif func.namespace == "aten" and not is_free and (made or is_of_many(name)):
            self.kernels.append(_kernel(func, args, kwargs, out, made, read))

    def _note_collective(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        groups = [g for g in map(_group, tree_leaves(args)) if g is not None]
        if not tensors or name in ("wait_tensor", "barrier"):
            return
        named: list[Any] = [a for a in args if isinstance(a, str) and a.isdigit()]
        if not groups and named:
            groups = [dist.distributed_c10d._resolve_process_group(named[-1])]
        size = max(t.numel() * t.element_size() for t in tensors)
        ranks = groups[0].size() if groups else 1
        self.collectives.append(Collective(collective_name(name), size, ranks))


#: Attributes of fake tensors: the mean of one random value, and the likely value of a boolean.
_MIDDLE, _LIKELY = "_slapo_middle", "_slapo_likely"
_COMPARED = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def _guess(func: Any, args: Any, out: Any) -> None:
    """Mark single random values, since models compare one to decide whether to drop a layer."""
    name = func.overloadpacket.__name__
    if not isinstance(out, FakeTensor) or out.numel() != 1:
        return
    if name in ("rand", "rand_like", "uniform_"):
        setattr(out, _MIDDLE, 0.5)
    elif name in _COMPARED and hasattr(args[0], _MIDDLE) and isinstance(args[1], (int, float)):
        setattr(out, _LIKELY, _COMPARED[name](getattr(args[0], _MIDDLE), args[1]))


def is_of_many(name: str) -> bool:
    """Return whether an operator works on lists of tensors, as those of optimizers do."""
    return name.startswith(("_foreach", "_fused"))


def _is_distributed(kind: type) -> bool:
    """Return whether this is torch's DTensor, without importing it."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def _group(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return value if isinstance(value, dist.ProcessGroup) else None


def _kernel(
    func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor], read: list[Tensor]
) -> Kernel:
    packet = func.overloadpacket
    name = packet.__name__
    flops = 0
    if kwargs.get("approximate") == "tanh":
        name = name.replace("gelu", "gelu_tanh")
    if name in _FORMULAS:
        flops = _FORMULAS[name](*args, **kwargs)
    elif packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    tensors = [*read, *made]
    if name in ("embedding", "index", "gather", "index_select"):  # rows, not the full table
        tensors = [*made, *made]
    moved = sum(_bytes(t) for t in tensors)
    elements = max((t.numel() for t in tensors), default=0)
    dtype = made[0].dtype if made else torch.float32
    # Small matrices run at the speed of one of them, however many there are.
    products = read[0].shape[0] if name in ("bmm", "baddbmm") and read else 1
    return Kernel(name, flops, moved, elements, dtype, products)


def _bytes(tensor: Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
