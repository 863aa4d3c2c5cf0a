"""Errors of several ranks, told once.

Ranks mostly fail together, all with the same error or with one that names the rank where it began.
Who tells the user depends on who started them:

- Ranks that ``local_ranks`` started stay silent and leave their error in a folder. The process that
  started them reads all of them and tells those that began it.
- Under torchrun, srun or mpirun there is no such process. Rank 0 tells its error, and the others
  tell theirs if rank 0 does not stop as well, with an error that says the same. Before the ranks
  have met they cannot know; then the first rank of each node speaks, for what goes wrong so early,
  a missing file or a wrong setting, is alike on a node.

Errors that nobody raised on purpose come with a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.cli.local_ranks import Ending, Outcome
from hyperslab.cli.output import print_news
from hyperslab.errors import CommError, HyperslabError

if TYPE_CHECKING:  # it loads torch
    from hyperslab.comm.launch import Launch

FOLDER = "HYPERSLAB_ERRORS"
"""The environment variable with the folder in which ranks leave their errors."""

STAY_SECONDS = 2.0
"""How long ranks stay after an error: many a launcher kills the others when the first is gone, and
the one that is to tell may not have told yet."""


@dataclass(frozen=True)
class RankError:
    """What a rank stopped with."""

    rank: int
    text: str
    is_about_others: bool
    """Whether it only tells that another rank has failed."""


def begin_rank() -> None:
    """Keeps a rank from talking too much; to be called before torch is loaded.

    A lost peer is no reason for torch to print C++ frames. A rank of ``local_ranks`` dies of SIGINT
    without a word, until it can stop well.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if FOLDER in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def told_once(launch: Launch, *, with_traceback: bool) -> Iterator[None]:
    """Errors within it are told by one rank, or by the process that started the ranks."""
    try:
        yield
    except KeyboardInterrupt:
        if FOLDER in os.environ:
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    except Exception as error:
        sys.last_value = error  # where comm looks, at exit, for what to tell the other ranks
        if folder := os.environ.get(FOLDER):
            _leave(error, launch.rank, Path(folder), with_traceback)
            raise SystemExit(1) from error
        if launch.num_ranks == 1 or with_traceback or not isinstance(error, HyperslabError):
            raise
        if _is_reporter(error, launch):
            print_news(f"Error: {_one_line(error)}", err=True)
        time.sleep(STAY_SECONDS)
        raise SystemExit(1) from error


def read_errors(folder: Path) -> list[RankError]:
    paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [RankError(**json.loads(path.read_text())) for path in paths]


def stopped_by(outcome: Outcome, errors: Sequence[RankError]) -> str | None:
    """The signal to this process that ended ranks before they could stop well, if that is all.

    What the others then tell is that those are gone.
    """
    silent = _silent(outcome, errors)
    if not silent or not all(error.is_about_others for error in errors):
        return None
    return outcome.signal_behind(silent[0])


def first_cause(outcome: Outcome, errors: Sequence[RankError]) -> str:
    """Why the ranks ended as they did, in a line, or with a traceback.

    A rank that was killed comes first: what the others tell then is that it is gone. So come errors
    before those that are about others.
    """
    silent = _silent(outcome, errors)
    own = [error for error in errors if not error.is_about_others]
    if own and not any(ending.code < 0 for ending in silent):
        return _told(own, num_ranks=len(outcome.endings))
    if silent:
        was_killed = silent[0].code == -signal.SIGKILL
        return f"{silent[0]}{', by someone or because memory ran out' if was_killed else ''}"
    if not (first := outcome.endings[0]).is_failure:
        return (
            f"rank {first.rank} ended early, with exit code {first.code}, while others were still "
            "at work"
        )
    return errors[0].text


def _silent(outcome: Outcome, errors: Sequence[RankError]) -> list[Ending]:
    """The ranks that failed of themselves, without a word."""
    told = {error.rank for error in errors}
    failed = [ending for ending in outcome.endings if ending.is_failure and not ending.was_asked]
    return [ending for ending in failed if ending.rank not in told]


def _told(errors: Sequence[RankError], num_ranks: int) -> str:
    """The distinct errors, each with the first rank that had it, unless all had the same."""
    ranks: dict[str, list[int]] = {}
    for error in errors:
        ranks.setdefault(error.text, []).append(error.rank)
    if len(ranks) == 1 and len(errors) == num_ranks:
        return errors[0].text
    return "\n".join(f"rank {theirs[0]}: {text}" for text, theirs in ranks.items())


def _leave(error: Exception, rank: int, folder: Path, with_traceback: bool) -> None:
    text = _one_line(error)
    if with_traceback or not isinstance(error, HyperslabError):
        text = "".join(traceback.format_exception(error)).rstrip()
    left = RankError(rank, text, isinstance(error, CommError))
    partial = folder / f"{rank}.part"
    partial.write_text(json.dumps(asdict(left)))
    partial.rename(folder / f"rank{rank}.json")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_reporter(error: HyperslabError, launch: Launch) -> bool:
    from hyperslab.comm.failure_report import is_connected, is_reporter

    if not is_connected():
        return launch.local_rank == 0
    return is_reporter(launch.rank, error)
