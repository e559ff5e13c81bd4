"""Random state of runs that combine pipeline, data and tensor parallelism.

Ranks of one tensor-parallel group compute the same values outside of sharded regions. There their
default random state must be equal (dropout on a replicated activation). Inside sharded regions it
must differ (dropout on a shard). The tracker keeps the second state:

>>> import torch, slapo.random
>>> slapo.random.set_random_seed(1, tp_rank=0)
>>> with slapo.random.get_rng_tracker().fork():
...     inside = torch.rand(2)
>>> torch.equal(inside, torch.rand(2))
False
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from slapo.errors import SlapoError

# Name of the state that `set_random_seed` adds to the tracker.
TENSOR_PARALLEL = "model-parallel-rng"

# Far above the seed offsets of pipeline and data-parallel ranks, so that no two seeds collide.
_TENSOR_PARALLEL_STRIDE = 1_000_003

# Device type -> state of its generator, for the CPU and the current accelerator.
RNGState = dict[str, Tensor]


class RNGTracker:
    """Named random states beside torch's default one.

    Each covers the generators of the CPU and of the current accelerator, if there is one.

    Examples
    --------
    >>> tracker = RNGTracker()
    >>> tracker.add("augment", seed=7)
    >>> with tracker.fork("augment"):
    ...     first = torch.rand(1)
    >>> with tracker.fork("augment"):
    ...     second = torch.rand(1)
    >>> torch.equal(first, second)
    False
    """

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}
        self._seeds: set[int] = set()
        # The state in use; None is the default one.
        self._current: str | None = None
        self._default: RNGState = {}

    def add(self, name: str, seed: int) -> None:
        """Create a state.

        Parameters
        ----------
        name : str
            A new name.
        seed : int
            A seed that no other state of this tracker started with.

        Raises
        ------
        ValueError
            If the name or the seed is taken.

        Examples
        --------
        >>> RNGTracker().add("dropout", seed=3)
        """
        if name in self._states:
            raise ValueError(
                f"the tracker already has a random state {name!r}, among "
                f"{sorted(self._states)}; pick another name, or call reset() first"
            )
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} for {name!r} already belongs to another random state, which would "
                f"draw the same numbers; pick a seed other than {sorted(self._seeds)}"
            )
        self._states[name] = _seeded(seed, _device_types())
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Draw random numbers from a state of this tracker inside the block.

        Afterwards, even if the block raises, the outer state is as before, and the next fork
        continues where this one stopped. Forks nest; a fork of the state in use changes nothing.

        Parameters
        ----------
        name : str
            The state; the tensor-parallel one by default.

        Raises
        ------
        SlapoError
            If there is no such state.

        Examples
        --------
        >>> tracker = RNGTracker()
        >>> tracker.add("dropout", seed=3)
        >>> with tracker.fork("dropout"):
        ...     mask = torch.rand(2, 3) < 0.1
        """
        if name not in self._states:
            raise SlapoError(
                f"the tracker has no random state {name!r}, only {sorted(self._states)}; "
                f"call slapo.set_random_seed() before the model runs, "
                f"or create the state with add({name!r}, seed)"
            )
        outside = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outside)

    @property
    def is_forked(self) -> bool:
        """True while a block runs under a state of this tracker.

        Examples
        --------
        >>> RNGTracker().is_forked
        False
        """
        return self._current is not None

    def get_states(self) -> dict[str, RNGState]:
        """Return a copy of all states, by name.

        Examples
        --------
        >>> tracker = RNGTracker()
        >>> tracker.add("dropout", seed=3)
        >>> list(tracker.get_states())
        ['dropout']
        """
        if self._current is not None:
            self._states[self._current] = _capture()
        return _copy(self._states)

    def set_states(self, states: Mapping[str, RNGState]) -> None:
        """Replace all states by copies of ``states``.

        Parameters
        ----------
        states : Mapping
            States returned by :meth:`get_states`.

        Raises
        ------
        SlapoError
            If a block is running under a state that ``states`` lacks.

        Examples
        --------
        >>> tracker = RNGTracker()
        >>> tracker.add("dropout", seed=3)
        >>> saved = tracker.get_states()
        >>> with tracker.fork("dropout"):
        ...     first = torch.rand(1)
        >>> tracker.set_states(saved)
        >>> with tracker.fork("dropout"):
        ...     torch.equal(first, torch.rand(1))
        True
        """
        if self._current is not None:
            if self._current not in states:
                raise SlapoError(
                    f"a block is running under the random state {self._current!r}, and the new "
                    f"states {sorted(states)} lack it; call set_states() after the block"
                )
            # The state in use is in torch's generators, and not in the table.
            _restore(states[self._current])
        self._states = _copy(states)

    def reset(self) -> None:
        """Delete all states.

        Raises
        ------
        SlapoError
            If a block is running under one of them.

        Examples
        --------
        >>> tracker = RNGTracker()
        >>> tracker.add("dropout", seed=3)
        >>> tracker.reset()
        >>> tracker.get_states()
        {}
        """
        if self._current is not None:
            raise SlapoError(
                f"a block is running under the random state {self._current!r}; "
                f"call reset() or set_random_seed() after the block"
            )
        self._states = {}
        self._seeds = set()

    def _switch(self, name: str | None) -> None:
        """Save the live state under its own name, and make ``name`` the live one."""
        # torch has one generator for each device, so states are swapped in and out of it.
        live = _capture()
        if self._current is None:
            self._default = live
        else:
            self._states[self._current] = live
        _restore(self._default if name is None else self._states[name])
        self._current = name


_tracker = RNGTracker()
_is_seed_set = False


def get_rng_tracker() -> RNGTracker:
    """Return the tracker of this process.

    Returns
    -------
    RNGTracker

    Examples
    --------
    >>> get_rng_tracker() is get_rng_tracker()
    True
    """
    return _tracker


# Name in earlier releases, which tracked CUDA only.
get_cuda_rng_tracker = get_rng_tracker


def is_random_seed_set() -> bool:
    """Return whether :func:`set_random_seed` has been called in this process.

    Returns
    -------
    bool

    Examples
    --------
    >>> set_random_seed(1)
    >>> is_random_seed_set()
    True
    """
    return _is_seed_set


def set_random_seed(
    seed: int = 2013,
    dp_rank: int | None = None,
    pp_rank: int | None = None,
    tp_rank: int | None = None,
    always_enable_tp_seed: bool = False,
    mesh: DeviceMesh | None = None,
) -> None:
    """Seed Python, NumPy and torch, and initialize the tracker's tensor-parallel state.

    The seed is offset by 100 per pipeline stage and by 10 per data-parallel rank. It is the same
    on all ranks of a tensor-parallel group. From ten replicas on, seeds of two stages would
    collide: with `mesh`, the offset per stage is then larger.

    Parameters
    ----------
    seed : int
        The seed of the run.
    dp_rank, pp_rank, tp_rank : int, optional
        Ranks in the data-, pipeline- and tensor-parallel group. None is 0, or for `tp_rank` the
        rank in the job. Blocks under :meth:`~RNGTracker.fork` draw different numbers on each
        tensor-parallel rank.
    always_enable_tp_seed : bool
        Make torch's default state differ between tensor-parallel ranks too. Python and NumPy, which
        select data, stay equal on them.
    mesh : DeviceMesh, optional
        From :func:`slapo.init_mesh`, instead of the three ranks.

    Raises
    ------
    ValueError
        If a rank is negative, or ranks are given in addition to a mesh.
    TypeError
        If the seed is not an integer.
    SlapoError
        If called inside a block of the tracker's :meth:`~RNGTracker.fork`.

    Examples
    --------
    >>> set_random_seed(2013, dp_rank=1, pp_rank=2)
    >>> torch.initial_seed()
    2223
    """
    global _is_seed_set
    given = {"pp_rank": pp_rank, "dp_rank": dp_rank, "tp_rank": tp_rank}
    stage_distance = 100
    if mesh is not None:
        beside = [name for name, rank in given.items() if rank is not None]
        if beside:
            raise ValueError(f"set_random_seed: mesh already gives the ranks; leave out {beside}")
        names = mesh.mesh_dim_names or ()
        given = {
            f"{dim}_rank": mesh.get_local_rank(dim) if dim in names else 0
            for dim in ("pp", "dp", "tp")
        }
        if "dp" in names:
            stage_distance = max(stage_distance, 10 * mesh["dp"].size())
    elif tp_rank is None and dist.is_available() and dist.is_initialized():
        given["tp_rank"] = dist.get_rank()
    if not hasattr(seed, "__index__"):  # accepts NumPy integers
        raise TypeError(f"set_random_seed: seed is {seed!r}; pass an integer")
    pp, dp, tp = (_check_rank(name, rank) for name, rank in given.items())
    _tracker.reset()
    shared_seed = seed + stage_distance * pp + 10 * dp
    random.seed(shared_seed)
    _seed_numpy(shared_seed)
    # Each tensor-parallel rank has two seeds: odd multiples for the tracker's state, even ones for
    # the default state.
    own_seed = _tensor_parallel_seed(shared_seed, tp)
    torch.manual_seed(own_seed + _TENSOR_PARALLEL_STRIDE if always_enable_tp_seed else shared_seed)
    _tracker.add(TENSOR_PARALLEL, own_seed)
    _is_seed_set = True


@contextmanager
def states_kept(tp_rank: int, seed: int = 2013) -> Iterator[None]:
    """Restore Python's, torch's and the tracker's states after the block.

    An unseeded tracker gets a seed inside it.
    """
    of_python = random.getstate()
    with torch.random.fork_rng(), tracker_kept(tp_rank, seed):
        try:
            yield
        finally:
            random.setstate(of_python)


@contextmanager
def tracker_kept(tp_rank: int = 0, seed: int = 2013) -> Iterator[None]:
    """Restore the tracker's states after the block; an unseeded tracker gets a seed inside it."""
    states = _tracker.get_states()
    if not states:
        _tracker.set_states({TENSOR_PARALLEL: _seeded(seed + tp_rank, _started_devices())})
    try:
        yield
    finally:
        if states:
            _tracker.set_states(states)
        else:
            _tracker.reset()


def all_states() -> dict[str, Any]:
    """Return the present states of Python, NumPy, torch and the tracker."""
    states = {"python": random.getstate(), "torch": _capture(), "tracker": _tracker.get_states()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def set_all_states(states: Mapping[str, Any]) -> None:
    """Restore states of :func:`all_states`, as far as this process has such generators."""
    random.setstate(states["python"])
    here = _device_types()
    _restore({device: state for device, state in states["torch"].items() if device in here})
    _tracker.set_states(states["tracker"])
    if "numpy" in states:
        import numpy  # it was imported where the states were taken

        numpy.random.set_state(states["numpy"])


def _check_rank(name: str, rank: int | None) -> int:
    if rank is not None and rank < 0:
        raise ValueError(
            f"set_random_seed: {name} is {rank}; pass 0 or more, or None outside of a group"
        )
    return rank or 0


def _tensor_parallel_seed(seed: int, rank: int) -> int:
    return seed + (2 * rank + 1) * _TENSOR_PARALLEL_STRIDE


def _seed_numpy(seed: int) -> None:
    """Seed NumPy if it is installed; torch runs without it."""
    try:
        import numpy
    except ImportError:
        return
    # NumPy takes 32 bits.
    numpy.random.seed(seed % 2**32)


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _started_devices() -> list[str]:
    """Device types that this process already uses: reading the state of another would start it."""
    types = _device_types()
    return [t for t in types if t == "cpu" or torch.get_device_module(t).is_initialized()]


def _seeded(seed: int, devices: list[str]) -> RNGState:
    return {device: torch.Generator(device).manual_seed(seed).get_state() for device in devices}


def _generators(device: str) -> ModuleType:
    """Module that reads and writes the default generator of ``device``."""
    return torch.random if device == "cpu" else torch.get_device_module(device)


def _capture() -> RNGState:
    return {device: _generators(device).get_rng_state() for device in _device_types()}


def _restore(state: RNGState) -> None:
    for device, generator_state in state.items():
        _generators(device).set_rng_state(generator_state)


def _copy(states: Mapping[str, RNGState]) -> dict[str, RNGState]:
    return {
        name: {device: _copy_tensor(device, tensor) for device, tensor in state.items()}
        if isinstance(state, Mapping)
        else state  # a script may keep something else there
        for name, state in states.items()
    }


def _copy_tensor(device: str, state: Tensor) -> Tensor:
    """Copy through a generator: under a fake tensor mode a clone would have no data."""
    return torch.Generator(device).set_state(state).get_state()


# --- names of the published Slapo ------------------------------------------------------------
CudaRNGStatesTracker = RNGTracker
_CUDA_RNG_STATE_TRACKER = _tracker


def model_parallel_cuda_manual_seed(
    seed: int, tp_rank: int, always_enable_tp_seed: bool = False
) -> int:
    """Seed a tensor-parallel rank; see :func:`set_random_seed`.

    Returns
    -------
    int
        The seed of the tracker's state.

    Examples
    --------
    >>> model_parallel_cuda_manual_seed(3, tp_rank=1)
    3000012
    """
    set_random_seed(seed, tp_rank=tp_rank, always_enable_tp_seed=always_enable_tp_seed)
    return _tensor_parallel_seed(seed, tp_rank)
