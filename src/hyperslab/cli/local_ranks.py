"""Ranks as processes of this machine: counted, started, watched, and never left behind."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyperslab.cli import rank_process
from hyperslab.cli.machine import find_machine
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES
from hyperslab.train.process import CAN_GO_ON, STOP_SIGNALS

if TYPE_CHECKING:  # the first loads torch
    from hyperslab.comm.launch import Launch
    from hyperslab.train.config import Config

PASSED_ON = tuple(getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name))
"""What the ranks get when this process does."""

GRACE_SECONDS = 20.0
"""After one rank has failed: how long the others may take to notice, say why, and end."""

KILL_SECONDS = 5.0
"""After they were asked to end: how long they may take."""

POLL_SECONDS = 0.05

LOOPBACK = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0"
)
"""Variables that keep messages on this machine."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended; a negative ``code`` is the signal that killed it."""

    rank: int
    code: int
    was_asked: bool = False
    """Whether it was made to end here, because another had failed."""

    @property
    def is_failure(self) -> bool:
        return self.code not in (0, CAN_GO_ON)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with exit code {self.code}"
        return f"rank {self.rank} was killed by {signal_name(-self.code)}"


class Outcome(NamedTuple):
    """How all ranks ended."""

    endings: list[Ending]
    """The first first."""

    passed_on: list[str]
    """The signals that they were sent, because this process was."""

    def has_whole_group(self, size: int) -> bool:
        """Whether all ranks of a group of that size, which follow each other, ended well."""
        failed = {ending.rank // size for ending in self.endings if ending.is_failure}
        return len(failed) < len({ending.rank // size for ending in self.endings})

    def signal_behind(self, ending: Ending) -> str | None:
        """The signal that was passed on and ended the rank, if it was that."""
        by = {-signal.Signals[name]: name for name in self.passed_on}
        if "SIGINT" in self.passed_on:  # as Python tells of it
            by[128 + signal.SIGINT] = "SIGINT"
        if _leaves_no_choice(self.passed_on):
            by[-signal.SIGKILL] = self.passed_on[-1]
        return by.get(ending.code)


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    environ: Mapping[str, str] = os.environ,
    grace_seconds: float = GRACE_SECONDS,
    until_exit: bool = False,
    num_groups: int = 1,
) -> Outcome:
    """Runs ``command`` as ``num_ranks`` processes, and tells how they ended.

    Each finds its rank in its environment, as under torchrun. Signals to this process are passed on
    to all of them, once: they are in process groups of their own, so that what a terminal sends
    reaches them through here alone. When one fails, the others of its group have ``grace_seconds``
    to end too; groups are of equally many that follow each other, and live and die apart.
    They do not outlive this process, even if it is killed. With ``until_exit``, for a process that
    is about to end, signals that come after them are ignored.
    """
    processes = _RankProcesses(grace_seconds, num_ranks // num_groups)
    with _caught(until_exit=until_exit) as signals, reserve_port() as reserved:
        port = reserved.getsockname()[1]
        try:
            for rank in range(num_ranks):
                processes.start(command, rank_environ(environ, rank, num_ranks, port))
            while processes.running:
                processes.watch(signals)
                time.sleep(POLL_SECONDS)
        finally:
            processes.kill()
    return Outcome(processes.endings, processes.passed_on)


def rank_environ(
    environ: Mapping[str, str], rank: int, num_ranks: int, port: int
) -> dict[str, str]:
    """The environment of one rank, as torchrun would set it, and with its share of the cores."""
    threads = max(1, int(find_machine()["cpu_cores"]) // num_ranks)
    defaults = {**LOOPBACK, "OMP_NUM_THREADS": str(threads)}
    return {**defaults, **without_agent(environ)} | torchrun_variables(rank, num_ranks, port)


def without_agent(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables of torchrun that make ranks look for its agent."""
    return {name: each for name, each in environ.items() if not name.startswith("TORCHELASTIC_")}


def torchrun_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank of this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass
class _RankProcesses:
    grace_seconds: float
    group_size: int
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    deadlines: dict[int, float] = field(default_factory=dict)
    """When those still running of a group are asked to end, then killed."""
    asked: set[int] = field(default_factory=set)
    """Groups that were."""
    passed_on: list[str] = field(default_factory=list)

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.running[int(environ["RANK"])] = subprocess.Popen(
            [sys.executable, "-IS", rank_process.__file__, str(os.getpid()), *command],
            env=environ,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def watch(self, signals: list[int]) -> None:
        """Passes ``signals`` on, notes who has ended, and ends the others when their time is up."""
        while signals:
            self._pass_on(signals.pop(0))
        for rank, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[rank]
                self._note(Ending(rank, code, rank // self.group_size in self.asked))
        for group, deadline in self.deadlines.items():
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL if group in self.asked else signal.SIGTERM, group)
                self.asked.add(group)
                self.deadlines[group] = time.monotonic() + KILL_SECONDS

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def _note(self, ending: Ending) -> None:
        self.endings.append(ending)
        if ending.is_failure:
            group = ending.rank // self.group_size
            self.deadlines.setdefault(group, time.monotonic() + self.grace_seconds)

    def _pass_on(self, number: int) -> None:
        """The first asks ranks to stop well, the second to stop now; a third leaves no choice."""
        self.passed_on.append(signal_name(number))
        self._send(signal.SIGKILL if _leaves_no_choice(self.passed_on) else number)

    def _send(self, number: int, group: int | None = None) -> None:
        for rank, process in self.running.items():
            if group in (None, rank // self.group_size):
                process.send_signal(number)


@contextmanager
def _caught(*, until_exit: bool) -> Iterator[list[int]]:
    """The signals that came and are to be passed on; those that were ignored still are."""
    signals: list[int] = []
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signals.append(number))
    after = before
    try:
        yield signals
        if until_exit:
            after = dict.fromkeys(before, signal.SIG_IGN)
    finally:
        for number, handler in after.items():
            signal.signal(number, handler)


def _leaves_no_choice(passed_on: Sequence[str]) -> bool:
    return sum(name in ("SIGINT", "SIGTERM") for name in passed_on) > 2


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def reserve_port() -> socket.socket:
    """A socket bound to a port that only those who ask for it by number will get.

    It never listens, and both it and torch's store set SO_REUSEADDR, so the store may listen
    there, while the system gives the port to nobody who asks for any free one.
    """
    if sys.platform == "linux" and socket.has_dualstack_ipv6():
        # As torch's store: all addresses, so that none of them is in use.
        reserved = socket.socket(socket.AF_INET6)
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        reserved = socket.socket(socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("" if sys.platform == "linux" else "127.0.0.1", 0))
    return reserved


# How many ranks a run has

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC_"),
    *("SLURM", "OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "HYD", "PALS_"),
)
"""How a launcher's variables begin; who inherits those of an outer one waits for its ranks."""

MANY_RANKS, MANY_PER_CORE = 16, 4
"""More of them, in all and for each core, are not started unless asked for by number."""


class RankCount(NamedTuple):
    """A number of ranks to start here."""

    num: int
    why: str
    advice: str = ""
    """What else could be done, where that is likely to be wanted."""


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch, if torchrun, srun or mpirun started this process.

    Loads torch only where a variable looks like a launcher's.
    """
    if not any(name.startswith(LAUNCHER_VARIABLES) for name in environ):
        return None
    from hyperslab.comm.launch import find_launch

    launch = find_launch(environ)
    return None if launch.launcher == "alone" else launch


def check_launched(launch: Launch, asked: int | None) -> None:
    """Raises if the user asks for another number of ranks than the launcher has started."""
    if asked not in (None, launch.num_ranks):
        raise ConfigError(
            f"--ranks {asked} was asked for, but {launch.launcher} has started "
            f"{launch.num_ranks}: leave out --ranks, or start {asked} with {launch.launcher}"
        )


def count_ranks(config: Config, asked: int | None, *, is_one_trainer: bool = False) -> RankCount:
    """How many ranks to start: those asked for, those of the mesh, or one a GPU.

    In a tournament as many for each trainer, unless there ``is_one_trainer``.
    """
    trainers = 1 if is_one_trainer else config.tournament.trainers
    if trainers == 1:
        return _count_ranks(replace(config, mesh=config.mesh_of(0)), asked)
    if asked is not None and asked % trainers:
        raise ConfigError(
            f"--ranks {asked} cannot be divided evenly among tournament.trainers = {trainers}: ask "
            f"for a multiple of {trainers}"
        )
    first = replace(config, mesh=config.mesh_of(0))  # all have as many ranks
    each = _count_ranks(first, None if asked is None else asked // trainers)
    if asked is None and config.mesh.device != "cpu" and each.why.endswith("GPUs"):
        num = max(1, count_gpus() // trainers)
        each = RankCount(min(each.num, num), each.why)
    why = f"tournament.trainers={trainers}, {each.num} for each: {each.why}"
    _check_room(trainers * each.num, why, count_gpus())
    return RankCount(trainers * each.num, why, each.advice)


def _count_ranks(config: Config, asked: int | None) -> RankCount:
    axes = {axis: getattr(config.mesh, axis) for axis in AXES}
    cut = {axis: size for axis, size in axes.items() if size not in (None, 1)}
    product = math.prod(cut.values())
    shown = " x ".join(f"mesh.{axis}={size}" for axis, size in cut.items())
    if asked is not None:
        _check_asked(asked, product, shown, is_fixed=axes["sample"] is not None)
        return RankCount(asked, "--ranks")
    num_gpus = 0 if config.mesh.device == "cpu" else count_gpus()
    if config.mesh.auto:
        return RankCount(max(1, num_gpus), f"{num_gpus} GPUs")
    if cut or axes["sample"] is not None:
        more = num_gpus // product * product if axes["sample"] is None else 0
        advice = f"--ranks {more} would use {more} of {num_gpus} GPUs" if more > product else ""
        _check_room(product, shown, num_gpus)
        return RankCount(product, shown or "mesh.sample=1", advice)
    # A rank without a sample of its own in a forward pass would only wait.
    useful = min(max(1, num_gpus), config.data.batch_size // config.train.accumulate)
    idle = num_gpus - useful
    advice = f"{idle} more GPUs could share each sample: --set mesh.depth=..." if idle > 0 else ""
    return RankCount(useful, f"{num_gpus} GPUs", advice)


def _check_asked(asked: int, product: int, shown: str, *, is_fixed: bool) -> None:
    if asked % product or (is_fixed and asked != product):
        raise ConfigError(
            f"--ranks {asked} does not fit {shown or 'mesh.sample=1'}: ask for "
            f"{'' if is_fixed else 'a multiple of '}{product}, or change the mesh "
            "(--set mesh.depth=...)"
        )


def _check_room(num: int, shown: str, num_gpus: int) -> None:
    """Raises if a mesh is larger than is likely to be meant for this machine."""
    cores = find_machine()["cpu_cores"]
    if num > max(MANY_RANKS, MANY_PER_CORE * cores, num_gpus):
        raise ConfigError(
            f"{shown} asks for {num} ranks, and this machine has {cores:g} cores and {num_gpus} "
            f"GPUs: start them on several with torchrun or srun, or say --ranks {num} if all "
            "shall run here"
        )


def count_gpus() -> int:
    """The GPUs that torch can use; it is asked only where there is one at all."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()
