import gc
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hyperslab.io.engine.buffers import BufferPool, address_of, empty_aligned

PAGE = mmap.PAGESIZE


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4, 5), (1000, 1000)])
def test_arrays_begin_on_a_page(shape):
    for array in (empty_aligned(shape, "int16"), BufferPool().take(shape, "int16")):
        assert array.shape == shape
        assert array.dtype == np.int16
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert not array.size or address(array) % PAGE == 0


@pytest.mark.parametrize("dtype", ["int16", ">f8", "M8[s]"])
def test_the_address_of_any_array(dtype):
    array = np.zeros((4, 6), dtype)
    fixed = array[1:]
    fixed.flags.writeable = False
    for view in (array, array[1:], array[::-1], array[2:, ::3], array.T, fixed):
        assert address_of(view) == address(view)


def test_memory_is_used_again_once_nothing_refers_to_it():
    pool = BufferPool()
    first = pool.take((100, 100), "int16")
    place = address(first)
    del first
    assert pool.spare_nbytes >= 20_000
    assert address(pool.take((50, 100), "float32")) == place
    assert pool.spare_nbytes >= 20_000


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[3:, ::2].T[-1:],
        lambda array: array.reshape(-1).view(np.uint8)[5:6],
        memoryview,
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array[2:])[1:].view(torch.float16)[:1],
        lambda array: np.from_dlpack(torch.from_numpy(array)),
    ],
    ids=["array", "view", "bytes", "memoryview", "tensor", "view-of-tensor", "dlpack"],
)
def test_whoever_keeps_a_view_keeps_the_memory(keep):
    pool = BufferPool()
    array = pool.take((10, 20), "int16")
    place = address(array)
    kept = keep(array)
    del array
    gc.collect()
    assert address(pool.take((10, 20), "int16")) != place
    del kept
    gc.collect()
    again = [pool.take((10, 20), "int16") for _ in range(2)]
    assert place in [address(found) for found in again]


def test_a_kept_batch_is_never_overwritten():
    pool = BufferPool()
    kept = []
    for number in range(200):
        batch = pool.take((8, 8), "int32")
        batch[...] = number
        if number % 3 == 0:
            kept.append((number, torch.from_numpy(batch)[::2]))
        if number % 7 == 0:
            kept = kept[-5:]
        assert all((tensor == value).all() for value, tensor in kept)


def test_much_too_large_buffers_are_not_given_away():
    pool = BufferPool()
    large = pool.take((100 * PAGE,), "uint8")
    place = address(large)
    del large
    small = pool.take((PAGE,), "uint8")
    assert address(small) != place
    assert pool.spare_nbytes == 100 * PAGE


def test_spare_memory_is_bounded_and_the_oldest_goes_first():
    pool = BufferPool(max_spare_nbytes=5 * PAGE)
    taken = [pool.take((2 * PAGE,), "uint8") for _ in range(4)]
    places = [address(array) for array in taken]
    while taken:
        taken.pop(0)
        assert pool.spare_nbytes <= 5 * PAGE
    again = {address(pool.take((2 * PAGE,), "uint8")) for _ in range(1)}
    assert again < set(places[2:])


def test_memory_is_shown_when_it_is_new_and_before_it_is_freed():
    new, freed = [], []
    pool = BufferPool(
        on_new=lambda memory: new.append((address(memory), memory.nbytes)),
        on_free=lambda memory: freed.append((address(memory), memory.nbytes)),
    )
    first, second = pool.take((3, 5), "int16"), pool.take((PAGE,), "int16")
    assert new == [(address(first), PAGE), (address(second), 2 * PAGE)]
    del first
    pool.take((2,), "int16")
    assert len(new) == 2
    pool.close()
    assert freed == new[:1]
    del second
    assert freed == new


def test_a_closed_pool_keeps_nothing():
    pool = BufferPool()
    used = pool.take((10,), "int64")
    del used
    pool.close()
    assert pool.spare_nbytes == 0
    late = pool.take((10,), "int64")  # a reader that had not yet heard
    late[:] = 1
    del late
    assert pool.spare_nbytes == 0


def test_a_forgotten_pool_is_freed_with_its_last_buffer():
    pool = BufferPool()
    gone = weakref.ref(pool)
    array = pool.take((10,), "int64")
    del pool
    array[:] = 3
    assert gone() is not None
    del array
    gc.collect()
    assert gone() is None


def test_garbage_collected_under_the_lock_does_not_lock_up():
    """Arrays in reference cycles are freed by whatever allocation comes next, ours included."""
    pool = BufferPool()

    def cycle():
        node = {"array": pool.take((64,), "uint8")}
        node["self"] = node

    for _ in range(20):
        cycle()
        with pool._lock:
            gc.collect(0)
    pool.take((64,), "uint8")
    assert not pool._returned


def test_many_threads_take_and_drop():
    pool = BufferPool(max_spare_nbytes=40 * PAGE)
    wrong = threading.Event()

    def work(number):
        for turn in range(150):
            array = pool.take((16, 8 + turn % 40), "int64")
            array[...] = number * 1000 + turn
            view = array[1:]
            del array
            if not (view == number * 1000 + turn).all():
                wrong.set()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert not wrong.is_set()
    assert pool.spare_nbytes <= 40 * PAGE
