"""What goes wrong on one rank stops all of them, soon and with words; nobody waits for ever."""

import functools
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.comm import failure_report, join
from hyperslab.testing import Team, seeded

PATIENT_SECONDS = 100
"""No rank waits as long: who dies is missed at once."""
HASTY_SECONDS = 4
"""What others wait for a rank that lives and does not answer."""
SHAPE = (2, 2, 12, 5)


def init(timeout_seconds=PATIENT_SECONDS, **axes):
    return hs.init(**axes, device="cpu", timeout_seconds=timeout_seconds)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x, between=lambda: None):
        x = self.conv(x)
        between()
        return self.conv(self.norm(x))


def leave_by_exit():
    os._exit(3)


def leave_by_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_by_error():
    """As a script ends that does not catch an error."""
    try:
        raise ValueError("a bad sample")
    except ValueError:
        os._exit(1)


def hang():
    time.sleep(HASTY_SECONDS + 1)


LEAVING = [leave_by_exit, leave_by_kill, leave_by_error]


def caught(function):
    """The error that ``function`` ends with, as a type and text."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shall see it
        return type(error).__name__, str(error)
    return "nothing", ""


def run_with_a_loss(body, num_ranks, lost, **kwargs):
    """The errors of the ranks that are left when rank ``lost`` dies in ``body``."""
    with Team(num_ranks) as team:
        return [each for each in team.run(body, lost=lost, may_die=[lost], **kwargs) if each]


def assert_told(errors, num_ranks, words, timeout_seconds=PATIENT_SECONDS):
    why = f"another rank died, raised an error or did not answer within {timeout_seconds} s"
    assert len(errors) == num_ranks
    for kind, text in errors:
        assert kind == "CommError", (kind, text)
        assert words in text
        assert why in text


# A rank dies


def train(mesh, leave, where):
    """Training steps of which the third is cut short."""
    torch.manual_seed(0)
    model = hs.parallelize(Net(), mesh)
    for step in range(5):
        now = leave if step == 2 else lambda: None
        x = hs.shard(seeded(*SHAPE, dtype=torch.float32), mesh)
        if where == "before forward":
            now()
        out = model(x, now if where == "in forward" else lambda: None)
        loss = out.square().mean()
        if where == "before backward":
            now()
        if where == "in backward":
            hook = model.conv.weight.register_hook(lambda grad, now=now: now())
        loss.backward()
        if where == "in backward":
            hook.remove()


def train_and_lose(lost, how, where, axes):
    failure_report.REPORT_TIMEOUT_SECONDS = 0.3  # the dead have nothing to say
    mesh = init(HASTY_SECONDS if how is hang else PATIENT_SECONDS, **axes)
    return caught(lambda: train(mesh, how if mesh.rank == lost else lambda: None, where))


@pytest.mark.parametrize("how", LEAVING)
def test_a_rank_that_dies_in_an_exchange_is_missed_by_its_neighbours(how):
    errors = run_with_a_loss(
        train_and_lose, 2, lost=1, how=how, where="in forward", axes={"height": 2}
    )
    assert_told(errors, 1, "rank 0 lost contact while gathering over height")


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("where", "lost"), [("before forward", 2), ("before backward", 0), ("in backward", 2)]
)
def test_whenever_a_rank_dies_all_others_stop_with_words(where, lost):
    errors = run_with_a_loss(
        train_and_lose, 3, lost=lost, how=leave_by_kill, where=where, axes={"height": 3}
    )
    assert_told(errors, 2, "lost contact while")


@pytest.mark.every(2)
@pytest.mark.parametrize("how", [leave_by_kill, hang])
def test_a_rank_that_is_lost_while_gradients_are_averaged_is_missed_by_all(how):
    errors = run_with_a_loss(train_and_lose, 2, lost=1, how=how, where="in backward", axes={})
    timeout_seconds = HASTY_SECONDS if how is hang else PATIENT_SECONDS
    assert_told(errors[:1], 1, "rank 0 lost contact while averaging gradients", timeout_seconds)


def exchange_and_lose(lost, what):
    failure_report.REPORT_TIMEOUT_SECONDS = 0.3  # the dead have nothing to say
    mesh = init(height=2)
    x = hs.shard(seeded(*SHAPE), mesh)
    run = {
        "halo": lambda: F.avg_pool2d(x, 3, 1, 1),
        "sum": lambda: x.sum(),
        "norm": lambda: F.instance_norm(x),
        "shard": lambda: hs.shard(seeded(*SHAPE), mesh),
        "init": lambda: init(sample=2),
        "parallelize": lambda: hs.parallelize(Net(), mesh),
    }[what]
    if what != "parallelize":
        run()
    if mesh.rank == lost:
        leave_by_kill()
    return caught(run)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("halo", "fetching its part of a split tensor"),
        ("sum", "summing over height"),
        ("norm", "gathering over height"),
        ("shard", "comparing the tensors given to shard"),
        ("parallelize", "comparing the module given to parallelize"),
    ],
)
def test_the_words_say_what_was_being_done(what, words):
    errors = run_with_a_loss(exchange_and_lose, 2, lost=1, what=what)
    assert_told(errors, 1, f"rank 0 lost contact while {words}")


def test_a_rank_that_died_is_missed_when_another_mesh_is_made():
    [(kind, text)] = run_with_a_loss(exchange_and_lose, 2, lost=1, what="init")
    assert kind == "CommError"
    assert f"rank 0 did not meet the others within {PATIENT_SECONDS} s: another rank died" in text


# A rank hangs


def exchange_with_a_sleeper(what):
    mesh = init(HASTY_SECONDS, height=2)
    x = hs.shard(seeded(*SHAPE), mesh)
    if mesh.rank == 1:
        hang()
    run = {"halo": lambda: F.avg_pool2d(x, 3, 1, 1), "sum": lambda: x.sum()}[what]
    return caught(lambda: [run() for _ in range(2)])


@pytest.mark.slow
@pytest.mark.every(2)
@pytest.mark.parametrize("what", ["halo", "sum"])
def test_a_rank_that_sleeps_too_long_is_not_waited_for(what):
    with Team(2) as team:
        errors = team.run(exchange_with_a_sleeper, what)
    assert_told(errors, 2, "lost contact while", HASTY_SECONDS)


# A rank does not come


def init_without(missing, how):
    rank = int(os.environ["RANK"])
    if rank != missing:
        return caught(lambda: init(HASTY_SECONDS, height=2))
    if how == "error":
        with pytest.raises(hs.ConfigError, match="height=3 needs 3 ranks, but there are 2"):
            init(sample=1, height=3)
    return None


@pytest.mark.slow
@pytest.mark.every(20)
@pytest.mark.parametrize(("missing", "how"), [(0, "absent"), (1, "error")])
def test_a_rank_that_does_not_come_is_not_waited_for(missing, how):
    with Team(2) as team:
        kind, text = team.run(init_without, missing, how)[1 - missing]
    assert kind == "CommError"
    assert f"rank {1 - missing} of 2 did not meet the others at 127.0.0.1:" in text
    assert f"within {HASTY_SECONDS} s: a rank died, raised an error or was not started" in text


# Another program listens where rank 0 should


def init_at(port):
    os.environ["MASTER_PORT"] = str(port)
    join.ANSWER_SECONDS = 0.2
    return caught(lambda: hs.init(height=2, device="cpu"))


def test_a_port_in_use_stops_all_ranks_and_is_told_first():
    """Torch alone tells it of rank 0, and rank 1 waits for an answer without end."""
    with socket.create_server(("127.0.0.1", 0)) as other, Team(2) as team:
        port = other.getsockname()[1]
        errors = team.run(init_at, port)
    causes = ("rank 0 cannot listen there", "what listens there does not answer as rank 0 would")
    for (kind, text), cause in zip(errors, causes, strict=True):
        assert kind == "ConfigError"
        assert text.startswith(f"port {port} of 127.0.0.1 is in use by another program")
        assert f"{cause}; end that program, or set MASTER_PORT to a free port" in text


# Whole programs


PROGRAM = """
import os, signal
import torch
import hyperslab as hs
from hyperslab.comm import failure_report

failure_report.REPORT_TIMEOUT_SECONDS = 0.3
torch.manual_seed(0)
mesh = hs.init(height=2, device="cpu", timeout_seconds=60)
x = hs.shard(torch.ones(1, 1, 8, 4), mesh)
model = hs.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), mesh)
for step in range(6):
    loss = model(x).square().mean()
    if mesh.rank == 1 and step == 3:
        {fault}
    loss.backward()
"""


def run_program(tmp_path, fault):
    """The exit codes and errors of two ranks that run ``PROGRAM``."""
    (tmp_path / "program.py").write_text(PROGRAM.format(fault=fault))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | place | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], errors


@pytest.mark.slow
def test_a_program_that_is_well_ends_well(tmp_path):
    assert run_program(tmp_path, "pass") == ([0, 0], ["", ""])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("raise ValueError('bad')", 1)],
)
def test_a_program_ends_by_itself_when_another_rank_has_died(tmp_path, fault, exit_code):
    exit_codes, errors = run_program(tmp_path, fault)
    assert exit_codes == [1, exit_code]
    assert "hyperslab.errors.CommError: rank 0 lost contact while" in errors[0]


# Arguments that differ, or do not fit: all ranks raise, and go on together


def assert_still_together(mesh):
    x = seeded(*SHAPE)
    assert torch.equal(hs.gather(hs.shard(x, mesh)), x)
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close(hs.gather(F.avg_pool2d(hs.shard(x, mesh), 3, 1, 1)), F.avg_pool2d(x, 3, 1, 1))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", ["shape", "dims", "dtype", "cuts", "axes"])
def test_what_differs_in_shard_is_told_on_all_ranks(odd, what):
    mesh = init(height=3)
    tensor, kwargs = seeded(*SHAPE), {}
    if mesh.rank == odd:
        tensor = {
            "shape": seeded(2, 2, 12, 6),
            "dims": seeded(2, 2, 12),
            "dtype": tensor.float(),
        }.get(what, tensor)
        if what == "cuts":
            kwargs["cuts"] = {"height": [0, 1, 2, 12]}
        if what == "axes":
            kwargs["axes"] = ("sample", None, "width", "height")
    other = odd or 1
    words = rf"ranks differ in the tensors given to shard: rank 0 has .*, rank {other} has "
    with pytest.raises(hs.CommError, match=words):
        hs.shard(tensor, mesh, **kwargs)
    assert_still_together(mesh)


@pytest.mark.ranks(3)
def test_shapes_that_differ_in_from_local_are_told_on_all_ranks():
    mesh = init(height=3)
    piece = hs.shard(seeded(*SHAPE), mesh).local
    shape = (2, 2, 12, 6) if mesh.rank == 1 else SHAPE
    with pytest.raises(hs.CommError, match=r"rank 0 has \(\(2, 2, 12, 5\).*, rank 1 has "):
        hs.from_local(piece, mesh, shape)
    assert_still_together(mesh)


@pytest.mark.ranks(3)
def test_a_piece_of_the_wrong_shape_stops_all_ranks_and_names_its_own():
    mesh = init(height=3)
    piece = hs.shard(seeded(*SHAPE), mesh).local
    if mesh.rank == 2:
        piece = piece[:, :, :3]
    words = (
        r"rank 2 brings a piece of shape \(2, 2, 3, 5\), but its box of a tensor of 2x2x12x5, "
        r"dim 2 split over height=3 has shape \(2, 2, 4, 5\)"
    )
    expected = hs.LayoutError if mesh.rank == 2 else hs.CommError
    with pytest.raises(expected, match=words):
        hs.from_local(piece, mesh, SHAPE)
    assert_still_together(mesh)


@pytest.mark.ranks(3)
def test_an_axis_longer_than_its_dim_is_refused_on_all_ranks_with_the_numbers():
    mesh = init(height=3)
    words = (
        r"cannot split dim 2 of a tensor of shape \(2, 2, 2, 5\), an extent of 2, over height=3: "
        r"every rank needs at least one index"
    )
    with pytest.raises(hs.LayoutError, match=words):
        hs.shard(seeded(2, 2, 2, 5), mesh)
    with pytest.raises(hs.LayoutError, match=words):
        hs.from_local(seeded(2, 2, 1, 5), mesh, (2, 2, 2, 5))
    assert_still_together(mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({"height": [0, 5, 11]}, r"an extent of 11, .* the tensor an extent of 12"),
        ({"height": [0, 12]}, r"make 1 pieces .* height=2"),
        ({"height": [0, 8, 4]}, "must start at 0 and not decrease"),
        ({"depth": [0, 12]}, r"cuts are given for \['depth'\]"),
    ],
    ids=str,
)
def test_cuts_that_do_not_fit_are_refused_on_all_ranks(cuts, words):
    mesh = init(height=2)
    with pytest.raises(hs.LayoutError, match=words):
        hs.shard(seeded(*SHAPE), mesh, cuts=cuts)
    assert_still_together(mesh)


@pytest.mark.ranks(2)
def test_a_function_without_a_rule_is_refused_on_all_ranks():
    mesh = init(height=2)
    x = hs.shard(seeded(*SHAPE), mesh)
    for function in (torch.linalg.svdvals, torch.linalg.inv, torch.fft.fft2):
        with pytest.raises(hs.UnsupportedOp, match=r"dim 2 split over height=2.*hyperslab.gather"):
            function(x)
    assert_still_together(mesh)


@pytest.mark.ranks(2)
def test_the_default_group_of_torch_is_left_to_others():
    """A user's collective, posted before ours and waited for after them, is not mixed up."""
    mesh = init(height=2)
    x = hs.shard(seeded(*SHAPE), mesh)
    mine = torch.full((4,), float(mesh.rank + 1))
    work = dist.all_reduce(mine, async_op=True)
    pooled = F.avg_pool2d(x, 3, 1, 1).sum()
    work.wait()
    assert mine.tolist() == [3.0] * 4
    torch.testing.assert_close(pooled, F.avg_pool2d(seeded(*SHAPE), 3, 1, 1).sum())
