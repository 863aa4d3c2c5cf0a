"""How tests run: on ranks, with the same examples every time, the slow ones apart.

Tests marked ``ranks`` run on processes that live until the session ends.

``ranks(2)`` runs the test on two of them; ``ranks`` alone on as many as the mesh ``axes``, an
argument of the test, asks for. The test's module is loaded there, and its arguments are pickled.
State lives on from one test to the next: what a test changes, it must restore there, as by
``pytest.MonkeyPatch.context()``. After a failure the next test gets new processes.

``make test`` leaves out what is marked ``slow``, and of a test marked ``every(4)`` all cases but
each fourth; ``make test-all`` runs the rest.

Hypothesis draws the same examples in every run, so that a verdict does not change by itself.
``make fuzz`` looks for new ones.
"""

import gc
import math
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from hyperslab.testing import Team
from hyperslab.testing.server import seed_random_numbers

# Before torch is loaded: its threads would only wait for each other on tensors as small as here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a process knows that it is one of several."""

# A shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPERSLAB_EXAMPLES", "repeatable"))

_stack = ExitStack()
# What a user of this machine has measured must not change verdicts.
os.environ["XDG_CACHE_HOME"] = _stack.enter_context(tempfile.TemporaryDirectory("-cache"))
_teams = {}


def _team(num_ranks):
    if num_ranks not in _teams:
        _teams[num_ranks] = _stack.enter_context(Team(num_ranks, timeout_seconds=300))
    return _teams[num_ranks]


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(num): runs on live processes, see tests/conftest.py")
    config.addinivalue_line("markers", "every(n): of n cases only the first is not slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in items:
        marker = item.get_closest_marker("every")
        if marker and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_runtest_setup(item):
    seed_random_numbers()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    assert "monkeypatch" not in names, "it would be undone here, not on the ranks"
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    num_ranks = marker.args[0] if marker.args else math.prod(arguments["axes"].values())
    _team(num_ranks).run(pyfuncitem.obj, **arguments)
    return True


def pytest_collection_finish():
    # All that was imported stays: looking through it for garbage takes half a second each time.
    gc.freeze()


def pytest_sessionfinish():
    _stack.close()


@pytest.fixture
def no_live_processes():
    """Ends them, for a test that kills the server they come from; later tests get new ones."""
    for team in _teams.values():
        team.close()


class DiskLog:
    """In which order this process put files and folders on the disk and gave them their names."""

    def __init__(self):
        self._events = []

    def spied_fsync(self, fsync):
        def spy(fd):
            fsync(fd)
            self._events.append(_state(os.fstat(fd)))

        return spy

    def spied_rename(self, rename):
        def spy(source, target, **kwargs):
            rename(source, target, **kwargs)
            self._events.append(Path(target).name)

        return spy

    def when_synced(self, path):
        """Its place in the order; a sync of a file that had another size then does not count."""
        return self._last(_state(path.stat()))

    def when_named(self, path):
        return self._last(path.name)

    def _last(self, event):
        assert event in self._events, f"{event} never happened: {self._events}"
        return len(self._events) - 1 - self._events[::-1].index(event)


def _state(status):
    return status.st_ino, None if stat.S_ISDIR(status.st_mode) else status.st_size


@pytest.fixture
def disk_log(monkeypatch):
    log = DiskLog()
    monkeypatch.setattr(os, "fsync", log.spied_fsync(os.fsync))
    monkeypatch.setattr(os, "rename", log.spied_rename(os.rename))
    monkeypatch.setattr(os, "replace", log.spied_rename(os.replace))
    return log


@pytest.fixture(scope="session")
def team_of():
    """The live processes: ``team_of(4).run(body, ...)`` runs ``body`` on four of them."""
    return _team


@pytest.fixture(scope="session")
def run(team_of):
    """``run(place, body, *args)`` runs ``body(place, *args)`` on the ranks of the place's mesh."""

    def run(place, body, *args):
        __tracebackhide__ = True
        return team_of(place.num_ranks).run(body, place, *args)

    return run


@pytest.fixture(scope="session")
def run_python():
    """Runs ``python *arguments`` in a folder and returns what ``subprocess.run`` would.

    The process is a fork of one that has torch loaded, which saves seconds where the start of a
    program is not what is tested. ``arguments`` begin with a file, or with ``-m`` and a module.
    ``num_ranks`` processes find the variables of torchrun, and the answer is a list.
    """

    def run(*arguments, cwd, num_ranks=None, timeout_seconds=400):
        with Team(num_ranks or 1, timeout_seconds) as team:
            done = team.run(_play, [str(each) for each in arguments], cwd, bool(num_ranks))
        return done if num_ranks else done[0]

    return run


def _play(arguments, folder, is_launched):
    """What came of ``python *arguments``; it knows of other ranks only if it is launched as one."""
    os.chdir(folder)
    if not is_launched:
        for name in LAUNCHED:
            del os.environ[name]
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code = _run_main(arguments)
        printed = []
        for stream, file in ((sys.stdout, out), (sys.stderr, err)):
            stream.flush()
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess(arguments, code, *printed)


def _run_main(arguments):
    """The exit code of the program, which runs as ``__main__``."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - as Python tells of it
        traceback.print_exc()
        return 1
    return 0
