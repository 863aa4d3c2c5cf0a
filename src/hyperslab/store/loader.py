"""The loader: every rank's boxes of every batch, ahead of time."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError, HyperslabError, check_choice
from hyperslab.io import Dataset
from hyperslab.io.engine.buffers import BufferPool
from hyperslab.io.schedule import Position, Schedule
from hyperslab.layout import Grid
from hyperslab.store.augment import augmentation_of
from hyperslab.store.batches import BatchReader, LocalBatch, ReaderThreads, find_not_finite
from hyperslab.store.budget import parse_nbytes
from hyperslab.store.memory import MemoryStore
from hyperslab.store.normalize import Normalize
from hyperslab.store.peers import Peers, SingleProcess, check_alike
from hyperslab.store.pipeline import Deliver, Pipeline, num_readers
from hyperslab.store.placement import Placement, assign_owners
from hyperslab.store.staging import shares_of_node, staged
from hyperslab.trace.loop import steps_of

if TYPE_CHECKING:
    import torch

    from hyperslab.comm.mesh import Mesh
    from hyperslab.store.deliver import SlabDelivery

_log = logging.getLogger("hyperslab")

STORES = ("memory", "none")
BAD_SAMPLES = ("stop", "skip")
TRANSPORTS = ("torch", "mpi")
_STATE_NUMBERS = ("epoch", "sample", "seed", "num_samples", "num_shares", "batch_size")


class Loader:
    """Batches of a dataset as Slabs, one epoch for every ``for`` over it.

    The order of samples depends on ``seed`` and the epoch alone, not on the mesh, and is known in
    advance, so the next ``prefetch`` batches are always on their way, over the end of an epoch too.
    A loop that is left early is followed by the next epoch.

    Making one is collective over the mesh, as is iterating: every rank takes the same steps.

    Args:
        dataset: From ``hyperslab.open``.
        mesh: From ``hyperslab.init``. None is one process.
        batch_size: Samples in one step, over all ranks; the last batch has what is left.
        shuffle: ``global`` draws a new order of all samples each epoch, ``local`` one within each
            rank's share, ``none`` keeps the order of the files.
        store: ``memory`` reads each sample once and serves it from the memory of the ranks from
            then on; ``none`` reads the files every time.
        prefetch: Batches made ahead of the step.
        seed: Of the order and of augmentation.
        drop_last: Leaves out a last batch that is short.
        normalize: ``log1p``, ``minmax`` or ``standard`` (by the files' own statistics), or a
            ``Normalize``; done on the device, for the sample alone.
        augment: ``flip`` mirrors samples at random, ``cube`` also permutes equal spatial extents;
            label maps go along.
        dtype: Of the sample; torch's default, if not given. Targets come as int64 if they are whole
            numbers, else as float32, or as float64 if the sample does.
        as_dict: Yields arrays by name, not as a tuple of the sample and its targets.
        bad_samples: ``stop`` raises on all ranks when one cannot read a sample; with ``skip`` all
            ranks leave it out, and ``skipped`` tells which and why; batches are then shorter.
        memory_budget: For the store, per rank, such as ``"20GiB"``; half of the node's free memory,
            shared by its ranks, if not given. What does not fit goes to local disk.
        spill_dir: Where that is; the system's folder for temporary files, if not given.
        preload: Fills the store before the first batch, with a progress bar.
        stage_dir: A folder on the node's own disk, to which its ranks copy what they read before
            the first batch.
        transport: Between nodes, ``torch`` messages or ``mpi`` (RMA, under mpirun or srun); inside
            a node ranks share memory.
        cuts: Bounds along some axes, as for ``hyperslab.shard``.
        threads: That read for this rank.
    """

    def __init__(
        self,
        dataset: Dataset,
        mesh: Mesh | None = None,
        *,
        batch_size: int = 1,
        shuffle: str = "global",
        store: str = "memory",
        prefetch: int = 2,
        seed: int = 0,
        drop_last: bool = False,
        normalize: str | Normalize | None = None,
        augment: str | None = None,
        dtype: torch.dtype | None = None,
        as_dict: bool = False,
        bad_samples: str = "stop",
        memory_budget: int | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        preload: bool = False,
        stage_dir: str | os.PathLike[str] | None = None,
        transport: str = "torch",
        cuts: Mapping[str, Sequence[int]] | None = None,
        threads: int | None = None,
    ) -> None:
        check_choice("store", store, STORES)
        check_choice("bad_samples", bad_samples, BAD_SAMPLES)
        check_choice("transport", transport, TRANSPORTS)
        _check_count("prefetch", prefetch, least=0)
        _check_count("threads", threads, least=1)
        if mesh is not None and not hasattr(mesh, "grid"):
            raise ConfigError(f"mesh must come from hyperslab.init, got {mesh!r}")
        self._arguments = {
            "store": store,
            "prefetch": prefetch,
            "normalize": normalize,
            "augment": augment,
            "dtype": dtype,
            "as_dict": as_dict,
            "bad_samples": bad_samples,
            "preload": preload,
            "transport": transport,
            "cuts": cuts,
            "whether there is a stage_dir": stage_dir is not None,
        }
        self._dataset, self._mesh = dataset, mesh
        self._as_dict, self._skips, self._dtype = as_dict, bad_samples == "skip", dtype
        self._uses_memory, self._preloads, self._prefetch = store == "memory", preload, prefetch
        self._memory_budget = None if memory_budget is None else parse_nbytes(memory_budget)
        self._spill_dir = None if spill_dir is None else Path(spill_dir)
        self._stage_dir = None if stage_dir is None else Path(stage_dir)
        self._num_threads = num_readers(threads)
        self._uses_mpi = transport == "mpi"
        grid, rank = (mesh.grid, mesh.rank) if mesh else (Grid((1,) * 5), 0)
        self._placement = Placement.of(grid, rank, dataset.arrays, cuts)
        self._schedule = Schedule(
            num_samples=len(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            num_shares=self._placement.num_shares if shuffle == "local" else 1,
        )
        self._augmentation = augmentation_of(augment, dataset)
        self._normalize = Normalize.of(normalize, dataset)
        self._at = Position(0, 0)
        self._is_within = False
        self._loop = 0
        self._pipeline: Pipeline | None = None
        self._delivery: SlabDelivery | None = None
        self.skipped: dict[int, str] = {}
        """Samples that could not be read and were left out, and why; the same on all ranks."""

    def __len__(self) -> int:
        """The batches of one epoch."""
        return len(self._schedule)

    @property
    def epoch(self) -> int:
        """Of the next batch."""
        return self._at.epoch

    def __iter__(self) -> Iterator[Any]:
        """Slabs of one epoch: a tuple of the sample and its targets, or a dict by array name."""
        delivery = self._slab_delivery()
        for slabs in self._batches(delivery):
            yield self._arranged(delivery.hand_over(slabs))

    def numpy(self) -> NumpyBatches:
        """The same batches as NumPy arrays of this rank's boxes, in the file's dtype; no torch.

        Arrays are lent from a pool and go back to it when nothing refers to them any more.
        """
        return NumpyBatches(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; ``load_state_dict`` goes on there, on any mesh."""
        return save_state(self._schedule, self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken, with its seed; the batch size may be another."""
        self._schedule, self._at = restore_state(self._schedule, state)
        self._is_within = False
        self._loop += 1

    def find_not_finite(self, epoch: int, start: int, stop: int) -> str:
        """The first NaN or infinity in samples ``start`` to ``stop`` of an epoch, in words.

        It is empty if all values are finite; samples that cannot be read are left out. Collective
        over all ranks, each of which reads its own boxes from the files.
        """
        indices = self._schedule.order(epoch)[start:stop].tolist()
        peers = self._peers()
        try:
            found = peers.tell_all(find_not_finite(self._dataset, self._placement, indices))
        finally:
            peers.close()
        return min(filter(None, found), default=(0, ""))[1]

    def close(self) -> None:
        """Ends the threads and frees the memory; a later ``for`` begins anew."""
        if self._pipeline:
            self._finalizer()
            self._pipeline = None
        self._loop += 1

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _batches(self, deliver: Deliver) -> Iterator[Any]:
        """What ``deliver`` makes of the batches of one epoch, or of what is left of it."""
        if self._is_within and self._at.sample:  # the last loop was left before its end
            self._at = Position(self._at.epoch + 1, 0)
        number = self._schedule.number_of(self._at)
        return steps_of(id(self), self._taken(deliver), self._at.epoch, number)

    def _taken(self, deliver: Deliver) -> Iterator[Any]:
        pipeline = self._pipeline = self._pipeline or self._begin_pipeline()
        pipeline.start(self._at, self._schedule, deliver)
        self._loop += 1
        loop, self._is_within = self._loop, True
        epoch, num_taken = self._at.epoch, self._at.sample
        while self._at.epoch == epoch:
            local, delivered = pipeline.take()
            self._note(local)
            self._at = local.batch.next
            num_taken += sum(local.sizes)
            if sum(local.sizes):
                yield delivered
            if loop != self._loop:
                raise ConfigError(
                    "this loop over the loader cannot go on: another was begun, or the loader was "
                    "closed or set to another state"
                )
        self._is_within = False
        if not num_taken:
            raise FormatError(
                f"none of {len(self._dataset)} samples could be read, the first because "
                f"{next(iter(self.skipped.values()))}"
            )

    def _note(self, local: LocalBatch) -> None:
        """Raises or remembers what could not be read, on all ranks alike."""
        if local.skipped and not self._skips:
            more = f" (and {len(local.skipped) - 1} more)" if len(local.skipped) > 1 else ""
            raise FormatError(next(iter(local.skipped.values())) + more)
        new = {index: why for index, why in local.skipped.items() if index not in self.skipped}
        self.skipped |= new
        if self._placement.rank == 0:
            for why in new.values():
                _log.warning("skipped: %s (%d skipped so far)", why, len(self.skipped))

    def _begin_pipeline(self) -> Pipeline:
        peers = self._peers()
        try:
            check_alike(self._dataset, self._arguments, peers)
            if self._stage_dir:
                self._dataset = self._staged(peers, self._stage_dir)
                self._stage_dir = None
            store = self._store(peers) if self._uses_memory else None
        except HyperslabError:
            peers.close()
            raise
        pipeline = self._pipeline_with(peers, store)
        self._finalizer = weakref.finalize(self, pipeline.close)
        if store and self._preloads:
            try:
                pipeline.preload(show=self._placement.rank == 0)
            except BaseException:
                self._finalizer()
                raise
        return pipeline

    def _pipeline_with(self, peers: Peers, store: MemoryStore | None) -> Pipeline:
        readers, pool = ReaderThreads(self._num_threads), self._pool()
        reader = BatchReader(
            self._dataset, self._placement, peers, readers, pool, store, self._augmentation
        )
        return Pipeline(reader, peers, readers, pool, store, self._prefetch)

    def _staged(self, peers: Peers, directory: Path) -> Dataset:
        """The dataset on the node's own disk: only samples that its ranks read from files."""
        samples = None
        if self._uses_memory or self._schedule.shuffle != "global":
            owners = assign_owners(self._schedule, self._placement.num_shares, self._at.epoch)
            here = shares_of_node(self._placement, peers)
            samples = np.flatnonzero(np.isin(owners.shares, here)).tolist()
        return staged(
            self._dataset,
            directory,
            self._placement,
            peers,
            samples,
            reads_whole=self._augmentation is not None and not self._uses_memory,
            skips_bad=self._skips,
        )

    def _store(self, peers: Peers) -> MemoryStore:
        return MemoryStore(
            self._dataset,
            self._placement,
            self._schedule,
            peers,
            first_epoch=self._at.epoch,
            memory_budget=self._memory_budget,
            spill_dir=self._spill_dir,
            timeout_seconds=self._mesh.timeout.total_seconds() if self._mesh else 600.0,
            uses_mpi=self._uses_mpi,
        )

    def _peers(self) -> Peers:
        if self._mesh is None:
            return SingleProcess(self._placement.grid)
        from hyperslab.comm.side_channel import SideChannel

        return SideChannel(self._mesh, "loading data")

    def _pool(self) -> BufferPool:
        if self._mesh is None or self._mesh.device.type != "cuda":
            return BufferPool()
        from hyperslab.store.deliver import pin, unpin

        return BufferPool(on_new=pin, on_free=unpin)

    def _slab_delivery(self) -> SlabDelivery:
        if self._delivery is None:
            from hyperslab.comm.join import init
            from hyperslab.store.deliver import SlabDelivery

            mesh = self._mesh or init()
            if mesh.num_ranks != self._placement.grid.num_ranks:
                raise ConfigError(
                    f"the loader was made without a mesh, for one process, but there are "
                    f"{mesh.num_ranks}: give it one, as in hyperslab.Loader(data, hyperslab.init())"
                )
            self._delivery = SlabDelivery(
                mesh, self._placement, self._normalize, self._dataset.stats, self._dtype
            )
        return self._delivery

    def _arranged(self, arrays: dict[str, Any]) -> Any:
        """Arrays as they are yielded; statistics are not."""
        shown = {name: x for name, x in arrays.items() if name != self._dataset.stats}
        if self._as_dict:
            return shown
        return tuple(shown.values()) if len(shown) > 1 else next(iter(shown.values()))


class NumpyBatches:
    """A loader's batches as NumPy arrays; each ``for`` over it is an epoch of the loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for arrays in self._loader._batches(_AS_ARRAYS):
            yield self._loader._arranged(arrays)


class ArrayDelivery:
    """Leaves boxes where they are, in host memory."""

    turns = False

    def __call__(self, local: LocalBatch) -> dict[str, NDArray[Any]]:
        return {name: rows.boxes for name, rows in local.rows.items()}


_AS_ARRAYS = ArrayDelivery()


def save_state(schedule: Schedule, at: Position) -> dict[str, Any]:
    return {
        "epoch": at.epoch,
        "sample": at.sample,
        "seed": schedule.seed,
        "shuffle": schedule.shuffle,
        "num_samples": schedule.num_samples,
        "num_shares": schedule.num_shares,
        "batch_size": schedule.batch_size,
    }


def restore_state(schedule: Schedule, state: Mapping[str, Any]) -> tuple[Schedule, Position]:
    """The schedule that ``state`` was saved with, and the place in it, if it can go on there."""
    _check_state(state)
    for name in ("num_samples", "shuffle"):
        if state[name] != getattr(schedule, name):
            raise ConfigError(
                f"the state was saved with {name}={state[name]!r}, but the loader has "
                f"{getattr(schedule, name)!r}: the order of samples would be another"
            )
    if schedule.shuffle == "local" and state["batch_size"] != schedule.batch_size:
        raise ConfigError(
            f"the state was saved with batch_size={state['batch_size']}, on which the order of "
            f"shuffle='local' depends, but the loader has {schedule.batch_size}"
        )
    schedule = replace(schedule, seed=state["seed"], num_shares=state["num_shares"])
    return schedule, schedule.checked(Position(state["epoch"], state["sample"]))


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state of a loader is a dict, got {type(state).__name__}")
    if missing := [name for name in (*_STATE_NUMBERS, "shuffle") if name not in state]:
        raise ConfigError(f"this is not the state of a loader: it has no {', '.join(missing)}")
    for name in _STATE_NUMBERS:
        if not isinstance(state[name], int):
            raise ConfigError(f"the state of a loader has {name}={state[name]!r}, no whole number")


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or value < least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
