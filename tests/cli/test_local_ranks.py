import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hyperslab.cli import local_ranks
from hyperslab.cli.local_ranks import Ending, Outcome, rank_environ, run_ranks
from hyperslab.cli.rank_errors import RankError, first_cause, stopped_by

WAIT = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"

MEET = """
def arrive():
    with open(f"{rank}.tmp", "w") as file: file.write(str(os.getpid()))
    os.rename(f"{rank}.tmp", f"{rank}.pid")

def wait_for(other):
    while not os.path.exists(f"{other}.pid"): time.sleep(0.01)
    return int(open(f"{other}.pid").read())

def wait_for_end_of(other):
    pid = wait_for(other)
    while True:
        try: os.kill(pid, 0)
        except ProcessLookupError: return  # whoever watches it has seen its end
        time.sleep(0.01)
"""
"""For ranks that wait for each other in the working folder."""


def ranks(program, num_ranks=2, **how):
    """Runs ``program``, as Python, on so many ranks."""
    return run_ranks([sys.executable, "-IS", "-c", WAIT + program], num_ranks, **how)


def endings(program, num_ranks=2, **how):
    return [(e.rank, e.code) for e in ranks(program, num_ranks, **how).endings]


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_alive(pid):
    with suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Starting


def test_ranks_find_their_place_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = f"import json; json.dump(dict(os.environ), open(r'{tmp_path}/' + str(rank), 'w'))"
    assert sorted(endings(program, 3)) == [(0, 0), (1, 0), (2, 0)]
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == list("012")
    for name, value in {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        assert {each[name] for each in found} == {value}
    assert len({each["MASTER_PORT"] for each in found}) == 1
    assert "TORCHELASTIC_RUN_ID" not in found[0]


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(local_ranks, "find_machine", lambda: {"cpu_cores": 8.0})
    assert rank_environ({}, 0, 2, 1)["OMP_NUM_THREADS"] == "4"
    assert rank_environ({}, 0, 16, 1)["OMP_NUM_THREADS"] == "1"
    assert rank_environ({"OMP_NUM_THREADS": "7"}, 0, 2, 1)["OMP_NUM_THREADS"] == "7"


# Ending


def test_the_exit_code_of_a_run_that_can_go_on_passes_through():
    outcome = ranks("sys.exit(75)")
    assert not any(ending.is_failure for ending in outcome.endings)
    assert {ending.code for ending in outcome.endings} == {75}


def test_when_a_rank_dies_the_others_have_a_while_to_end_of_themselves(own_folder):
    program = "if rank: arrive(); os.kill(os.getpid(), 9)\nwait_for_end_of(1); sys.exit(1)"
    assert endings(MEET + program) == [(1, -9), (0, 1)]


def test_who_does_not_end_is_asked_then_killed(monkeypatch, own_folder):
    monkeypatch.setattr(local_ranks, "KILL_SECONDS", 1.0)
    program = (
        "if rank == 0: wait_for(1); wait_for(2); sys.exit(3)\n"
        "if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "arrive(); time.sleep(600)"
    )
    outcome = ranks(MEET + program, 3, grace_seconds=0.1)
    assert [(e.rank, e.code, e.was_asked) for e in outcome.endings] == [
        (0, 3, False),
        (1, -signal.SIGTERM, True),
        (2, -signal.SIGKILL, True),
    ]
    assert first_cause(outcome, []).startswith("rank 0 ended with exit code 3")


def test_a_rank_that_has_done_its_work_does_not_hurry_the_others(own_folder):
    program = "arrive()\nif rank: wait_for_end_of(0); time.sleep(0.1)"
    assert endings(MEET + program, grace_seconds=0.01) == [(0, 0), (1, 0)]


# Signals

SUPERVISED = (
    "import sys; from hyperslab.cli.local_ranks import run_ranks\n"
    "out = run_ranks([sys.executable, '-IS', '-c', sys.argv[1]], 2)\n"
    "print([e.code for e in out.endings], out.passed_on, flush=True)"
)
NOTES = WAIT + (
    "def note(number, frame):\n"
    "    print(signal.Signals(number).name, file=open(f'{rank}.log', 'a'))\n"
    "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, note)\n"
    "print(os.getpid(), file=open(f'{rank}.tmp', 'w')); os.rename(f'{rank}.tmp', f'{rank}.pid')\n"
    "while not os.path.exists('stop'): time.sleep(0.02)\n"
    "sys.exit(75)"
)


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """A process that watches two ranks, which write down the signals they get."""
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, NOTES], stdout=subprocess.PIPE, process_group=0
    )
    wait_for(lambda: Path("0.pid").exists() and Path("1.pid").exists())
    with process:
        yield process
        process.kill()


def rank_pids():
    return [int(Path(f"{rank}.pid").read_text()) for rank in range(2)]


def logs():
    return [Path(f"{r}.log").read_text().split() if Path(f"{r}.log").exists() else [] for r in "01"]


def test_signals_reach_every_rank_once_even_if_sent_to_the_group(supervised):
    os.killpg(supervised.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    wait_for(lambda: logs() == [["SIGINT"]] * 2)
    supervised.send_signal(signal.SIGUSR1)
    wait_for(lambda: logs() == [["SIGINT", "SIGUSR1"]] * 2)
    Path("stop").touch()
    assert supervised.communicate()[0].strip() == b"[75, 75] ['SIGINT', 'SIGUSR1']"
    assert logs() == [["SIGINT", "SIGUSR1"]] * 2


def test_who_is_asked_three_times_to_stop_stops_now(supervised):
    for number in range(1, 3):
        supervised.send_signal(signal.SIGTERM)
        wait_for(lambda number=number: logs() == [["SIGTERM"] * number] * 2)
    supervised.send_signal(signal.SIGTERM)
    assert supervised.communicate()[0].startswith(b"[-9, -9]")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_no_rank_outlives_the_process_that_started_it(supervised):
    pids = rank_pids()
    assert all(map(is_alive, pids))
    supervised.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_an_error_in_the_watching_process_leaves_no_rank(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def fail(*arguments):
        wait_for(lambda: Path("0.pid").exists() and Path("1.pid").exists())
        raise RuntimeError("no")

    monkeypatch.setattr(local_ranks._RankProcesses, "watch", fail)
    with pytest.raises(RuntimeError, match="no"):
        run_ranks([sys.executable, "-IS", "-c", NOTES], 2)
    assert not any(map(is_alive, rank_pids()))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_that_come_while_the_process_ends_are_ignored_if_asked_for():
    program = (
        "import os, signal, sys; from hyperslab.cli.local_ranks import run_ranks\n"
        "run_ranks([sys.executable, '-IS', '-c', ''], 1, until_exit=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# What is told of it


def error(rank, text, *, about_others=False):
    return RankError(rank, text, about_others)


def cause(codes, *errors, passed_on=()):
    return first_cause(Outcome([Ending(*pair) for pair in codes.items()], list(passed_on)), errors)


def test_an_error_that_all_ranks_raise_is_told_once():
    assert cause({0: 1, 1: 1}, error(0, "no file"), error(1, "no file")) == "no file"


def test_an_error_of_one_rank_names_it_and_comes_before_those_about_it():
    others = error(0, "rank 1 stopped, and so do all: FormatError: short", about_others=True)
    assert cause({0: 1, 1: 1}, others, error(1, "short")) == "rank 1: short"


def test_a_killed_rank_comes_before_what_others_say_of_it():
    others = error(0, "rank 0 lost contact", about_others=True)
    told = cause({1: -9, 0: 1}, others)
    assert told.startswith("rank 1 was killed by SIGKILL, by someone or because memory ran out")
    assert cause({1: -11, 0: 1}, others).startswith("rank 1 was killed by SIGSEGV")
    assert cause({1: -63, 0: 1}, others).startswith("rank 1 was killed by signal 63")


def test_ranks_that_only_tell_of_others_are_heard_if_nobody_else_is():
    assert cause({0: 1, 1: 0}, error(0, "ranks differ", about_others=True)) == "ranks differ"


def test_a_rank_that_left_too_early_is_named():
    lost = error(0, "rank 0 lost contact", about_others=True)
    early = "rank 1 ended early, with exit code 0, while others were still at work"
    assert cause({1: 0, 0: 1}, lost) == early
    assert cause({1: 0, 0: 1}, error(0, "no file")) == "rank 0: no file"


@pytest.mark.parametrize(
    ("codes", "passed_on", "told", "by"),
    [
        ({0: 130, 1: -2}, ["SIGINT"], [], "SIGINT"),
        ({0: -15, 1: -15}, ["SIGUSR1", "SIGTERM"], [], "SIGTERM"),
        ({0: 75, 1: -15}, ["SIGTERM"], [], "SIGTERM"),
        ({0: -9, 1: -9}, ["SIGTERM", "SIGINT", "SIGTERM"], [], "SIGTERM"),
        ({0: 1, 1: -15}, ["SIGTERM"], [error(0, "lost contact", about_others=True)], "SIGTERM"),
        ({0: 1, 1: -15}, ["SIGTERM"], [error(0, "no file")], None),
        ({0: -9, 1: -15}, ["SIGTERM"], [], None),
        ({0: 1, 1: 1}, ["SIGTERM"], [error(0, "no file"), error(1, "no file")], None),
        ({0: -15, 1: -15}, [], [], None),
    ],
)
def test_ranks_that_a_signal_ended_before_they_could_stop_well_have_not_failed(
    codes, passed_on, told, by
):
    outcome = Outcome([Ending(*pair) for pair in codes.items()], passed_on)
    assert stopped_by(outcome, told) == by


def test_a_rank_that_was_killed_comes_before_errors_that_others_then_had():
    told = cause({1: -signal.SIGKILL, 0: 1}, error(0, "a file is missing"))
    assert told == "rank 1 was killed by SIGKILL, by someone or because memory ran out"
