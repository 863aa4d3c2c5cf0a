"""What is recorded reaches the file, whatever becomes of the process, its threads and its disk."""

import asyncio
import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.trace import Category, Tier, active, load_trace
from hyperslab.trace.file import TraceFile
from hyperslab.trace.recorder import CAPACITY, OTHERS, Clock, Place, Recorder


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    active.stop()


def names(trace, *categories):
    spans = trace.of(*categories) if categories else trace.spans
    return [trace.strings[number] for number in spans["name"]]


def test_a_span_has_its_thread_and_what_it_was_told(tmp_path):
    def work():
        with hs.span("work", sample=7) as span:
            span.nbytes = 123

    with hs.trace.recording(tmp_path):
        before = time.perf_counter_ns()
        thread = threading.Thread(target=work, name="mine")
        thread.start()
        thread.join()
        after = time.perf_counter_ns()
        with hs.span("load", nbytes=9, category="read"):
            pass
    trace = load_trace(tmp_path)
    assert names(trace) == ["work", "load"]
    work, load = trace.spans
    assert (work["nbytes"], work["sample"], work["step"]) == (123, 7, -1)
    assert (work["category"], load["category"]) == (Category.user, Category.read)
    assert [trace.threads[number].name for number in trace.spans["thread"]] == [
        "mine",
        "MainThread",
    ]
    assert trace.threads[work["thread"]].tid != trace.threads[load["thread"]].tid
    (process,) = trace.processes
    assert process.pid == os.getpid()
    unix = time.time_ns() - time.perf_counter_ns()
    assert before - 10**8 < work["start"] - unix < after + 10**8
    assert 0 < work["duration"] <= after - before


def test_a_decorated_function_is_recorded_whenever_something_records(tmp_path):
    @hs.span("plain")
    def plain(x, *, y):
        """Adds."""
        return x + y

    @hs.span("generator")
    def generator():
        yield 1
        time.sleep(0.002)
        yield 2

    @hs.span("coroutine")
    async def coroutine():
        await asyncio.sleep(0.002)
        return 3

    assert plain(1, y=2) == 3
    with hs.trace.recording(tmp_path):
        assert plain(1, y=2) == 3
        assert list(generator()) == [1, 2]
        assert asyncio.run(coroutine()) == 3
        hs.span("late")(lambda: None)()
    assert plain(1, y=2) == 3
    assert (plain.__name__, plain.__doc__) == ("plain", "Adds.")
    trace = load_trace(tmp_path)
    assert names(trace) == ["plain", "generator", "coroutine", "late"]
    assert (trace.spans["duration"][1:3] > 2_000_000).all()


def test_an_error_passes_through_its_span(tmp_path):
    with hs.trace.recording(tmp_path), pytest.raises(KeyError), hs.span("fails"):
        raise KeyError
    assert names(load_trace(tmp_path)) == ["fails"]


@pytest.mark.parametrize(
    ("value", "taken"),
    [(2.5, 2), (np.float32(7), 7), (np.int16(7), 7), (1 << 70, (1 << 63) - 1), (True, 1), (-3, -3)],
)
def test_whole_numbers_of_any_kind_are_taken(tmp_path, caplog, value, taken):
    with hs.trace.recording(tmp_path), hs.span("work") as span:
        span.nbytes = span.sample = value
    (found,) = load_trace(tmp_path).spans
    assert (found["nbytes"], found["sample"]) == (taken, max(taken, -1))
    assert not caplog.records


@pytest.mark.parametrize("value", [None, "a.h5", float("nan"), float("inf"), [1], np.arange(3)])
def test_what_is_no_number_is_left_out_and_told_once(tmp_path, caplog, value):
    def fail():
        with hs.span("work", sample=value) as span:
            span.nbytes = value
            raise KeyError

    with hs.trace.recording(tmp_path):
        for _ in range(2):
            with pytest.raises(KeyError):
                fail()
        with hs.span("right", nbytes=3):
            pass
    spans = load_trace(tmp_path).spans
    assert spans["nbytes"].tolist() == [0, 0, 3]
    assert spans["sample"].tolist() == [-1, -1, -1]
    (told,) = caplog.records
    assert "the span work is recorded without its" in told.message


@pytest.mark.parametrize("name", [7, b"bytes", ["a", "list"], None])
def test_names_may_be_anything(tmp_path, name):
    with hs.trace.recording(tmp_path), hs.span(name) as span:
        span.nbytes = 1
    assert names(load_trace(tmp_path)) == [str(name)]


@pytest.mark.parametrize("epoch", [1 << 40, "last", None])
def test_epochs_that_have_no_room_stop_no_loop(tmp_path, epoch):
    with hs.trace.recording(tmp_path):
        assert list(hs.trace.steps([1, 2], epoch=epoch)) == [1, 2]
    assert len(load_trace(tmp_path))


def test_a_bare_decorator_has_the_name_of_its_function(tmp_path):
    @hs.span
    def augment(x):
        return 2 * x

    with hs.trace.recording(tmp_path):
        assert augment(2) == 4
    assert augment.__name__ == "augment"
    assert names(load_trace(tmp_path)) == ["augment"]


def test_what_was_done_at_first_is_written_soonest(tmp_path):
    asked, done = [], threading.Event()

    class Wake:
        def wait(self, seconds):
            asked.append(seconds)
            if len(asked) == 6:
                recorder._has_ended = True
                done.set()

        def set(self):
            pass

    recorder = Recorder(tmp_path)
    recorder._wake = Wake()
    recorder.add(Category.user, "early", 1, 2)
    assert done.wait(60)
    assert asked[0] <= 0.05
    assert asked[-1] == max(asked) <= 0.25
    assert names(load_trace(tmp_path)) == ["early"]


def test_nothing_is_written_where_nothing_is_recorded(tmp_path):
    with hs.trace.recording(tmp_path / "off", level="off"), hs.span("x", nbytes=1) as span:
        span.nbytes = 5
    with hs.trace.recording(tmp_path / "empty"):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="level must be one of off, coarse, detailed"):
        hs.trace.start(tmp_path, level="all")
    with pytest.raises(ConfigError, match="category must be one of"):
        hs.span("x", category="reading")


def test_a_second_trace_of_a_process_is_refused(tmp_path):
    with hs.trace.recording(tmp_path), pytest.raises(ConfigError, match="is traced already, to"):
        hs.trace.start(tmp_path / "other")


def test_a_trace_that_goes_on_has_another_file(tmp_path):
    for number in range(3):
        with hs.trace.recording(tmp_path), hs.span(f"span {number}"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank00000.1.hstrace",
        "rank00000.2.hstrace",
        "rank00000.hstrace",
    ]
    assert sorted(names(load_trace(tmp_path))) == ["span 0", "span 1", "span 2"]


def test_more_spans_than_a_thread_holds_are_all_written(tmp_path):
    num, num_threads = 2 * CAPACITY + 100, 3

    def work(number):
        for i in range(num):
            with hs.span(f"thread {number}", nbytes=i):
                pass

    with hs.trace.recording(tmp_path):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        active.recorder.flush()
        assert len(active.recorder._lanes) == 0  # those of threads that ended
    trace = load_trace(tmp_path)
    for number in range(num_threads):
        mine = trace.spans[trace.spans["name"] == trace.strings.index(f"thread {number}")]
        assert mine["nbytes"].tolist() == list(range(num))


def test_names_without_end_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperslab.trace.recorder.MOST_STRINGS", 4)
    with hs.trace.recording(tmp_path):
        for number in range(6):
            with hs.span(f"name {number}"):
                pass
    assert names(load_trace(tmp_path)) == ["name 0", "name 1", "name 2", OTHERS, OTHERS, OTHERS]


def wait_for_spans(folder, num):
    """The trace in ``folder``, as soon as ``num`` spans are there."""
    while True:
        if list(folder.glob("*.hstrace")) and len(trace := load_trace(folder)) >= num:
            return trace
        time.sleep(0.01)


KILLED = """
import sys, time
import hyperslab as hs
hs.trace.start(sys.argv[1])
for number in range(1000):
    with hs.span("x", nbytes=number):
        pass
assert "torch" not in sys.modules
print("recorded", flush=True)
time.sleep(600)
"""


def test_a_killed_process_keeps_what_it_recorded_but_for_the_last_moment(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"recorded\n"
        wait_for_spans(tmp_path, 1000)
        process.send_signal(signal.SIGKILL)
    trace = load_trace(tmp_path)
    assert trace.notes == []
    assert trace.spans["nbytes"].tolist() == list(range(1000))


def test_a_forked_process_writes_a_file_of_its_own(tmp_path):
    def child(number):
        with hs.span(f"child {number}"):
            pass

    context = multiprocessing.get_context("fork")
    with hs.trace.recording(tmp_path, level="detailed"):
        with hs.span("before"):
            pass
        with hs.span("around"):
            processes = [context.Process(target=child, args=(n,)) for n in range(2)]
            processes += [context.Process(target=int)]  # records nothing
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                assert process.exitcode == 0
    assert len(list(tmp_path.iterdir())) == 3
    trace = load_trace(tmp_path)
    assert sorted(names(trace)) == ["around", "before", "child 0", "child 1"]
    own = {
        trace.strings[span["name"]]: trace.processes[span["process"]].pid for span in trace.spans
    }
    assert own["before"] == own["around"] == os.getpid()
    assert [own["child 0"], own["child 1"]] == [processes[0].pid, processes[1].pid]


def test_a_fork_while_spans_are_written_waits_for_nobody(tmp_path):
    """The lock that the parent's thread holds is never let go of in the child."""
    with hs.trace.recording(tmp_path):
        recorder = active.recorder
        with hs.span("parent"):
            pass
        with recorder._lock:
            pid = os.fork()
            if not pid:
                with hs.span("child"):
                    pass
                active.stop()
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert sorted(names(load_trace(tmp_path))) == ["child", "parent"]


def test_a_full_disk_is_one_warning(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    with hs.trace.recording(tmp_path):
        with hs.span("kept"):
            pass
        active.recorder.flush()
        monkeypatch.setattr(TraceFile, "spans", _raise_full)
        for _ in range(3 * CAPACITY):
            with hs.span("lost"):
                pass
        active.recorder.flush()
    (record,) = caplog.records
    assert "the trace of this run ends here, and the run goes on" in record.message
    assert os.strerror(errno.ENOSPC) in record.message
    assert names(load_trace(tmp_path)) == ["kept"]


def _raise_full(self, spans):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with hs.trace.recording(tmp_path / "file" / "trace"):
        for _ in range(2):
            with hs.span("lost"):
                pass
            active.recorder.flush()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_overlaps_is_kept_apart(tmp_path):
    recorder = Recorder(tmp_path, clock=Clock(name="one"))
    recorder.add_to("messages", Category.halo, "a", 0, 10, apart=True)
    recorder.add_to("messages", Category.halo, "b", 5, 12, apart=True, place=Place(1, 2, 3))
    recorder.add_to("messages", Category.halo, "c", 10, 14, apart=True)
    recorder.stop()
    trace = load_trace(tmp_path)
    found = [trace.threads[number].name for number in trace.spans["thread"]]
    assert found == ["messages", "messages 1", "messages"]
    assert [trace.spans[1][name] for name in ("epoch", "step", "sample")] == [1, 2, 3]


def test_spans_of_a_thread_are_where_it_is(tmp_path):
    with hs.trace.recording(tmp_path):
        active.recorder.loop.epoch = 4
        with active.placed(Place(5, 6, 7)), active.around(Category.read, "inside"):
            pass
        with active.reading(tmp_path / "a.h5", 5):
            pass
    inside, after = load_trace(tmp_path).spans
    assert [inside[name] for name in ("epoch", "step", "sample")] == [5, 6, 7]
    assert [after[name] for name in ("epoch", "step", "sample")] == [4, -1, -1]
    assert (after["tier"], after["nbytes"]) == (Tier.file, 5)


def test_the_rank_is_that_of_the_launcher_until_a_mesh_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    with hs.trace.recording(tmp_path):
        with hs.span("x"):
            pass
        active.recorder.flush()
        active.note_rank(5)
        with hs.span("x"):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["rank00003.hstrace"]
    assert [process.rank for process in load_trace(tmp_path).processes] == [5]
