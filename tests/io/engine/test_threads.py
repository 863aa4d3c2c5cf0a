import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine import threads
from hyperslab.io.engine.threads import for_each, limited_to, num_threads, set_num_threads


@pytest.fixture(autouse=True, params=[1, 4])
def num(request):
    with limited_to(request.param):
        yield request.param


def squares(count):
    found = []
    for_each(lambda i: found.append(i * i), range(count))
    return sorted(found)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_every_item_is_worked_on_once(count):
    assert squares(count) == [i * i for i in range(count)]


def test_items_are_worked_on_at_once(num):
    met = threading.Barrier(num, timeout=60)
    for_each(lambda _: met.wait(), range(num))


def test_the_first_error_is_raised_and_ends_the_rest(num):
    done = []

    def work(item):
        if item == 3:
            raise FormatError("item 3 is damaged")
        time.sleep(0.001)
        done.append(item)

    with pytest.raises(FormatError, match="item 3 is damaged"):
        for_each(work, range(100_000))
    assert len(done) < 10_000
    assert squares(10) == [i * i for i in range(10)]


def test_an_error_of_the_items_themselves_is_raised():
    def items():
        yield from range(5)
        raise FormatError("no more")

    with pytest.raises(FormatError, match="no more"):
        for_each(lambda _: None, items())


def test_work_may_itself_be_spread(num):
    found = []

    def outer(i):
        for_each(lambda j: found.append((i, j)), range(20))

    for_each(outer, range(20))
    assert sorted(found) == [(i, j) for i in range(20) for j in range(20)]


def test_many_threads_may_call_at_once():
    with ThreadPoolExecutor(16) as callers:
        for found in callers.map(squares, [50] * 64):
            assert found == [i * i for i in range(50)]


def in_a_fork(queue):
    queue.put(squares(50))


def test_a_forked_process_has_threads_of_its_own():
    squares(50)  # the threads of this process are there
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=in_a_fork, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get() == [i * i for i in range(50)]


def test_the_number_of_threads_is_checked(num):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        set_num_threads(0)
    assert num_threads() == num


def test_ctrl_c_ends_the_work_at_once(monkeypatch, num):
    calls = []

    def work(item):
        calls.append(item)
        if threading.current_thread() is threading.main_thread() and len(calls) > 5:
            raise KeyboardInterrupt
        time.sleep(0.002)

    with pytest.raises(KeyboardInterrupt):
        for_each(work, range(100_000))
    assert len(calls) < 10_000


PROGRAM = """
import threading
from hyperslab.io.engine.threads import for_each, set_num_threads
set_num_threads(4)
all_at_work = threading.Barrier(4)
for_each(lambda i: all_at_work.wait(), range(8))

def go_on_after_the_main_thread():
    threading.main_thread().join()
    for_each(lambda i: None, range(8))

threading.Thread(target=go_on_after_the_main_thread).start()
"""


def test_a_program_that_used_threads_ends_by_itself(num):
    if num == 1:
        pytest.skip("it sets its own number")
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_more_threads_than_asked_for(num):
    squares(100)
    mine = [t for t in threading.enumerate() if t.name.startswith("hyperslab-read")]
    assert len(mine) <= max(4, threads.num_threads())
