"""What each rank keeps of the samples, and how the others get it."""

import fcntl
import gc
import logging
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.side_channel import SideChannel
from hyperslab.io.schedule import Schedule
from hyperslab.layout import Box, Grid
from hyperslab.store.memory import MemoryStore, Request
from hyperslab.store.peers import SingleProcess
from hyperslab.store.placement import Placement

NUM = 7
SHAPE = (1, 6, 4)
WHOLE = Box.whole(SHAPE)
UNTOUCHED = -1
ORDERED = Schedule(num_samples=NUM, batch_size=4, shuffle="none")
"""Of two ranks along the sample axis, rank 0 reads 0 and 1, 4 and 5, and rank 1 the others."""
KEPT = ([0, 1, 4, 5], [2, 3, 6])


def image(index):
    return np.arange(24, dtype=np.int16).reshape(SHAPE) + 100 * index


@pytest.fixture
def folder(tmp_path):
    """A file a sample, of which number 3 has lost its last row."""
    for index in range(NUM):
        np.save(tmp_path / f"{index}.npy", image(index))
    path = tmp_path / "3.npy"
    os.truncate(path, path.stat().st_size - 8)
    return tmp_path


def make_store(folder, axes, num_nodes=1, **options):
    """A store of the files, made by all ranks, where its arrays lie, and what it talks by."""
    mesh = hs.init(**axes, device="cpu")
    data = hs.open(folder / "*.npy", axes="CHW")
    placement = Placement.of(mesh.grid, mesh.rank, data.arrays)
    peers = SideChannel(mesh, "testing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERSLAB_NODE", f"node {mesh.rank % num_nodes}")
        store = MemoryStore(data, placement, ORDERED, peers, **options)
    return store, placement, peers


@contextmanager
def made_store(*args, **kwargs):
    store, placement, peers = make_store(*args, **kwargs)
    yield store, placement
    peers.tell_all(None)  # nobody takes any more
    store.close()
    peers.close()


def fill(store, indices):
    for index in store.to_fill(indices):
        store.fill(index)


def request(index, box=WHOLE):
    return Request(index, "data", box)


def taken(store, index, box=WHOLE):
    found = request(index, box)
    out = np.full(found.box.shape, UNTOUCHED, np.int16)
    store.take(found, out)
    return out


@pytest.mark.ranks(2)
def test_a_rank_keeps_the_samples_that_it_takes_in_the_first_epoch(folder):
    with made_store(folder, {"sample": 2}) as (store, placement):
        assert store.to_fill(range(4)) == KEPT[placement.rank][:2]
        assert store.fill_all() == KEPT[placement.rank][2:]
    with made_store(folder, {"height": 2}) as (store, _):
        assert store.fill_all() == list(range(NUM))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"sample": 2}, {"height": 2}, {"width": 2}], ids=str)
def test_every_rank_gets_any_box_of_a_sample_exactly(axes, folder):
    boxes = [WHOLE, Box.of((0, 1), (1, 5), (1, 3)), Box.of((0, 1), (2, 2), (0, 4))]
    with made_store(folder, axes) as (store, _):
        fill(store, range(NUM))
        for index in {*range(NUM)} - {3}:
            for box in boxes:
                expected = image(index)[box.slices_in(WHOLE)]
                np.testing.assert_array_equal(taken(store, index, box), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("budget", [None, 256], ids=["memory", "memory, disk"])
def test_boxes_from_another_node_come_as_messages(budget, folder):
    options = {"num_nodes": 2, "memory_budget": budget, "spill_dir": folder}
    with made_store(folder, {"sample": 2}, **options) as (store, placement):
        fill(store, range(NUM))
        batch = [6, 2, 0, 5]  # rank 0 takes the first two, which rank 1 keeps, and the reverse
        mine = batch[2 * placement.rank :][:2]
        filled = [(request(index), np.full(SHAPE, UNTOUCHED, np.int16)) for index in mine]
        for each, out in filled:
            store.take(each, out)
            assert (out == UNTOUCHED).all()
        store.swap(batch, filled, lambda index, _: [request(index)])
        for each, out in filled:
            np.testing.assert_array_equal(out, image(each.index))


@pytest.mark.ranks(2)
def test_a_sample_that_cannot_be_read_is_given_to_nobody_and_awaited_by_nobody(folder):
    with made_store(folder, {"sample": 2}) as (store, placement):
        fill(store, range(4))
        assert (taken(store, 3) == UNTOUCHED).all()
        np.testing.assert_array_equal(taken(store, 2), image(2))
        faults = store.faults(range(NUM))
        assert [*faults] == [[], [3]][placement.rank]
        assert all("3.npy" in why for why in faults.values())


def run_out_of_memory(*args, **kwargs):
    raise MemoryError("no more")


def refuse_pages(*args, **kwargs):
    raise hs.ConfigError("there is no memory for sample 1 of 3")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("what", ["_dataset.read", "_own.reserve"])
def test_a_rank_that_fails_for_any_reason_is_awaited_by_nobody(what, num_nodes, folder):
    options = {"num_nodes": num_nodes, "timeout_seconds": 60}
    with made_store(folder, {"sample": 2}, **options) as (store, placement):
        if placement.rank == 1:
            owner, name = what.split(".")
            fails = run_out_of_memory if name == "read" else refuse_pages
            setattr(getattr(store, owner), name, fails)
            with pytest.raises((MemoryError, hs.ConfigError)):
                store.fill(store.to_fill([2])[0])
        filled = [(request(2), np.full(SHAPE, UNTOUCHED, np.int16))] * (placement.rank == 0)
        for each, out in filled:
            store.take(each, out)
            assert (out == UNTOUCHED).all()
        store.swap([2], filled, lambda index, _: [request(index)])
        assert store.faults([2]) == {}  # it is not the file that is to blame
        words = {"read": "MemoryError: no more", "reserve": "ConfigError: there is no memory"}
        found = store.failure([0, 2]) or ""
        assert found.startswith(words[what.split(".")[1]] if placement.rank else "")
        assert bool(found) == bool(placement.rank)


@pytest.mark.ranks(2)
def test_a_sample_is_read_once_whatever_later_epochs_ask_for(folder):
    with made_store(folder, {"sample": 2}) as (store, placement):
        fill(store, range(4))
        fill(store, range(NUM))
        assert store.to_fill(range(NUM)) == store.fill_all() == []
        dist.barrier()
        for index in KEPT[placement.rank]:
            (folder / f"{index}.npy").unlink()
        dist.barrier()
        np.testing.assert_array_equal(taken(store, KEPT[0][0]), image(KEPT[0][0]))
        np.testing.assert_array_equal(taken(store, KEPT[1][0]), image(KEPT[1][0]))


def test_samples_that_have_no_room_are_read_from_the_files(folder, monkeypatch):
    monkeypatch.setattr("hyperslab.store.slots.free_disk", lambda path: 0)
    data = hs.open(folder / "*.npy", axes="CHW")
    grid = Grid((1,) * 5)
    placement = Placement.of(grid, 0, data.arrays)
    store = MemoryStore(data, placement, ORDERED, SingleProcess(grid), memory_budget=2 * 64)
    assert store.fill_all() == [0, 1]
    np.testing.assert_array_equal(taken(store, 6), image(6))
    store.close()


def test_a_slot_is_written_before_its_flag_and_read_after_it(folder, monkeypatch):
    data = hs.open(folder / "*.npy", axes="CHW")
    grid = Grid((1,) * 5)
    store = MemoryStore(data, Placement.of(grid, 0, data.arrays), ORDERED, SingleProcess(grid))
    out, seen = np.full(SHAPE, UNTOUCHED, np.int16), []

    def note(fd, how):
        slot = store._arrays(2, 0)["data"]
        seen.append((how, bool((slot == image(2)).all()), bool((out == UNTOUCHED).all())))

    monkeypatch.setattr(fcntl, "flock", note)
    store.fill(2)
    store.take(request(2), out)
    np.testing.assert_array_equal(out, image(2))
    locks = (fcntl.LOCK_EX, fcntl.LOCK_UN, fcntl.LOCK_SH, fcntl.LOCK_UN)
    assert seen == [(how, True, True) for how in locks]
    store.close()


@contextmanager
def warnings_of_log():
    """The words of the warnings that are logged within."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("hyperslab")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def refuse_to_map(address):
    raise PermissionError(13, "Permission denied", address.path)


REFUSALS = {
    "another user": ("hyperslab.store.slots.map_segment", refuse_to_map, "Permission denied"),
    "another container": (
        "hyperslab.store.slots.node_name",
        lambda: f"container of {os.getpid()}",
        "they run in different containers",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSALS)
def test_memory_that_other_ranks_may_not_map_is_told_and_boxes_come_as_messages(name, folder):
    place, instead, why = REFUSALS[name]
    with pytest.MonkeyPatch.context() as patch, warnings_of_log() as told:
        patch.setattr(place, instead)
        with made_store(folder, {"sample": 2}) as (store, placement):
            fill(store, range(NUM))
            filled = [(request(2), np.empty(SHAPE, np.int16))] * (placement.rank == 0)
            store.swap([2, 0], filled, lambda index, _: [request(index)] * (index == 2))
            for each, out in filled:
                np.testing.assert_array_equal(out, image(each.index))
    assert len(told) == (placement.rank == 0)
    for words in told:
        assert words.startswith("rank 0 cannot map the memory of rank 1 on the same machine, nor 1")
        assert why in words
        assert "\n" not in words


@pytest.mark.ranks(2)
def test_nodes_that_lie_apart_are_not_warned_of(folder):
    with warnings_of_log() as told, made_store(folder, {"sample": 2}, num_nodes=2):
        pass
    assert told == []


def die_before_filling(folder):
    """What rank 0 is told when rank 1 dies, of which it waits for a sample."""
    store, placement, _ = make_store(folder, {"sample": 2}, timeout_seconds=30)
    if placement.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hs.CommError) as raised:
        store.take(request(2), np.empty(SHAPE, np.int16))
    return str(raised.value)


def test_a_rank_that_dies_is_not_waited_for(team_of, folder):
    words, _ = team_of(2).run(die_before_filling, folder, may_die=[1])
    assert words == "rank 0 waits for sample 2 from rank 1, which has ended"


@pytest.mark.ranks(2)
def test_a_closed_store_keeps_no_memory_of_any_rank(folder):
    before = shared_memory()
    with made_store(folder, {"sample": 2}) as (store, _):
        fill(store, range(NUM))
        assert shared_memory() != before
    del store
    gc.collect()
    assert shared_memory() == before


def shared_memory():
    """How often this process has mapped slots or flags, and how many it has open."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hyperslab")
    files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return maps, sum("memfd:hyperslab" in str(file) for file in files)
