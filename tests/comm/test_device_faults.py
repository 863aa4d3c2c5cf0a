"""Ranks that exchange on their GPUs and lose one: all stop in time, with words, and leave nothing.

Without a GPU the memory is that of the host, and kernels run in Triton's interpreter.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from host_gpus import use_host_gpus
from torch import nn

import hyperslab as hs
from hyperslab.comm import failure_report
from hyperslab.testing import Team, seeded

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TIMEOUT_SECONDS = 5.0
PROGRAM_SECONDS = 120.0
"""For programs, one rank of which may start much later: without a GPU a few seconds of polls."""
SLACK_SECONDS = 60.0
"""For other work on the machine, beyond the time-out."""
LAST_PASS = 3
REPLAYED = 5
"""The pass that goes wrong, where earlier ones were recorded."""
SPARE_NBYTES = 24 << 20
"""Less than two ranks share; the driver's own part of a GPU varies."""


def init(device, **axes):
    failure_report.REPORT_TIMEOUT_SECONDS = 0.3  # the dead have nothing to say
    if device == "cpu":
        use_host_gpus()
    mesh = hs.init(**axes, device=device, timeout_seconds=TIMEOUT_SECONDS, transport="device")
    assert mesh.transport is not None
    return mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x, between=lambda x: x):
        return self.conv(self.norm(between(self.conv(x))))


def same(x):
    return x


def pool(x):
    return F.avg_pool2d(x, 3, 1, 1)


def leave(x):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(x):
    time.sleep(TIMEOUT_SECONDS + 3)
    return x


def pool_otherwise(x):
    """An operator that no other rank runs, with halos of other shapes."""
    return F.avg_pool2d(x, 5, 1, 2)


def train(mesh, where, fault):
    """Training passes of which the last goes wrong."""
    torch.manual_seed(0)
    model = hs.parallelize(Net(), mesh)
    for number in range(1, LAST_PASS + 4):
        act = fault if number >= LAST_PASS else same
        x = hs.shard(seeded(2, 2, 12, 5, dtype=torch.float32).to(mesh.device), mesh)
        if where == "before forward":
            act(None)
        loss = model(x, act if where == "in forward" else same).square().mean()
        if where == "in backward":
            model.norm.weight.register_hook(lambda grad, act=act: act(grad))
        loss.backward()


class Pools(nn.Module):
    """Enough layers for a rank to be lost while a GPU is at them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        for layer in self.layers:
            x = F.avg_pool2d(layer(x), WINDOW[0], 1, WINDOW[0] // 2)
        return self.norm(x)


WINDOW = [3]
"""A global variable, which decides what ``Pools`` computes, and so what is recorded of it."""


def widen(_):
    WINDOW[0] = 5


def replay(mesh, where, fault):
    """Recorded training passes, of which one goes wrong."""
    torch.manual_seed(0)
    model = hs.parallelize(Pools(), mesh, cuda_graphs=True)
    extent = 1024 if mesh.device.type == "cuda" else 12
    x = hs.shard(torch.ones(1, 4, extent, extent, device=mesh.device), mesh)
    for number in range(1, 2 * REPLAYED):
        act = fault if number >= (2 if where == "when recorded" else REPLAYED) else same
        if where in ("before replay", "when recorded"):
            act(None)
        loss = model(x).square().mean()
        if where == "in replay":  # which was launched, and goes on
            act(None)
        loss.backward()
        if number == REPLAYED - 1 and mesh.device.type == "cuda":
            entries = model.__dict__["_hyperslab"].run.forward._entries.values()
            assert any(entry.recorded for each in entries for entry in each)


def exchange(mesh, where, fault):
    """Exchanges alone, which nothing accompanies that would miss a rank sooner."""
    x = hs.shard(seeded(2, 2, 12, 5).to(mesh.device), mesh)
    for number in range(1000):
        act = fault if number >= LAST_PASS else pool
        act(x)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()


def lose(body, device, odd, where, fault, axes):
    """The error on this rank, and how long after its last good pass it came."""
    mesh = init(device, **axes)
    begun = time.monotonic()
    try:
        body(mesh, where, fault if mesh.rank == odd else pool if body is exchange else same)
    except hs.CommError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


def errors_of(*args, num_ranks=2, odd, dies):
    with Team(num_ranks, timeout_seconds=200) as team:
        told = team.run(lose, *args, may_die=[odd] if dies else [])
    return [each for each in told if each is not None]


def assert_stopped(errors, num, words="lost contact while"):
    assert len(errors) == num
    for text, seconds in errors:
        assert words in text, text
        assert "\n" not in text
        assert seconds < TIMEOUT_SECONDS + SLACK_SECONDS


@pytest.fixture
def nothing_left():
    """Neither in shared memory, nor in files, nor on the GPU."""
    before, free = left_in_memory(), free_on_gpu()
    yield
    left, until = left_in_memory() - before, time.monotonic() + 20
    while (left or free_on_gpu() < free - SPARE_NBYTES) and time.monotonic() < until:
        time.sleep(0.2)
        left &= left_in_memory()
    assert left == set()
    assert free_on_gpu() >= free - SPARE_NBYTES


def left_in_memory():
    """Files by which processes share memory."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    patterns = ("hyperslab-host-gpu-*", "symm_mem*", "torch_*", "psm_*", "cuda.shm.*")
    return {path for folder in folders for pattern in patterns for path in folder.glob(pattern)}


def free_on_gpu():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@pytest.mark.slow
@pytest.mark.every(6)
@on_devices
@pytest.mark.parametrize("where", ["before forward", "in forward", "in backward"])
def test_a_rank_that_is_killed_is_missed_by_all(nothing_left, device, where):
    errors = errors_of(train, device, 1, where, leave, {"height": 3}, num_ranks=3, odd=1, dies=True)
    assert_stopped(errors, 2)


@on_devices
def test_a_rank_that_is_killed_between_exchanges_is_missed_within_the_time_out(
    nothing_left, device
):
    errors = errors_of(exchange, device, 1, "", leave, {"height": 2}, odd=1, dies=True)
    assert_stopped(errors, 1, "(rank 1 sent nothing in time)")


@pytest.mark.slow
@on_devices
def test_a_rank_that_never_signals_is_not_waited_for(nothing_left, device):
    errors = errors_of(train, device, 1, "in forward", hang, {"height": 2}, odd=1, dies=False)
    assert_stopped(errors, 2)


@on_devices
def test_ranks_that_post_different_messages_all_stop(nothing_left, device):
    errors = errors_of(exchange, device, 1, "", pool_otherwise, {"height": 2}, odd=1, dies=False)
    assert_stopped(errors, 2)
    assert any("sent something else than was awaited" in text for text, _ in errors)
    assert all("ranks ran different operators" in text for text, _ in errors)


@pytest.mark.gpu
def test_a_rank_that_is_killed_in_a_replay_is_missed(nothing_left):
    errors = errors_of(replay, "cuda", 1, "in replay", leave, {"height": 2}, odd=1, dies=True)
    assert_stopped(errors, 1)


@pytest.mark.gpu
def test_a_replay_does_not_wait_for_a_rank_that_never_signals(nothing_left):
    errors = errors_of(replay, "cuda", 1, "before replay", hang, {"height": 2}, odd=1, dies=False)
    assert_stopped(errors, 2)


@pytest.mark.gpu
def test_ranks_that_record_different_passes_all_stop(nothing_left):
    errors = errors_of(replay, "cuda", 1, "when recorded", widen, {"height": 2}, odd=1, dies=False)
    assert_stopped(errors, 2, "rank")
    assert any("ranks ran different operators" in text for text, _ in errors), errors


# Whole programs


PROGRAM = """
import os, signal
import torch
import hyperslab as hs
from hyperslab.comm import failure_report
from host_gpus import use_host_gpus

failure_report.REPORT_TIMEOUT_SECONDS = 0.3
if {device!r} == "cpu":
    use_host_gpus()
mesh = hs.init(height=2, device={device!r}, timeout_seconds={timeout}, transport="device")
x = hs.shard(torch.ones(1, 1, 8, 4, device={device!r}), mesh)
model = hs.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), mesh)
for step in range(6):
    loss = model(x).square().mean()
    if mesh.rank == 1 and step == 3:
        {fault}
    loss.backward()
"""


def run_program(folder, device, fault, environment):
    """The exit codes of two ranks that run ``PROGRAM``, and what each says."""
    text = PROGRAM.format(device=device, timeout=PROGRAM_SECONDS, fault=fault)
    (folder / "program.py").write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # as in tests
    environment = environment | place | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        limit = PROGRAM_SECONDS + 3 * SLACK_SECONDS  # to start, too
        errors = [process.communicate(timeout=limit)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], errors


def assert_ended(folder, device, environment=os.environ):
    codes, errors = run_program(
        folder, device, "os.kill(os.getpid(), signal.SIGKILL)", dict(environment)
    )
    assert codes == [1, -signal.SIGKILL]
    assert "hyperslab.errors.CommError: rank 0 lost contact while" in errors[0]


@pytest.mark.slow
@on_devices
def test_a_program_ends_by_itself_when_another_rank_was_killed(nothing_left, tmp_path, device):
    assert_ended(tmp_path, device)


@pytest.mark.slow
@on_devices
def test_a_program_that_is_well_ends_well(nothing_left, tmp_path, device):
    codes, errors = run_program(tmp_path, device, "pass", dict(os.environ))
    assert (codes, errors[1]) == ([0, 0], "")


@pytest.fixture
def mps(tmp_path):
    """The environment of processes that share the GPU under MPS."""
    folders = {"CUDA_MPS_PIPE_DIRECTORY": "pipes", "CUDA_MPS_LOG_DIRECTORY": "logs"}
    environment = os.environ | {name: str(tmp_path / each) for name, each in folders.items()}
    for each in folders.values():
        (tmp_path / each).mkdir()

    def control(*options, ask=None):
        command = ["nvidia-cuda-mps-control", *options]
        return subprocess.run(
            command, env=environment, input=ask, capture_output=True, text=True, timeout=60
        ).stdout

    control("-d")
    yield environment, lambda ask: control(ask=f"{ask}\n").split()
    control(ask="quit\n")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="no MPS")
def test_ranks_under_mps_end_too_and_mps_keeps_none_of_them(nothing_left, tmp_path, mps):
    environment, ask = mps
    assert_ended(tmp_path, "cuda", environment)
    servers = ask("get_server_list")
    assert {server: ask(f"get_client_list {server}") for server in servers} == {
        server: [] for server in servers
    }
