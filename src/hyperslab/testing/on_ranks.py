"""A pytest test out of a body that every rank runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hyperslab.testing.function_ref import BODY
from hyperslab.testing.team import Team

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
