"""What is recorded in this process: its recorder, and spans around pieces of code."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from hyperslab.errors import ConfigError, check_choice
from hyperslab.trace.launcher import rank_of_launcher
from hyperslab.trace.recorder import Clock, Place, Recorder
from hyperslab.trace.span import Category, Flag

Function = TypeVar("Function", bound=Callable[..., Any])
Item = TypeVar("Item")

LEVELS = ("off", "coarse", "detailed")

recorder: Recorder | None = None
"""That of this process, while something is recorded."""


def start(
    folder: str | os.PathLike[str],
    *,
    level: str = "coarse",
    rank: int | None = None,
    clock: Clock | None = None,
) -> None:
    """Records what this process does from now on, and those that it forks, to files in ``folder``.

    They are ``rank00000.hstrace`` and so on; others of that name stay. ``coarse`` records reads,
    batches, passes and messages, ``detailed`` every layer too, ``off`` nothing. The rank is that of
    the launcher, if not given.
    """
    global recorder
    check_choice("level", level, LEVELS)
    if recorder is not None:
        raise ConfigError(
            f"this process is traced already, to {recorder.folder}: stop that first, by "
            "hyperslab.trace.stop()"
        )
    if level == "off":
        return
    found = (rank_of_launcher(os.environ) or 0) if rank is None else rank
    recorder = Recorder(Path(folder), rank=found, is_detailed=level == "detailed", clock=clock)
    _follow_processes()


def stop() -> None:
    """Writes what was recorded; nothing is recorded any more."""
    global recorder
    stopped, recorder = recorder, None
    if stopped is not None:
        stopped.stop()


@contextmanager
def recording(folder: str | os.PathLike[str], *, level: str = "coarse") -> Iterator[None]:
    """``start``, and ``stop`` at the end of the block."""
    start(folder, level=level)
    try:
        yield
    finally:
        stop()


def note_rank(rank: int) -> None:
    """Says which rank this process is, now that it has met the others."""
    if recorder is not None:
        recorder.set_rank(rank)


# Processes that begin and end

_follows = False


def _follow_processes() -> None:
    """Has forked processes write files of their own, and all write what they have when they end."""
    global _follows
    if _follows:
        return
    _follows = True
    atexit.register(stop)
    if hasattr(os, "register_at_fork"):
        from multiprocessing import util  # whose processes end without atexit

        os.register_at_fork(after_in_child=_after_fork)
        util.register_after_fork(start, lambda _: util.Finalize(None, stop, exitpriority=0))


def _after_fork() -> None:
    global recorder
    if recorder is not None:
        parent = recorder
        parent.abandon()
        recorder = Recorder(
            parent.folder, rank=parent.rank, is_detailed=parent.is_detailed, clock=parent.clock
        )
        recorder.loop = Place(parent.loop.epoch, parent.loop.step)


# Spans around code


class Span:
    """A span that is recorded when its block ends, with what its fields are then."""

    __slots__ = ("_recorder", "_start", "category", "flags", "name", "nbytes", "sample", "tier")

    def __init__(
        self,
        recorder: Recorder,
        category: int,
        name: str,
        nbytes: int = 0,
        sample: int = -1,
        tier: int = 0,
        flags: int = 0,
    ) -> None:
        self._recorder, self.category, self.name = recorder, category, name
        self.nbytes, self.sample, self.tier, self.flags = nbytes, sample, tier, flags

    def __enter__(self) -> Span:
        self._start = self._recorder.now()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._recorder.add(
            self.category,
            self.name,
            self._start,
            self._recorder.now(),
            self.nbytes,
            self.tier,
            self.sample,
            self.flags,
        )

    def __call__(self, function: Function) -> Function:
        return _around(function, self.name, self.category)


class Idle:
    """A span while nothing is recorded; as a decorator it looks again at each call."""

    __slots__ = ("category", "name", "nbytes", "sample", "tier")
    nbytes: int
    sample: int

    def __init__(self, name: str, category: int) -> None:
        self.name, self.category = name, category

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def __call__(self, function: Function) -> Function:
        return _around(function, self.name, self.category)


IDLE = Idle("", Category.other)
_EXPOSED, _OPENING = int(Flag.exposed), int(Flag.opening)
_CATEGORIES = {category.name: category for category in Category}
_MOSTIDLE = 1024
_idle: dict[str, Idle] = {}


@overload
def span(name: Function) -> Function: ...
@overload
def span(
    name: str, *, nbytes: int = 0, sample: int = -1, category: str = "user"
) -> Span | Idle: ...
def span(
    name: str | Function, *, nbytes: int = 0, sample: int = -1, category: str = "user"
) -> Span | Idle | Function:
    """Records how long a block takes, ``with hs.span("augment"):``, or a function, as a decorator.

    ``nbytes`` and the number of the ``sample`` may also be set in the block, on what ``with``
    gives. ``category`` says what the time counts as in reports, such as ``read`` or ``compute``.
    ``@hs.span`` alone has the function's own name.
    """
    if not isinstance(name, str):
        given: Any = name
        if callable(given):
            found_name = getattr(given, "__name__", str(given))
            return cast(Function, _around(given, found_name, _category(category)))
        name = str(given)
    if recorder is None:
        found = _idle.get(name)
        return _new_idle(name, category) if found is None or category != "user" else found
    return Span(recorder, _CATEGORIES.get(category) or _category(category), name, nbytes, sample)


def _new_idle(name: str, category: str) -> Idle:
    found = Idle(name, _category(category))
    if category == "user":
        if len(_idle) >= _MOSTIDLE:
            _idle.clear()
        _idle[name] = found
    return found


def _category(name: str) -> Category:
    if (found := _CATEGORIES.get(name)) is None:
        check_choice("category", name, _CATEGORIES)
        raise AssertionError
    return found


def around(
    category: Category,
    name: str,
    nbytes: int = 0,
    *,
    tier: int = 0,
    sample: int = -1,
    exposed: bool = False,
) -> Span | Idle:
    """A span around a block of ours."""
    if recorder is None:
        return IDLE
    return Span(recorder, category, name, nbytes, sample, tier, _EXPOSED if exposed else 0)


def reading(path: str | os.PathLike[str], nbytes: int = 0, *, opening: bool = False) -> Span | Idle:
    """A span around what reads from a file, or opens it."""
    if recorder is None:
        return IDLE
    name = os.fspath(path)
    tier, flags = recorder.tier_of(name), _OPENING if opening else 0
    return Span(recorder, Category.read, name, nbytes, -1, tier, flags)


def decoding(path: str | os.PathLike[str], nbytes: int = 0) -> Span | Idle:
    """A span around what makes ``nbytes`` of bytes that a file stores in another form."""
    if recorder is None:
        return IDLE
    return Span(recorder, Category.decode, os.fspath(path), nbytes)


def _around(function: Function, name: str, category: int) -> Function:
    """``function``, of which every call is a span; of coroutines and generators their whole run."""

    def begun() -> Span | Idle:
        found = recorder
        return IDLE if found is None else Span(found, category, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with begun():
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def call_coroutine(*args: Any, **kwargs: Any) -> Any:
        with begun():
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def call_generator(*args: Any, **kwargs: Any) -> Any:
        with begun():
            return (yield from function(*args, **kwargs))

    if inspect.iscoroutinefunction(function):
        return cast(Function, call_coroutine)
    if inspect.isgeneratorfunction(function):
        return cast(Function, call_generator)
    return cast(Function, call)


# Where in a run threads are


@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    """Spans of this thread within the block are those of ``place``; None changes nothing."""
    if recorder is None or place is None:
        yield
        return
    lane = recorder.lane_of_thread()
    before, lane.place = lane.place, place
    try:
        yield
    finally:
        lane.place = before


def place_here() -> Place | None:
    """Where this thread is, for one that works on its behalf; None while nothing is recorded."""
    if recorder is None:
        return None
    place = recorder.place()
    return Place(place.epoch, place.step, place.sample)
