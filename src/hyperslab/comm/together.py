"""Work that ranks do beside the model, in which all succeed or all raise the same error.

``agree`` does so for calls on the model's own path, where errors keep their type on the rank that
has them. Here they have the same type and words on all, so that all can handle them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from hyperslab.comm.side_channel import SideChannel
from hyperslab.errors import CommError, FormatError, HyperslabError

Result = TypeVar("Result")


class _Fault(NamedTuple):
    """An error as it travels between ranks."""

    kind: type[HyperslabError]
    words: str


def do_together(call: Callable[[], Result], channel: SideChannel) -> Result:
    """What ``call`` returns; an error that it raises on one rank is raised on all of them."""
    result, fault, cause = _attempt(call, channel.rank)
    faults = [each for each in channel.tell_all(fault) if each]
    if faults:
        raise faults[0].kind(faults[0].words) from cause
    return cast(Result, result)


def do_on_first(call: Callable[[], object], channel: SideChannel) -> None:
    """Runs ``call`` on rank 0; the others wait until it is done."""
    do_together(call if channel.rank == 0 else lambda: None, channel)


def ask_first(call: Callable[[], Result], channel: SideChannel) -> Result:
    """What ``call`` returns on rank 0, on all ranks."""
    answers: list[Result] = []
    do_on_first(lambda: answers.append(call()), channel)
    return channel.tell_all(answers)[0][0]


def _attempt(
    call: Callable[[], Result], rank: int
) -> tuple[Result | None, _Fault | None, Exception | None]:
    try:
        return call(), None, None
    except HyperslabError as error:
        return None, _Fault(type(error), str(error)), error
    except OSError as error:
        return None, _Fault(FormatError, f"{error.filename}: {error.strerror}"), error
    except Exception as error:  # noqa: BLE001 - the others must not wait for this rank
        return None, _Fault(CommError, f"rank {rank}: {type(error).__name__}: {error}"), error
