import itertools
import threading
import time

import pytest

from hyperslab.errors import CommError
from hyperslab.store.pipeline import Prefetcher


def begun_and_finished(depth, num_taken):
    begun, finished = [], []

    def begin(plan):
        begun.append(plan)
        return plan

    def finish(plan):
        finished.append(plan)
        return plan

    pipeline = Prefetcher(itertools.count(), begin, finish, depth)
    assert [pipeline.take() for _ in range(num_taken)] == list(range(num_taken))
    pipeline.drain()
    return begun, finished


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("num_taken", [0, 1, 4])
def test_as_many_are_made_as_were_taken_and_may_be_ahead(depth, num_taken):
    begun, finished = begun_and_finished(depth, num_taken)
    assert begun == finished == list(range(num_taken + depth))


def test_an_error_reaches_the_taker_after_what_was_whole():
    def finish(plan):
        if plan == 2:
            raise ValueError("two")
        return plan

    pipeline = Prefetcher(itertools.count(), lambda plan: plan, finish, 3)
    assert [pipeline.take(), pipeline.take()] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        pipeline.take()
    for _ in range(2):
        with pytest.raises(CommError, match=r"no longer made: .*two"):
            pipeline.take()


def test_stopping_does_not_wait_for_what_never_ends():
    never = threading.Event()
    pipeline = Prefetcher(itertools.count(), lambda plan: plan, lambda plan: never.wait(), 2)
    stopping = threading.Thread(target=pipeline.stop, kwargs={"timeout_seconds": 0.1})
    stopping.start()
    stopping.join(60)
    has_stopped = not stopping.is_alive()
    never.set()
    assert has_stopped
    pipeline._thread.join()
    assert not pipeline._thread.is_alive()


def test_no_more_is_begun_than_may_be_ahead():
    begun = []
    pipeline = Prefetcher(itertools.count(), begun.append, lambda plan: plan, 2)
    pipeline.take()
    while len(begun) < 3:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(begun) == 3
    pipeline.stop()


def test_another_is_begun_before_the_one_after_that_which_is_asked_for_is_finished():
    begun, seen, gate = [], {}, threading.Event()

    def finish(_):
        gate.wait()
        seen[len(seen)] = len(begun)

    pipeline = Prefetcher(itertools.count(), begun.append, finish, 2)
    taker = threading.Thread(target=pipeline.take)
    taker.start()
    deadline = time.monotonic() + 20
    while pipeline._num_allowed < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.set()
    taker.join()
    pipeline.drain()
    assert seen[1] == 3
