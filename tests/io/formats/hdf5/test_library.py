"""The process of the HDF5 library, its life and its death."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.errors import FormatError
from hyperslab.io.formats.hdf5 import Hdf5, child
from hyperslab.io.formats.hdf5.library import Library, library


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), scaleoffset=0)
    return path


@pytest.fixture
def own():
    """A library of the test's own."""
    found = Library()
    yield found
    found.end()


def pid_of(some_library):
    return some_library._child._process.pid


def test_the_library_is_started_once(own, path):
    own.ask("names", path)
    pid = pid_of(own)
    for _ in range(5):
        assert own.ask("names", path)[0]["names"] == ["x"]
    assert pid_of(own) == pid


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGSEGV], ids=lambda s: s.name)
def test_a_process_that_was_killed_is_replaced_and_asked_again(own, path, killed_by):
    own.ask("names", path)
    os.kill(pid_of(own), killed_by)
    assert own.ask("names", path)[0]["names"] == ["x"]


def test_a_process_that_is_killed_in_the_midst_of_an_answer_is_asked_again(own, path):
    own.ask("names", path)
    first = pid_of(own)
    os.kill(first, signal.SIGSTOP)  # so that it answers nothing
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(own.ask, "names", path)
        os.kill(first, signal.SIGKILL)
        assert asked.result()[0]["names"] == ["x"]
    assert pid_of(own) != first


@pytest.fixture
def instead_of_names(path, monkeypatch):
    """Lets the library's process run a piece of code where it is asked for names."""

    def put(code):
        program = (
            f"import os, signal\nimport hyperslab.io.formats.hdf5.contents as c\nc.names = {code}\n"
        )
        (path.parent / "sitecustomize.py").write_text(program)
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        monkeypatch.setenv("PYTHONPATH", str(path.parent), prepend=os.pathsep)

    return put


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("signal_name", "words"),
    [
        ("SIGSEGV", r"a\.h5 is damaged: the HDF5 library crashed on it \(SIGSEGV\)"),
        ("SIGKILL", r"a\.h5 cannot be read: .* was killed twice \(SIGKILL\)"),
    ],
)
def test_a_file_that_kills_every_process_is_told(own, path, instead_of_names, signal_name, words):
    instead_of_names(f"lambda path: os.kill(os.getpid(), signal.{signal_name})")
    with pytest.raises(FormatError, match=words):
        own.ask("names", path)
    assert own.ask("describe", path, name="x")[0]["shape"] == [100]


@pytest.mark.slow
def test_the_library_may_not_compute_for_ever(own, path, instead_of_names):
    instead_of_names("lambda path: [0 for _ in iter(int, 1)]")
    with pytest.raises(FormatError, match=r"a\.h5 is damaged: the HDF5 library did not come to"):
        own.ask("names", path, cpu_seconds=0.0)


def test_many_threads_may_ask_the_library_at_once(path):
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(Hdf5.names, [path] * 40):
            assert found == ["x"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_has_a_library_of_its_own(path, method):
    Hdf5.names(path)
    pid = pid_of(library)
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as process:
        assert process.submit(Hdf5.names, path).result(60) == ["x"]
    assert Hdf5.names(path) == ["x"]
    assert pid_of(library) == pid


PROGRAM = """
import sys, pathlib, os, signal, threading
from hyperslab.io.formats.hdf5 import Hdf5
from hyperslab.io.formats.hdf5.library import library
path = pathlib.Path(sys.argv[1])
Hdf5.names(path)
print(library._child._process.pid, flush=True)
if sys.argv[2] == "raise":
    raise SystemExit(3)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.every(3)
@pytest.mark.parametrize(("how", "status"), [("end", 0), ("raise", 3), ("kill", -9)])
def test_the_library_ends_with_the_program(path, how, status):
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (status, "")
    deadline = time.monotonic() + 60
    while is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(done.stdout))


def is_alive(pid):
    try:
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


@pytest.mark.slow
def test_ctrl_c_while_the_library_answers_leaves_it_usable(own, path):
    own.ask("names", path)
    os.kill(pid_of(own), signal.SIGSTOP)
    stopped = pid_of(own)
    timer = threading.Timer(
        0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        own.ask("names", path)
    timer.join()
    assert not is_alive(stopped)
    assert own.ask("names", path)[0]["names"] == ["x"]


def test_the_working_folder_may_be_gone(own, path, monkeypatch):
    folder = path.parent / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert own.ask("names", path)[0]["names"] == ["x"]


def test_files_whose_names_are_no_text_are_read(own, path):
    odd = path.with_name(os.fsdecode(b"caf\xe9 \n.h5"))
    path.rename(odd)
    assert own.ask("names", odd)[0]["names"] == ["x"]


def test_memory_and_time_are_limited():
    assert child.MAX_MEMORY > 2**30
    assert child.CPU_SECONDS >= 30
