"""Seeds of 3-D parallel runs, and the tracker of random states."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import slapo
import slapo.random as slapo_random
from slapo.errors import SlapoError
from slapo.random import RNGTracker, get_rng_tracker, set_random_seed
from tests.check.verdicts import fake_world


@pytest.fixture(autouse=True)
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts in a process that has set no seed."""
    monkeypatch.setattr(slapo_random, "_is_seed_set", False)
    get_rng_tracker().reset()
    yield
    get_rng_tracker().reset()


def draws(**ranks: int | bool) -> tuple[float, float]:
    """A number from the default state and one from the tensor-parallel one."""
    set_random_seed(5, **ranks)  # type: ignore[arg-type]
    with get_rng_tracker().fork():
        inside = torch.rand(()).item()
    return torch.rand(()).item(), inside


@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        ({}, 2013),
        ({"dp_rank": 3}, 2043),
        ({"pp_rank": 2}, 2213),
        ({"tp_rank": 4}, 2013),
        ({"dp_rank": 1, "pp_rank": 1, "tp_rank": 1}, 2123),
    ],
)
def test_the_seed_moves_with_stage_and_data_parallel_rank(ranks: dict[str, int], seed: int) -> None:
    assert not slapo_random.is_random_seed_set()
    set_random_seed(**ranks)
    assert slapo_random.is_random_seed_set()
    assert torch.initial_seed() == seed
    drawn = random.random(), torch.rand(2)
    random.seed(seed)
    torch.manual_seed(seed)
    assert drawn[0] == random.random()
    assert torch.equal(drawn[1], torch.rand(2))


def test_numpy_is_seeded_too() -> None:
    numpy = pytest.importorskip("numpy")
    for seed in (7, -1):
        set_random_seed(seed)
        first = numpy.random.rand()
        set_random_seed(seed)
        assert first == numpy.random.rand()


def test_tensor_parallel_ranks_share_only_the_default_state() -> None:
    outside, inside = zip(*(draws(tp_rank=rank) for rank in range(16)), strict=True)
    assert len(set(outside)) == 1
    assert len({*inside, *outside}) == 17


def test_no_two_ranks_of_a_3d_run_meet() -> None:
    inside = {
        draws(tp_rank=tp, dp_rank=dp, pp_rank=pp)[1]
        for tp in range(12)
        for dp in range(3)
        for pp in range(3)
    }
    assert len(inside) == 12 * 3 * 3


def test_default_state_can_be_tensor_parallel_too() -> None:
    both = [draws(tp_rank=rank, always_enable_tp_seed=True) for rank in range(4)]
    assert len({number for pair in both for number in pair}) == 8
    assert draws(tp_rank=1)[1] == both[1][1]


def test_fork_restores_when_the_body_raises() -> None:
    set_random_seed(5)
    before = torch.get_rng_state()
    drawn = []

    def body() -> None:
        with get_rng_tracker().fork():
            drawn.append(torch.rand(2))
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            body()
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*drawn)


def test_nested_forks_draw_each_number_once() -> None:
    expected = {}
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        expected[name] = torch.rand(4)
    torch.manual_seed(9)
    outside = torch.rand(2)

    tracker = RNGTracker()
    tracker.add("a", 0)
    tracker.add("b", 1)
    torch.manual_seed(9)
    drawn: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "out": [torch.rand(1)]}
    with tracker.fork("a"):
        drawn["a"].append(torch.rand(1))
        with tracker.fork("b"):
            drawn["b"].append(torch.rand(2))
            with tracker.fork("a"):
                drawn["a"].append(torch.rand(1))
            drawn["b"].append(torch.rand(2))
        with tracker.fork("a"):
            drawn["a"].append(torch.rand(1))
        drawn["a"].append(torch.rand(1))
    drawn["out"].append(torch.rand(1))
    for name, parts in drawn.items():
        assert torch.equal(torch.cat(parts), expected.get(name, outside)), name


def test_states_travel_as_copies() -> None:
    set_random_seed(5)
    tracker = get_rng_tracker()
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(saved)
    saved[slapo_random.TENSOR_PARALLEL]["cpu"].zero_()
    for state in tracker.get_states().values():
        state["cpu"].zero_()
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)


def test_states_can_be_taken_and_put_back_inside_a_fork() -> None:
    set_random_seed(5)
    tracker = get_rng_tracker()
    with tracker.fork():
        torch.rand(3)
        saved = tracker.get_states()
        first = torch.rand(3)
        tracker.set_states(saved)
        assert torch.equal(torch.rand(3), first)
        with pytest.raises(SlapoError, match="call set_states\\(\\) after the block"):
            tracker.set_states({})
        with pytest.raises(SlapoError, match="set_random_seed\\(\\) after the block"):
            set_random_seed()


def test_the_tracker_holds_real_states_under_a_fake_tensor_mode() -> None:
    set_random_seed(5)
    tracker = get_rng_tracker()
    with FakeTensorMode():
        with tracker.fork():
            torch.rand(2)
        tracker.set_states(tracker.get_states())
    with tracker.fork():
        assert 0 <= torch.rand(()).item() < 1


def test_names_and_seeds_are_free_after_a_reset() -> None:
    tracker = RNGTracker()
    for _ in range(2):
        tracker.reset()
        tracker.add("a", 1)


@pytest.mark.gpu
def test_the_accelerator_has_a_state_of_its_own() -> None:
    device = torch.accelerator.current_accelerator()
    set_random_seed(5)
    outside = torch.rand(4, device=device)
    with get_rng_tracker().fork():
        inside = torch.rand(4, device=device)
    set_random_seed(5)
    with get_rng_tracker().fork():
        assert torch.equal(torch.rand(4, device=device), inside)
    assert torch.equal(torch.rand(4, device=device), outside)
    assert not torch.equal(inside, outside)


def test_seeds_of_a_mesh_never_meet() -> None:
    """From ten replicas on, the published distances make two ranks draw alike."""
    seeds = set()
    for rank in range(72):
        with fake_world(72, rank):
            set_random_seed(5, mesh=slapo.init_mesh(pp=3, dp=24, device="cpu"))
        seeds.add(torch.initial_seed())
    assert len(seeds) == 72
