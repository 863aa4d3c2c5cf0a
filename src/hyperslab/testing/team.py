"""Ranks that run functions for a test."""

import functools
import inspect
import pickle
from collections.abc import Callable, Collection
from typing import Any, Self

from hyperslab.testing.messages import BODY, Call, check_not_loading, current_filters, refer_to
from hyperslab.testing.rank_processes import RankProcesses


class Team:
    """``num_ranks`` processes that run functions together.

    Each finds the variables of torchrun in its environment and has torch loaded, but no process
    group: the function makes one. The processes, and with them the group and all other state,
    live until the ``with`` block ends, so that further runs take milliseconds. After a failure or
    a death, the next run is on new processes. Every run begins with the same random state, so
    that what a test draws does not depend on the tests before it.

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
        check_not_loading()
        self.num_ranks = num_ranks
        self.timeout_seconds = timeout_seconds
        self._processes: RankProcesses | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        __tracebackhide__ = True
        if error is None:
            self.close()
        else:
            self._kill()

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
        if self._processes is None:
            self._processes = RankProcesses(self.num_ranks)
        try:
            results = self._processes.run(call, may_die, self.timeout_seconds)
        except BaseException:
            self._kill()
            raise
        if not self._processes.complete:
            self._kill()
        return results

    def close(self) -> None:
        """Destroy the ranks' process groups and end the ranks; a later run starts new ones."""
        __tracebackhide__ = True
        try:
            if self._processes is not None:
                self._processes.leave()
        finally:
            self._kill()

    def _kill(self) -> None:
        if self._processes is not None:
            processes, self._processes = self._processes, None
            processes.kill()


def pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"arguments of {function.__qualname__} cannot be sent to the ranks: {error}"
        ) from None


NUM_RANKS = "num_ranks"


def on_ranks(
    *counts: int, timeout_seconds: float = 300.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on each of ``counts`` ranks, every time with a new ``Team``.

    The body runs on every rank, not in pytest's process, so its arguments are pickled. They come
    from ``pytest.mark.parametrize``, above or below; a fixture's value arrives as a copy, if it
    can be pickled at all. The body may ask for ``num_ranks``.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        import pytest  # here, so that a Team needs no pytest

        if "." in body.__qualname__:
            raise TypeError(
                f"{body.__qualname__} must be at the top level of its module: ranks cannot find it"
            )
        parameters = dict(inspect.signature(body).parameters)
        wants_num_ranks = NUM_RANKS in parameters

        @functools.wraps(body)
        def test(*, num_ranks: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            if wants_num_ranks:
                arguments[NUM_RANKS] = num_ranks
            with Team(num_ranks, timeout_seconds) as team:
                team.run(body, **arguments)

        parameters[NUM_RANKS] = inspect.Parameter(NUM_RANKS, inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        setattr(test, BODY, body)
        ids = [f"{count}ranks" for count in counts]
        marked: Callable[..., None] = pytest.mark.parametrize(NUM_RANKS, counts, ids=ids)(test)
        return marked

    return decorate
