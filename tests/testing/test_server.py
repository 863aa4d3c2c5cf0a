import os
import signal
from pathlib import Path

import pytest

from hyperslab.testing import Team
from hyperslab.testing.client import ServerError, connect


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
