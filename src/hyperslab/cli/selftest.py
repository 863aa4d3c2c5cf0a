"""Two local ranks that compute a convolution together and compare it with one process.

Then they measure what an exchange between them costs.

``run_selftest`` starts this module as a program, once a rank.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hyperslab.cli.local_ranks import LAUNCHER_VARIABLES, LOOPBACK, reserve_port, torchrun_variables
from hyperslab.errors import CommError, ConfigError

NUM_RANKS = 2
STEPS = ("all_reduce", "conv3d", "exchange")
TOLERANCE = 1e-10
EXCHANGED = {"64 KiB": 1 << 16, "1 MiB": 1 << 20}
NUM_EXCHANGES = 40


class Check(NamedTuple):
    """One line of the doctor's report."""

    name: str
    ok: bool
    detail: str
    """What was found, or the reason why not."""

    figures: Mapping[str, Any] = {}
    """The numbers in ``detail``, for machines."""


def run_selftest(device: str, *, timeout_seconds: float = 120) -> list[Check]:
    """A check for each step of the self-test on ``device``, up to the first that failed."""
    with TemporaryDirectory(prefix="hyperslab-doctor-") as name:
        folder = Path(name)
        with _started_ranks(device, folder) as ranks:
            failure = _wait(ranks, folder, timeout_seconds)
        num_passed = sum(_has_passed(folder, step) for step in STEPS)
        names = [f"{device}: {step}" for step in (*STEPS, "shutdown")]
        passed = [Check(name, True, f"{NUM_RANKS} ranks agree") for name in names[:num_passed]]
        if num_passed == len(STEPS):
            figures = json.loads(_figures(folder).read_text())
            passed[-1] = Check(names[num_passed - 1], True, describe_exchange(figures), figures)
    return [*passed, Check(names[num_passed], False, failure)] if failure else passed


def describe_exchange(figures: Mapping[str, Any]) -> str:
    """Which transport ranks of this machine use, and what one exchange costs."""
    costs = []
    for size, cost in figures["exchanges"].items():
        graph = cost["graph_us"]
        replayed = f" ({graph:.0f} in a CUDA graph)" if graph is not None else ""
        costs.append(f"{cost['us']:.0f} us for {size}{replayed}")
    notes = []
    if figures["why_not_device"]:
        notes.append(figures["why_not_device"])
    if figures["shares_gpu"]:
        mps = "under MPS" if figures["mps"] else "without MPS (nvidia-cuda-mps-control -d)"
        notes.append(f"both ranks on one GPU, {mps}")
    return "; ".join([f"by {figures['messages_by']}: {', '.join(costs)}", *notes])


def rank_environ(environ: Mapping[str, str], rank: int, port: int) -> dict[str, str]:
    """The environment of one rank: ``environ`` without its launcher, kept to loopback."""
    kept = {
        name: value for name, value in environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }
    return kept | torchrun_variables(rank, NUM_RANKS, port) | LOOPBACK | {"OMP_NUM_THREADS": "1"}


@contextmanager
def _started_ranks(device: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The running ranks; they are ended on leaving."""
    command = [sys.executable, "-m", "hyperslab.cli.selftest", device, str(folder)]
    ranks = []
    reserved = reserve_port()
    try:
        for rank in range(NUM_RANKS):
            with _file(folder, rank, "log").open("wb") as log:
                environ = rank_environ(os.environ, rank, reserved.getsockname()[1])
                ranks.append(
                    subprocess.Popen(
                        command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        reserved.close()


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> str | None:
    """None when all ranks have ended well, else the reason of the first that did not."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank}: {_reason(folder, rank) or f'exit code {code}'}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return f"no answer within {timeout_seconds:g} s"


def _has_passed(folder: Path, step: str) -> bool:
    return all(_file(folder, rank, step).exists() for rank in range(NUM_RANKS))


def _file(folder: Path, rank: int, what: str) -> Path:
    """The mark of a step that ``rank`` has passed, its ``log``, or the ``failure`` that it had."""
    return folder / f"rank{rank}.{what}"


def _figures(folder: Path) -> Path:
    return folder / "exchange.json"


def _reason(folder: Path, rank: int) -> str:
    """The first line of the error of ``rank``, or the last of its log if it died without one."""
    failure = _file(folder, rank, "failure")
    if failure.exists():
        return failure.read_text().partition("\n")[0]
    return _file(folder, rank, "log").read_text(errors="replace").strip().rpartition("\n")[2]


# What each rank runs


def _run_rank(device: str, folder: Path) -> None:
    """Leave a file in ``folder`` for each step that passed, or one with the error."""
    try:
        _run_steps(device, folder)
    except Exception as error:
        # torch may log more after the traceback, so that the log's last line would not do.
        failure = _file(folder, int(os.environ["RANK"]), "failure")
        failure.write_text(f"{type(error).__name__}: {error}")
        raise


def _run_steps(device: str, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def check_exchange(device: str) -> None:
        figures = _measure_exchanges(device)
        if dist.get_rank() == 0:
            _figures(folder).write_text(json.dumps(figures))

    for step, check in zip(STEPS, (_check_all_reduce, _check_conv3d, check_exchange), strict=True):
        check(device)
        _file(folder, dist.get_rank(), step).touch()
    dist.destroy_process_group()


def _check_all_reduce(device: str) -> None:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    if total.item() != 3:
        raise CommError(f"1 + 2 summed over two ranks gave {total.item()}")


def _check_conv3d(device: str) -> None:
    import torch
    import torch.nn.functional as F

    import hyperslab as hs

    mesh = hs.init(depth=NUM_RANKS, device=device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 8, 4, 4, dtype=torch.float64, generator=generator).to(mesh.device)
    weight = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64, generator=generator).to(mesh.device)
    whole = F.conv3d(x, weight, padding=1)
    split: Any = hs.shard(x, mesh)  # torch's stubs know Tensors only
    ours = hs.gather(F.conv3d(split, weight, padding=1))
    off = (ours - whole).abs().max().item()
    if not off <= TOLERANCE:
        raise CommError(f"conv3d on {NUM_RANKS} ranks is off by {off:.1e}, over {TOLERANCE:g}")


def _measure_exchanges(device: str) -> dict[str, Any]:
    import torch

    import hyperslab as hs
    from hyperslab.comm.device_setup import has_mps
    from hyperslab.comm.exchange_cost import measure_exchange

    mesh, why_not = hs.init(depth=NUM_RANKS, device=device), ""
    if mesh.transport is None and mesh.device.type == "cuda":
        try:
            hs.init(depth=NUM_RANKS, device=device, transport="device")
        except ConfigError as error:
            why_not = str(error)
    costs = {
        size: measure_exchange(mesh, nbytes, NUM_EXCHANGES)._asdict()
        for size, nbytes in EXCHANGED.items()
    }
    shares_gpu = mesh.device.type == "cuda" and torch.cuda.device_count() < NUM_RANKS
    return {
        "messages_by": mesh.messages_by,
        "why_not_device": why_not,
        "shares_gpu": shares_gpu,
        "mps": shares_gpu and has_mps(),
        "exchanges": costs,
    }


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
