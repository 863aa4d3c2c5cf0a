"""Ranks that run functions for a test."""

import pickle
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from hyperslab.testing.crew import Crew
from hyperslab.testing.function_ref import refer_to
from hyperslab.testing.messages import Call
from hyperslab.testing.warning_filters import current_filters


class Team:
    """``num_ranks`` processes that run functions together.

    Each finds the variables of torchrun in its environment and has torch loaded, but no process
    group: the function makes one. The processes, and with them the group and all other state,
    live until the ``with`` block ends, so that further runs take milliseconds. After a failure or
    a death, the next run is on new processes.

    The processes are forks of one that has torch loaded, and share its hash seed: sets of strings
    iterate alike on all ranks, which under torchrun they need not.

    >>> import os
    >>> with Team(2) as team:
    ...     team.run(os.getenv, "RANK")
    ['0', '1']
    """

    def __init__(self, num_ranks: int, timeout_seconds: float = 300.0) -> None:
        if num_ranks < 1:
            raise ValueError(f"a team needs at least 1 rank, got {num_ranks}")
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self._crew: Crew | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        if error is None:
            self.close()
        else:
            self._disband()

    def run(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        may_die: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """What ``function(*args, **kwargs)`` returns on each rank.

        ``function`` is from the top level of a module; arguments and results are pickled. A rank
        in ``may_die`` may do so: its result is None, and the others go on.

        Raises ``RankError`` for the first rank that raises or dies, and for ranks that still run
        after ``timeout_seconds``, with their stacks.
        """
        __tracebackhide__ = True
        call = Call(refer_to(function), pickled(function, args, kwargs), current_filters())
        if self._crew is None:
            self._crew = Crew(self.num_ranks)
        try:
            results = self._crew.run(call, may_die, self.timeout_seconds)
        except BaseException:
            self._disband()
            raise
        if not self._crew.complete:
            self._disband()
        return results

    def close(self) -> None:
        """Destroy the ranks' process groups and end the ranks; a later run starts new ones."""
        __tracebackhide__ = True
        try:
            if self._crew is not None:
                self._crew.leave()
        finally:
            self._disband()

    def _disband(self) -> None:
        if self._crew is not None:
            crew, self._crew = self._crew, None
            crew.disband()


def pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"arguments of {function.__qualname__} cannot be sent to the ranks: {error}"
        ) from None
