"""Which rank this process is, as told by torchrun, Slurm, Open MPI or MPICH."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import ConfigError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

# Slurm numbers the steps that srun makes from 0; those from here up are its own: the batch
# script, the shell of an interactive allocation.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_HOW_TO_SET = {
    "openmpi": " (mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500 ...)",
    "mpich": " (mpirun -genv MASTER_ADDR host0 -genv MASTER_PORT 29500 ...)",
}

_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where this process stands among the ranks, and where rank 0 waits for the others."""

    launcher: str
    """``torchrun``, ``slurm``, ``openmpi``, ``mpich`` (also Intel MPI and PALS) or ``alone``."""

    rank: int
    num_ranks: int

    local_rank: int
    """The position among the ranks of this node; it picks the GPU."""

    num_local_ranks: int

    master_addr: str | None
    """Where rank 0 listens; ``None`` only if ``launcher`` is ``alone``."""

    master_port: int | None


class _Place(NamedTuple):
    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int

    @property
    def is_one_node(self) -> bool:
        return self.num_local_ranks == self.num_ranks


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch that ``environ`` tells of, or ``alone`` as rank 0 of 1.

    The innermost launcher wins: torchrun over mpirun over srun. The shell of a Slurm job that no
    srun started is alone, although Slurm sets its ``SLURM_PROCID`` too. ``RANK`` and ``WORLD_SIZE``
    set by hand count as torchrun, unless a launcher says the same and knows the local rank.
    ``MASTER_ADDR`` and ``MASTER_PORT`` are used where they are set. Without them all ranks derive
    the same ones, without a message.
    """
    by_hand = bool(environ.get("RANK"))
    if by_hand and environ.get("LOCAL_RANK"):
        return _from_torchrun(environ)
    found = (
        _from_mpirun(environ, "openmpi", _OPENMPI)
        or _from_mpirun(environ, "mpich", _HYDRA)
        or _from_srun(environ)
        or _from_mpirun(environ, "mpich", _PALS)
    )
    if by_hand and not (found and _agrees(found, environ)):
        return _from_torchrun(environ)
    return found or _alone(environ)


def choose_port(key: str) -> int:
    """A port between 20000 and 29999 that depends on ``key`` alone.

    Linux hands out ports from 32768 up to outgoing connections, so these are mostly free.
    """
    return _FIRST_PORT + zlib.crc32(key.encode()) % _NUM_PORTS


def how_to_set(launch: Launch) -> str:
    """How ``MASTER_ADDR`` and ``MASTER_PORT`` reach all ranks, where it needs to be said."""
    return _HOW_TO_SET.get(launch.launcher, "")


def _from_torchrun(environ: Mapping[str, str]) -> Launch:
    rank, size, addr = (environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if size == "1" or addr == "localhost" or addr.startswith("127."):
        environ = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, **environ}
    place = _read_place(environ, _TORCHRUN)
    if place.num_ranks > 1 and not (addr and environ.get("MASTER_PORT")):
        shown = _show(environ, ("MASTER_ADDR", "MASTER_PORT"))
        raise ConfigError(
            f"{place.num_ranks} ranks cannot find each other with {shown}: "
            "set both to the host of rank 0 and a free port there, or start with torchrun"
        )
    return _launch(environ, "torchrun", place, host=None, key=f"pid {os.getpid()}")


def _from_mpirun(
    environ: Mapping[str, str], launcher: str, names: tuple[str, ...]
) -> Launch | None:
    """The launch by ``names`` (rank, size, local rank, local size), or None without its first.

    The third is looked for too: srun sets ``PMI_RANK`` and ``PMI_SIZE`` by itself.
    """
    if not (environ.get(names[0]) and environ.get(names[2])):
        return None
    place = _read_place(environ, names)
    host = None if place.is_one_node else _host_of_mpirun(environ, place.rank)
    return _launch(environ, launcher, place, host=host, key=_job_key(environ, place))


def _from_srun(environ: Mapping[str, str]) -> Launch | None:
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    # SLURM_NTASKS can be the job's, where the step has fewer.
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    per_node = _first_set(
        environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"
    )
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", per_node)
    [node] = _numbers({"SLURM_NODEID": "0", **environ}, ("SLURM_NODEID",))
    count = _tasks_on_node(environ.get(per_node, ""), node)
    place = _read_place({**environ, per_node: count}, names)
    nodes = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return _launch(
        environ,
        "slurm",
        place,
        host=first_host(environ.get(nodes, "")),
        key=f"{environ.get('SLURM_JOB_ID')}.{step}",
    )


def _alone(environ: Mapping[str, str]) -> Launch:
    if environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set, but neither RANK nor a launcher is there: "
            "start with torchrun, srun or mpirun, or unset WORLD_SIZE to run alone"
        )
    return Launch(
        launcher="alone",
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        master_addr=None,
        master_port=None,
    )


def _agrees(found: Launch, environ: Mapping[str, str]) -> bool:
    return _numbers(environ, _TORCHRUN[:2]) == [found.rank, found.num_ranks]


def _launch(
    environ: Mapping[str, str], launcher: str, place: _Place, *, host: str | None, key: str
) -> Launch:
    addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if place.is_one_node else host)
    if not addr:
        raise ConfigError(
            f"cannot tell which node rank 0 of {place.num_ranks} runs on: "
            f"set MASTER_ADDR and MASTER_PORT{_HOW_TO_SET.get(launcher, '')}"
        )
    return Launch(
        launcher=launcher,
        **place._asdict(),
        master_addr=addr,
        master_port=_read_port(environ) or choose_port(key),
    )


# Reading and checking the variables


def _read_place(environ: Mapping[str, str], names: tuple[str, ...]) -> _Place:
    for rank, size in (names[:2], names[2:]):
        _check_below(environ, rank, size)
    _check_below(environ, names[3], names[1], or_equal=True)
    return _Place(*_numbers(environ, names))


def _check_below(
    environ: Mapping[str, str], name: str, limit: str, *, or_equal: bool = False
) -> None:
    number, bound = _numbers(environ, (name, limit))
    if number >= bound + or_equal:
        bound_text = "at most" if or_equal else "below"
        raise ConfigError(f"{_show(environ, (name, limit))}: {name} must be {bound_text} {limit}")


def _numbers(environ: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    if not all(environ.get(name, "").isdecimal() for name in names):
        raise ConfigError(f"{_show(environ, names)}: each must be set, and to a number")
    return [int(environ[name]) for name in names]


def _read_port(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT={text} is not a port: set it to a number from 1 to 65535")
    return int(text)


def _show(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={environ.get(name) or '(not set)'}" for name in names)


def _first_set(environ: Mapping[str, str], *names: str) -> str:
    """The first of ``names`` that has a value, or the first of all if none has."""
    return next((name for name in names if environ.get(name)), names[0])


# What Slurm and mpirun tell about nodes and jobs


def first_host(nodelist: str) -> str | None:
    """The first host of a Slurm node list.

    >>> first_host("node[01-03,07],gpu5")
    'node01'
    """
    first = re.match(r"(?:\[[^]]*\]|[^][,])+", nodelist)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) if first else None


def _tasks_on_node(per_node: str, node: int) -> str:
    """The entry for ``node`` of counts as Slurm writes them, such as ``4(x2),3``."""
    counts: list[str] = []
    for entry in per_node.split(","):
        count, _, times = entry.removesuffix(")").partition("(x")
        counts += [count] * (int(times) if times.isdecimal() else 1)
    # SLURM_NTASKS_PER_NODE is one number for all nodes.
    return counts[min(node, len(counts) - 1)]


def _host_of_mpirun(environ: Mapping[str, str], rank: int) -> str | None:
    """The host on which rank 0 should run, or None if nothing tells.

    That is the first node of a Slurm job, or the host of Open MPI's mpirun itself. Only rank 0 can
    see that it runs elsewhere: it then gets None, and fails, and mpirun ends the others.
    """
    dvm = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    told = [
        (first_host(environ.get("SLURM_JOB_NODELIST", "")), environ.get("SLURMD_NODENAME")),
        (dvm and dvm[1], environ.get("PMIX_HOSTNAME")),
        (
            _host_of_uri(environ.get("OMPI_MCA_orte_hnp_uri", "")),
            _host_of_uri(environ.get("OMPI_MCA_orte_local_daemon_uri", "")),
        ),
    ]
    host, here = next(((host, here) for host, here in told if host), (None, None))
    return None if rank == 0 and here and here != host else host


def _host_of_uri(uri: str) -> str | None:
    """The first address of an Open MPI 4 contact, such as ``7.0;tcp://10.0.0.1,10.1.0.1:5327``."""
    found = re.search(r";tcp://([^,:;]+)", uri)
    return found[1] if found else None


def _job_key(environ: Mapping[str, str], place: _Place) -> str:
    """A text that all ranks of one mpirun share, and other jobs do not."""
    if namespace := environ.get("PMIX_NAMESPACE"):
        return namespace
    if place.is_one_node:
        return f"launcher {_find_launcher_pid()}"
    job = _first_set(environ, "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "MASTER_ADDR")
    return environ.get(job, "")


def _find_launcher_pid() -> int:
    """The process that started the ranks of this node: the nearest ancestor that is not a rank.

    It need not be the parent: a script around the program, or a container, comes between them.
    """
    pid = os.getppid()
    try:
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # not Linux, or not our process
        pass
    return pid
