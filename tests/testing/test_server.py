import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyperslab.testing import Team
from hyperslab.testing.rank_processes import ServerError, connect


def num_threads(pid):
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def cuda_is_initialized():
    import torch

    return torch.cuda.is_initialized()


def test_all_teams_of_a_process_share_one_server():
    with Team(1) as one, Team(2) as two:
        assert len(set(one.run(os.getppid) + two.run(os.getppid))) == 1


def test_the_server_has_one_thread_and_no_cuda():
    with Team(1) as team:
        (server,) = team.run(os.getppid)
        assert num_threads(server) == 1
        assert team.run(cuda_is_initialized) == [False]


@pytest.mark.usefixtures("no_live_processes")
@pytest.mark.slow
def test_a_new_server_takes_over_from_a_killed_one():
    with Team(2) as team:
        (server, _) = team.run(os.getppid)
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerError, match="was killed"):
            team.run(os.getpid)
        assert server not in team.run(os.getppid)
        assert connect().usable


CALLER = """
import os, signal, sys, time
from hyperslab.testing import Team

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs us behind

def sleep(seconds):
    time.sleep(seconds)

if __name__ == "__main__":
    with Team(2) as team:
        print(*team.run(os.getpid), *set(team.run(os.getppid)), flush=True)
        if "leave" in sys.argv:
            sys.exit(team.run(sleep, 0) != [None, None])
        team.run(sleep, 600)
"""


def start_a_sleeper():
    return subprocess.Popen(["sleep", "600"]).pid


def is_running(pid):
    try:
        # A zombie whose new parent is slow to reap it is as good as gone.
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def output_folder(pid):
    return Path(f"/proc/{pid}/fd/1").readlink().parent


def assert_gone(pids):
    deadline = time.monotonic() + 60
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.01)


def command(folder, *words):
    """Starts ``CALLER``."""
    (folder / "caller.py").write_text(CALLER)
    return [sys.executable, str(folder / "caller.py"), *words]


@pytest.fixture
def caller(torch_free):
    """A process with two busy ranks, and the ids of the ranks and of their server."""
    with subprocess.Popen(command(torch_free), stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        yield process, pids
        process.kill()


def test_no_process_and_no_file_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Team(2) as team:
        pids = team.run(os.getpid) + team.run(start_a_sleeper)
        assert list(tmp_path.iterdir())
    assert_gone(pids)
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_with_block_is_not_replaced():
    pids = []
    with pytest.raises(ZeroDivisionError):
        divide_by_zero_beside_a_rank(pids)
    assert_gone(pids)


def divide_by_zero_beside_a_rank(pids):
    with Team(1) as team:
        pids += team.run(os.getpid)
        assert 1 / 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_killed_caller(caller, signum):
    process, pids = caller
    folder = output_folder(pids[0])
    assert folder.exists()
    process.send_signal(signum)
    assert_gone(pids)
    assert not folder.exists()


def test_no_rank_outlives_a_killed_server(caller):
    process, (*ranks, server) = caller
    os.kill(server, signal.SIGKILL)
    assert_gone(ranks)
    assert process.wait(60) == 1


def test_a_script_may_run_its_own_functions(torch_free):
    leaving = command(torch_free, "leave")
    pids = subprocess.run(leaving, capture_output=True, text=True, check=True).stdout.split()
    assert_gone([int(pid) for pid in pids])
