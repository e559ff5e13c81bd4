"""Resuming from a checkpoint: each rank reads its shards once all ranks have checked it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo.agreement import (
    all_ranks_or_none,
    gathered,
    has_peers,
    is_on_every_rank,
    on_every_rank,
    same_on_all_ranks,
)
from slapo.errors import SlapoError
from slapo.logger import get_logger
from slapo.random import is_random_seed_set, set_all_states, set_random_seed
from slapo.saving.nests import decode
from slapo.saving.save import described
from slapo.saving.state import (
    Room,
    Trainer,
    by_cell,
    class_of,
    groups_of,
    make_room,
    merged_groups,
    names_of,
    original,
    room_for,
)
from slapo.saving.steps import Manifest, Step, find
from slapo.weights.files import progress_bar
from slapo.weights.holdings import Held, check_origins

logger = get_logger("slapo")

_WHAT = "engine.load"

#: Config entries that do not change the model's computation.
_NOT_COMPARED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


class HalfLoadedError(SlapoError):
    """Raised if loading failed after values had changed."""


@dataclass(frozen=True)
class Resumed:
    """Outcome of loading a step.

    Attributes
    ----------
    step : int
        The step after which training continues.
    samples : int
        Samples that all replicas have trained on.
    notes : tuple of str
        Differences from the saving job, such as random states of another layout.
    """

    step: int
    samples: int
    notes: tuple[str, ...] = ()


def load(engine: Trainer, run_or_step: Any, data: Any, only: str | None) -> Resumed:
    """See :meth:`slapo.framework_dialect.Engine.load`."""
    if only not in (None, "weights"):
        raise ValueError(f'only is {only!r}; pass "weights", or None for all')
    began, path = time.monotonic(), Path(run_or_step).absolute()
    same_on_all_ranks(_WHAT, {"path": str(path), "only": only, "data": data is not None})
    folder = all_ranks_or_none(_WHAT, lambda: find(path))
    remedy = "all ranks must see the same folder"
    same_on_all_ranks("the last complete step", str(folder), remedy=remedy)
    step = all_ranks_or_none(_WHAT, lambda: Step(folder))
    try:
        loading = _Loading(engine, step, data, only == "weights")
        all_ranks_or_none(_WHAT, loading.check)
        if not loading.only_weights:
            # On its own, since it has collectives inside.
            loading.check_groups()
        all_ranks_or_none(_WHAT, loading.compare_checksums)
        # Runs user code, so it comes before any change.
        all_ranks_or_none(_WHAT, loading.give_data)
        try:
            all_ranks_or_none(_WHAT, loading.fill)
        except Exception as error:
            half = HalfLoadedError(f"{_WHAT} failed midway: {error}")
            raise on_every_rank(half) if is_on_every_rank(error) else half from error
    finally:
        step.close()
    manifest = step.manifest
    logger.info("resumed %s in %.1f s", folder, time.monotonic() - began)
    return Resumed(manifest.step, manifest.samples, tuple(loading.notes))


@dataclass
class _Loading:
    engine: Trainer
    step: Step
    data: Any
    only_weights: bool
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank() if has_peers() else 0
        self.ranks = dist.get_world_size() if has_peers() else 1
        self.place = [self.engine.mesh.get_local_rank(dim) for dim in ("pp", "dp", "tp")]
        self.manifest: Manifest = self.step.manifest
        places = gathered(self.place, None)
        self.is_same_layout = places == self.manifest.places
        self.rooms: dict[int, Room] = {}

    # --- before anything changes -----------------------------------------------------------------
    def check(self) -> None:
        """Refuse a checkpoint of another model, optimizer or kind of data."""
        held = self.engine.held()
        check_origins(_WHAT, held)
        self._check_model(held)
        if not self.only_weights:
            self._check_optimizer()
            self._check_data()

    def _check_model(self, held: list[Held]) -> None:
        saved, here = self.manifest.model, described(self.engine)
        if saved["class"] != here["class"]:
            raise SlapoError(
                f"{self.step.folder} holds a {saved['class']}, but this model is a "
                f"{here['class']}; pass the run of this model"
            )
        shapes = original(self.engine).tensors
        values = self.manifest.tensors.get("", {})
        wrong = []
        for name in sorted({name for item in held for name in names_of(item)}):
            shape = list(shapes[name][0])
            if name not in values:
                wrong.append(f"{name} is not in it")
            elif values[name].shape != shape:
                wrong.append(f"{name} is {tuple(values[name].shape)} there, {tuple(shape)} here")
        if wrong:
            more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise SlapoError(f"{self.step.folder} holds another model: {wrong[:5]}{more}")
        changed = sorted(_differences(saved["config"] or {}, here["config"] or {}))
        if changed and not self.only_weights:
            raise SlapoError(
                f"{self.step.folder} holds a model with another config: "
                f'{"; ".join(changed[:5])}; use the same, or pass only="weights"'
            )
        self.notes += [f"config: {each}" for each in changed]
        # Only a note: tensors are saved under original names, whatever schedule split or fused
        # them.
        if saved["schedule"] != here["schedule"]:
            count = len(saved["schedule"]), len(here["schedule"])
            self.notes.append(
                f"another schedule: {count[0]} primitives when it was saved, {count[1]} now"
            )

    def _check_optimizer(self) -> None:
        manifest, odd = self.manifest, self.manifest.odd
        is_same = self.is_same_layout and manifest.engine == self.engine.kind
        if odd and not (is_same and manifest.model == described(self.engine)):
            raise SlapoError(
                f"{self.step.folder}: {manifest.optimizer} keeps {odd}, which differ from the "
                "parameters in shape and cannot be resharded; resume with the schedule and "
                f"layout that saved them, {manifest.layout} ({manifest.engine}), or pass "
                'only="weights"'
            )
        if (self.engine.scheduler is None) != (self.manifest.scheduler is None):
            had = "no scheduler" if self.manifest.scheduler is None else "a scheduler"
            self.notes.append(f"lr_scheduler: the step was saved with {had}")
        for key, inside in by_cell(self.engine).items():
            self.rooms[key] = room_for(inside, self.manifest)

    def _check_data(self) -> None:
        data, manifest = self.data, self.manifest
        if data is None:
            if manifest.has_data:
                self.notes.append("data: its state was saved, but no data= was given")
            return
        replicas, now = len({place[1] for place in manifest.places}), self.engine.mesh.shape[1]
        is_exact = manifest.has_data and replicas == now
        self._method = "load_state_dict" if is_exact else "seek"
        if callable(getattr(data, self._method, None)):
            return
        why = "its state"
        if not is_exact:
            why = f"the number of samples seen by {replicas} replicas, which are {now} now"
        if not manifest.has_data:
            why = "the number of samples seen, since none of its state was saved"
        raise SlapoError(
            f"{_WHAT}: data is a {type(data).__name__} without {self._method}(), which must take "
            f"{why}; add it, or leave out data= and skip {manifest.samples} samples"
        )

    def check_groups(self) -> None:
        """Refuse different parameter groups; find the options of the local ones. A collective."""
        cells = by_cell(self.engine)
        with self.engine.steppers() as steppers:
            here = class_of(steppers)
            self._groups = [groups_of(each, cells) for each in steppers]
        mine = here, [group for each in self._groups for group in each]
        everyone = gathered(mine, None)
        # A stage that trains nothing may have none.
        found = next((name for name, _ in everyone if name is not None), None)
        every = [group for _, groups in everyone for group in groups]
        all_ranks_or_none(_WHAT, lambda: self._check_groups(found, every))

    def _check_groups(self, found: str | None, every: list[dict[str, Any]]) -> None:
        if found != self.manifest.optimizer:
            had, has = (name or "no optimizer" for name in (self.manifest.optimizer, found))
            raise SlapoError(
                f"{self.step.folder} was saved with {had}, but this engine has {has}; pass the "
                'same, or only="weights"'
            )
        here = {name for group in every for name in group["names"]}
        there = {name for group in self.manifest.groups for name in group["names"]}
        if here != there:
            only_here, only_there = sorted(here - there), sorted(there - here)
            raise SlapoError(
                f"{self.step.folder}: the optimizer had other parameters: {only_there[:3]} when "
                f'saved, {only_here[:3]} now; build it with the same, or pass only="weights"'
            )
        # Groups are matched by the names in them: their order and number depend on stages and
        # ranks.
        number_of = {n: k for k, g in enumerate(self.manifest.groups) for n in g["names"]}
        for group in merged_groups(every):
            first = group["names"][0]
            other = next((n for n in group["names"] if number_of[n] != number_of[first]), None)
            if other is not None:
                raise SlapoError(
                    f"{self.step.folder}: {first!r} and {other!r} were in parameter groups with "
                    "different options, but are in one now; make the same groups, or pass "
                    'only="weights"'
                )
        saved = self.manifest.groups
        self._options = [
            [saved[number_of[g["names"][0]]]["options"] if g["names"] else {} for g in each]
            for each in self._groups
        ]

    def compare_checksums(self) -> None:
        """Check that all files are as written; the ranks divide them."""
        # By the files of the ranks that saved: there may be more or fewer than ranks now.
        for rank in range(self.rank, self.step.world, self.ranks):
            self.step.checked(rank)

    # --- now -------------------------------------------------------------------------------------
    def give_data(self) -> None:
        """Restore the state or the position of the data."""
        if self.data is None or self.only_weights:
            return
        if self._method == "load_state_dict":
            # The ranks of a replica read one batch; the first along pp and tp stands for them.
            places = self.manifest.places
            rank = next(k for k, place in enumerate(places) if place == [0, self.place[1], 0])
            self.data.load_state_dict(self.step.own(rank)["data"])
        else:
            self.data.seek(self.manifest.samples)

    @torch.no_grad()
    def fill(self) -> None:
        """Read all values and state into place."""
        cells, bar = self.engine.cells(), progress_bar(_WHAT)
        for item in self.engine.held():
            kept = cells.get(id(item.tensor), [item])
            # fragments() yields cells. Where these are float32 copies, the model's own tensor is
            # read here.
            if self.only_weights or all(cell.tensor is not item.tensor for cell in kept):
                self._read(bar, [("", item)])
        if self.only_weights:
            self._read(bar, (("", cell) for kept in cells.values() for cell in kept))
            bar.close()
            return
        own = self.step.own(self.rank) if self.is_same_layout else None
        self._make_room({} if own is None else own["odd"])
        self._read(bar, self.engine.fragments())
        bar.close()
        self._set_progress(own)

    def _read(self, bar: Any, fragments: Iterable[tuple[str, Held]]) -> None:
        for slot, held in fragments:
            there = self.manifest.tensors.get(slot, {})
            for piece, values in held.pieces():
                # The optimizer has no state for parameters that it has not stepped on yet.
                if str(piece.leaf) in there:
                    values.copy_(self.step.read((slot, str(piece.leaf)), piece.source))
                    bar.update(values.nbytes)

    def _make_room(self, odd: Mapping[str, Mapping[str, Any]]) -> None:
        names = {key: inside[0].name for key, inside in by_cell(self.engine).items()}
        special = {
            key: {slot: kept[name] for slot, kept in odd.items() if name in kept}
            for key, name in names.items()
        }
        kinds = {slot: kept["dtype"] for slot, kept in self.manifest.numbers.items()}
        with self.engine.steppers() as steppers:
            for optimizer, options in zip(steppers, self._options, strict=True):
                make_room(optimizer, self.rooms, options, special, kinds)
        self.engine.slots_changed()

    def _set_progress(self, own: Any) -> None:
        engine, manifest = self.engine, self.manifest
        if engine.scheduler is not None and manifest.scheduler is not None:
            engine.scheduler.load_state_dict(decode(manifest.scheduler, []))
        if engine.loss_scale is not None and manifest.loss_scale is not None:
            scale, steps = manifest.loss_scale
            engine.set_loss_scale(float(scale), int(steps))
        engine.step_count = manifest.step
        replicas = engine.mesh.shape[1]
        # The remainder is spread, so that the next save sums to the same number.
        share, rest = divmod(manifest.samples, replicas)
        engine.samples = share + (self.place[1] < rest)
        if own is not None:
            set_all_states(own["random"])
            return
        seed = (manifest.seed + manifest.step) % 2**31
        if is_random_seed_set():
            set_random_seed(seed, mesh=engine.mesh)
        else:
            torch.manual_seed(seed)
        self.notes.append(
            f"random states belong to another layout, {manifest.layout}; reseeded from the seed "
            "and the step"
        )


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name in {**saved, **here}:
        if name.startswith("_") or name in _NOT_COMPARED:
            continue
        if saved.get(name) != here.get(name):
            yield f"{name} was {saved.get(name)!r} and is {here.get(name)!r}"
