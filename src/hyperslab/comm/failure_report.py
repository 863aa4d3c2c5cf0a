"""What ranks tell each other, and the user, when something goes wrong.

A rank that fails publishes a report in torch's store: the operators that it has run, and the error
that it stopped with. A rank that loses contact with others reads their reports for the cause.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm.journal import first_difference, journal
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError, HyperslabError
from hyperslab.torch_private import default_store

REPORT_TIMEOUT_SECONDS = 5.0
"""How long a rank waits at most for the reports of others."""


class FailureReport(NamedTuple):
    """What one rank tells the others of itself."""

    num_run: int
    """How many operators it has run."""
    latest: list[str]
    """The latest of them."""
    error: str
    """The error that it stopped with, if it stopped of itself."""


def lost_contact(doing: str, mesh: Mesh, error: RuntimeError | TimeoutError) -> CommError:
    """The ``CommError`` to raise for ``error``, which says that a peer is gone or late."""
    if mesh.transport is not None:
        mesh.transport.give_up()
    why = str(error).partition("\n")[0] or type(error).__name__
    cause = "it is gone, or late"
    if is_connected():
        cause = explain_failure(mesh.rank, mesh.num_ranks, mesh.timeout.total_seconds())
    return CommError(f"rank {mesh.rank} lost contact while {doing}: {cause} ({why})")


@contextmanager
def contact(doing: str, mesh: Mesh) -> Iterator[None]:
    """Turns errors that torch raises within it into a ``CommError`` that tells the cause.

    For messages of a pass, which a CUDA graph must be able to send while one is tried out.
    """
    if mesh.transport is not None and mesh.transport.is_silent:
        raise CommError(f"{doing} takes messages between hosts, which a CUDA graph cannot send")
    with contact_beside_passes(doing, mesh):
        yield


@contextmanager
def contact_beside_passes(doing: str, mesh: Mesh) -> Iterator[None]:
    """As ``contact``, for messages of other threads, whatever pass this one is in."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error


def is_connected() -> bool:
    """Whether ranks can read each other's reports."""
    return dist.is_available() and dist.is_initialized()


def is_reporter(
    rank: int, error: HyperslabError, *, timeout_seconds: float = REPORT_TIMEOUT_SECONDS
) -> bool:
    """Whether this rank, which stops with ``error``, should tell the user.

    Rank 0 does. Another does not if rank 0 stops too and tells of the same; nor if its error is
    only that others have failed, for then so is that of rank 0, or it is one of those.
    """
    text = f"{type(error).__name__}: {error}"
    publish_report(rank, text)
    if rank == 0:
        return True
    told = _error_of_rank_0(timeout_seconds)
    return not told or not (isinstance(error, CommError) or text in told)


def _error_of_rank_0(timeout_seconds: float) -> str:
    """What rank 0 stopped with, or nothing if it does not within that time."""
    until = time.monotonic() + timeout_seconds
    while time.monotonic() < until:
        try:
            report = read_report(0)
        except RuntimeError:  # the process that keeps the store is gone
            break
        if report and report.error:
            return report.error
        time.sleep(0.05)
    return ""


def publish_report(rank: int, error: str = "") -> None:
    """Puts this rank's report where the others find it, if they can still be reached."""
    mine = FailureReport(journal.count, [str(entry) for entry in journal.since(0)[-500:]], error)
    try:
        _store().set(_key(rank), json.dumps(mine))
    except RuntimeError:  # the process that keeps the store is gone
        return


def explain_failure(rank: int, num_ranks: int, timeout_seconds: float) -> str:
    """The cause, from the reports of all ranks as far as they come in time."""
    publish_report(rank)
    reports: dict[int, FailureReport] = {}
    until = time.monotonic() + min(REPORT_TIMEOUT_SECONDS, timeout_seconds)
    try:
        while len(reports) < num_ranks and time.monotonic() < until:
            for peer in range(num_ranks):
                if peer not in reports and (report := read_report(peer)):
                    reports[peer] = report
            if any(each.error for each in reports.values()):
                break
            time.sleep(0.02)
    except RuntimeError:  # the process that keeps the store is gone
        pass
    return (
        _stopped(reports)
        or _differs(reports)
        or _missing({rank, *reports}, num_ranks, timeout_seconds)
    )


def read_report(rank: int) -> FailureReport | None:
    """The report of ``rank``, or None; raises ``RuntimeError`` if the store is gone."""
    if not _store().check([_key(rank)]):
        return None
    return FailureReport(*json.loads(_store().get(_key(rank))))


def _stopped(reports: Mapping[int, FailureReport]) -> str:
    for rank, each in reports.items():
        if each.error:
            last = f" in or after operator {each.num_run}, {each.latest[-1]}" if each.latest else ""
            return f"rank {rank} stopped{last}: {each.error}"
    return ""


def _differs(reports: Mapping[int, FailureReport]) -> str:
    """The first operator that is another one on another rank; some may have come further."""
    if not reports:
        return ""
    runs = {rank: (each.num_run - len(each.latest), each.latest) for rank, each in reports.items()}
    difference = first_difference(runs, shared=min(each.num_run for each in reports.values()))
    return f"ranks ran different operators: {difference}" if difference else ""


def _missing(reports: Set[int], num_ranks: int, timeout_seconds: float) -> str:
    silent = [str(rank) for rank in range(num_ranks) if rank not in reports]
    missing = f", there is no report of {', '.join(silent)}" if silent else ""
    return (
        f"another rank died, raised an error or did not answer within {timeout_seconds:g} s; its "
        f"own output says why{missing}"
    )


def _store() -> Store:
    return PrefixStore("hyperslab", default_store())


def _key(rank: int) -> str:
    return f"failure report of rank {rank}"
