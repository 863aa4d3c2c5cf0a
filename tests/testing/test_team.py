import os
import random
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from hyperslab.testing import RankError, Team, rank_processes
from hyperslab.testing.messages import Died, Raised
from hyperslab.testing.rank_processes import first_failure


@dataclass
class Point:
    x: int


def my_rank():
    return int(os.environ["RANK"])


def environment():
    return dict(os.environ)


def drawn():
    return random.random(), float(torch.rand(()))


def draw_more():
    return random.random(), torch.rand(5)


def negative(x):
    return -x


def shifted(point, by):
    return Point(point.x + by + my_rank())


def summed(value):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    x = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(x)
    return x


def has_process_group():
    return dist.is_initialized()


def raise_on(rank):
    if my_rank() == rank:
        raise ValueError(f"from rank {rank}")


def raise_if_at_least(value, limit):
    assert value < limit


def exit_on(rank, code):
    if my_rank() == rank:
        os._exit(code)


def kill_on(rank, signum):
    if my_rank() == rank:
        os.kill(os.getpid(), signum)
    return my_rank()


def reduce_without_rank_1():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def wait_for_ever():
    threading.Event().wait()


def wait_for_ever_on_rank_0(folder):
    if my_rank() == 0:
        (folder / "waiting").touch()
        wait_for_ever()
    wait_for(folder / "waiting")


def print_then_raise_on_0(folder):
    print("x" * 3000 + f"out of rank {my_rank()}")
    print(f"error of rank {my_rank()}", file=sys.stderr)
    if my_rank() == 0:
        wait_for(folder / "printed")
        raise_on(0)
    (folder / "printed").touch()


def wait_for(path):
    while not path.exists():
        time.sleep(0.005)


def warn():
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def unpicklable():
    return threading.Lock()


def working_folder():
    return Path.cwd()


@pytest.fixture(scope="module")
def pair():
    with Team(2) as team:
        yield team


def test_results_come_back_by_rank(pair):
    assert pair.run(my_rank) == [0, 1]


def test_arguments_and_results_may_be_of_classes_from_the_test_file(pair):
    assert pair.run(shifted, Point(3), by=10) == [Point(13), Point(14)]


def test_tensors_travel_by_value(pair):
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    for result in pair.run(negative, x):
        assert torch.equal(result, -x)


def test_ranks_find_the_environment_of_torchrun():
    with Team(3) as team:
        for rank, seen in enumerate(team.run(environment)):
            assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank)
            assert seen["WORLD_SIZE"] == seen["LOCAL_WORLD_SIZE"] == "3"
            assert seen["MASTER_ADDR"] == "127.0.0.1"
            assert 1024 <= int(seen["MASTER_PORT"]) < 65536
            assert seen["OMP_NUM_THREADS"] == "1"
            assert seen["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert team.run(torch.get_num_threads) == [1, 1, 1]


def test_ranks_see_the_callers_variables_and_folder_as_they_are_now(pair, monkeypatch, tmp_path):
    pair.run(my_rank)
    monkeypatch.setenv("HYPERSLAB_TEST", "late")
    monkeypatch.chdir(tmp_path)
    with Team(1) as team:
        assert team.run(os.getenv, "HYPERSLAB_TEST") == ["late"]
        assert team.run(working_folder) == [tmp_path]


def test_a_process_group_outlives_the_run_that_made_it(pair):
    assert not any(pair.run(has_process_group))
    assert [x.item() for x in pair.run(summed, 5)] == [11, 11]
    pids = pair.run(os.getpid)
    assert all(pair.run(has_process_group))
    assert pair.run(os.getpid) == pids


def test_what_a_run_draws_does_not_depend_on_the_runs_before_it(pair):
    first = pair.run(drawn)
    pair.run(draw_more)
    assert pair.run(drawn) == first


def test_two_teams_at_once_keep_to_themselves(pair):
    with Team(3) as other:
        assert [x.item() for x in other.run(summed, 0)] == [3, 3, 3]
        assert [x.item() for x in pair.run(summed, 0)] == [1, 1]


@settings(max_examples=100, deadline=None)
@given(value=st.integers(-(2**40), 2**40))
def test_hypothesis_drives_a_live_team(pair, value):
    assert [x.item() for x in pair.run(summed, value)] == [2 * value + 1] * 2


def test_hypothesis_shrinks_over_new_teams(pair):
    @settings(max_examples=200, deadline=None)
    @given(value=st.integers(0, 1000))
    def check(value):
        failing.append(value)
        pair.run(raise_if_at_least, value, 17)

    failing = []
    with pytest.raises(RankError, match="assert value < limit"):
        check()
    assert failing[-1] == 17


def test_a_rank_that_raises_is_named_with_its_traceback(pair):
    with pytest.raises(RankError) as caught:
        pair.run(raise_on, 1)
    assert str(caught.value).startswith("rank 1 of 2 raised ValueError: from rank 1\n")
    assert 'raise ValueError(f"from rank {rank}")' in str(caught.value)
    assert "hyperslab/testing" not in str(caught.value).replace(__file__, "")


def test_the_first_to_raise_gives_the_failure():
    failed = {rank: Raised(when=3.0 - rank, summary="", traceback="") for rank in range(3)}
    assert first_failure(failed) == (2, failed[2])
    assert first_failure(failed | {1: Died(3)}) == (1, Died(3))


def test_ranks_that_wait_for_ever_are_not_waited_for_once_one_has_raised(pair):
    with pytest.raises(RankError, match="rank 0 of 2 raised"):
        pair.run(raise_on_0_and_wait_for_ever)


def raise_on_0_and_wait_for_ever():
    raise_on(0)
    wait_for_ever()


def test_a_team_recovers_on_new_processes(pair):
    before = pair.run(os.getpid)
    with pytest.raises(RankError):
        pair.run(raise_on, 0)
    assert not set(before) & set(pair.run(os.getpid))
    assert not any(pair.run(has_process_group))


def test_a_rank_that_exits_is_named_with_its_code(pair):
    with pytest.raises(RankError, match=r"^rank 1 died with exit code 3$"):
        pair.run(exit_on, 1, 3)


def test_a_rank_that_is_killed_is_named_with_the_signal(pair):
    with pytest.raises(RankError, match=r"^rank 0 died with signal 9 \(SIGKILL\)$"):
        pair.run(kill_on, 0, signal.SIGKILL)


def test_a_crash_shows_where_python_was(pair):
    with pytest.raises(RankError, match=r"rank 1 died with signal 11(?s:.*)in kill_on"):
        pair.run(kill_on, 1, signal.SIGSEGV)


def test_a_death_is_blamed_rather_than_the_errors_it_causes(pair):
    with pytest.raises(RankError, match=r"^rank 1 died with exit code 3"):
        pair.run(reduce_without_rank_1)


def test_a_death_between_runs_is_reported_by_the_next(pair):
    os.kill(pair.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died with signal 9"):
        pair.run(my_rank)


def test_a_rank_may_die_when_it_is_told_so():
    with Team(3) as team:
        assert team.run(kill_on, 1, signal.SIGKILL, may_die=[1]) == [0, None, 2]
        assert team.run(my_rank) == [0, 1, 2]


def test_a_rank_that_may_die_may_not_raise(pair):
    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError"):
        pair.run(raise_on, 1, may_die=[1])


@pytest.fixture
def time_is_up_when_one_is_left(monkeypatch):
    """The time-out strikes when all ranks but one have answered, however long that takes."""

    def answers(connections, seconds):
        server_and_one_rank = 2
        return [] if len(connections) == server_and_one_rank else wait(connections)

    monkeypatch.setattr(rank_processes, "wait", answers)


def test_a_deadlock_shows_the_stack_of_each_stuck_rank(tmp_path, time_is_up_when_one_is_left):
    with Team(3) as team, pytest.raises(RankError) as caught:
        team.run(wait_for_ever_on_rank_0, tmp_path)
    message = str(caught.value)
    assert message.startswith("rank 0 of 3 still running after 300 s\n")
    assert "in wait_for_ever_on_rank_0" in message
    assert "rank 1" not in message


def test_the_time_out_ends_a_run():
    with Team(2, timeout_seconds=0.1) as team, pytest.raises(RankError) as caught:
        team.run(wait_for_ever)
    assert str(caught.value).startswith("rank 0, 1 of 2 still running after 0.1 s")


def test_what_the_ranks_printed_is_shown_after_a_failure(pair, tmp_path):
    with pytest.raises(RankError) as caught:
        pair.run(print_then_raise_on_0, tmp_path)
    message = str(caught.value)
    for rank in range(2):
        printed = message.partition(f"--- rank {rank} printed ---\n")[2]
        assert "out of rank" in printed
        assert f"error of rank {rank}" in printed
    assert len(message) < 5500


def test_a_warning_is_an_error_on_a_rank_where_it_is_one_in_the_test(pair):
    with pytest.raises(RankError, match="raised DeprecationWarning: old"):
        pair.run(warn)


def test_an_expected_warning_is_none_of_the_ranks_business(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert pair.run(warn) == [None, None]


def test_a_nested_function_is_refused(pair):
    def nested():
        pass

    with pytest.raises(TypeError, match=r"ranks cannot find .*nested: pass a function from"):
        pair.run(nested)


def test_an_argument_that_cannot_be_pickled_is_refused(pair):
    pids = pair.run(os.getpid)
    with pytest.raises(
        TypeError, match=r"^arguments of shifted cannot be sent to the ranks: .*lock"
    ):
        pair.run(shifted, threading.Lock(), 1)
    assert pair.run(os.getpid) == pids


def test_a_result_that_cannot_be_pickled_is_refused(pair):
    with pytest.raises(RankError, match=r"unpicklable returned what cannot be sent: .*lock"):
        pair.run(unpicklable)


def test_a_team_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        Team(0)


@pytest.mark.slow
def test_a_file_that_makes_a_team_when_it_is_loaded_is_refused(tmp_path, run_python):
    (tmp_path / "unguarded.py").write_text(
        "import os\nfrom hyperslab.testing import Team\n\n\n"
        "def body():\n    return os.getpid()\n\n\n"
        "Team(2).run(body)\n"
    )
    done = run_python("unguarded.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "put that under if __name__ == '__main__':" in done.stderr
