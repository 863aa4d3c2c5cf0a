"""Steps and epochs of the main loop, whoever makes its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hyperslab.trace import active
from hyperslab.trace.recorder import Recorder
from hyperslab.trace.span import Category, Flag

Batch = TypeVar("Batch")

_END = object()
_EXPOSED = int(Flag.exposed)


class Loop:
    """An epoch of the main loop, which begins now, as does its first step."""

    def __init__(
        self, recorder: Recorder | None, epoch: int, first_step: int, source: int = 0
    ) -> None:
        """Without a recorder it does nothing; ``source`` tells whose batches they are."""
        self._recorder, self._epoch, self._step = recorder, epoch, first_step
        self.source = source
        if recorder is not None:
            self._epoch_start = self._step_start = recorder.now()
            self._place(recorder, epoch, first_step)
            recorder.main_loop = self

    def end_step(self) -> None:
        """The next step begins with it."""
        if (recorder := self._recorder) is None or recorder.main_loop is not self:
            return
        stop = recorder.now()
        recorder.add(Category.step, "step", self._step_start, stop)
        self._step_start, self._step = stop, self._step + 1
        self._place(recorder, self._epoch, self._step)

    def end_steps(self) -> None:
        """What follows in the epoch is part of no step."""
        if self._recorder is not None:
            self._place(self._recorder, self._epoch, -1)

    def end(self) -> None:
        if (recorder := self._recorder) is None or recorder.main_loop is not self:
            return
        self.end_steps()
        recorder.add(Category.epoch, "epoch", self._epoch_start, recorder.now())
        recorder.next_step = self._step
        recorder.main_loop = None
        self._place(recorder, -1, -1)

    def _place(self, recorder: Recorder, epoch: int, step: int) -> None:
        recorder.loop.epoch, recorder.loop.step = epoch, step


def steps(
    batches: Iterable[Batch], *, epoch: int = 0, first_step: int | None = None
) -> Iterator[Batch]:
    """``batches``, of each of which a step is recorded: ``for x, y in hs.trace.steps(loader):``.

    A step begins when its batch is asked for and ends when the next one is. How long the loop
    waited for the batch is recorded too, and at last the epoch. Steps are numbered from
    ``first_step`` on, or from where those before have ended. Loaders of hyperslab do all this by
    themselves. In a loop within a loop, and within ``evaluation``, only waiting is recorded.
    """
    return steps_of(id(batches), batches, epoch, first_step)


def steps_of(
    source: int, batches: Iterable[Batch], epoch: int, first_step: int | None
) -> Iterator[Batch]:
    """As ``steps``; a loop before that was left in the midst, over the same source, has ended."""
    recorder = active.recorder
    if recorder is None or recorder.is_awaited:
        yield from batches
        return
    first = recorder.next_step if first_step is None else first_step
    if isinstance(recorder.main_loop, Loop) and recorder.main_loop.source == source:
        recorder.main_loop.end()
    is_free = recorder.main_loop is None and not recorder.is_evaluating
    loop = Loop(recorder if is_free else None, epoch, first, source)
    try:
        for batch in _awaited(batches, recorder):
            yield batch
            loop.end_step()
    finally:
        loop.end()


def _awaited(batches: Iterable[Batch], recorder: Recorder) -> Iterator[Batch]:
    """``batches``, with how long each was waited for."""
    following = iter(batches)
    while True:
        start = recorder.now()
        recorder.is_awaited = True
        try:
            batch = next(following, _END)
        finally:
            recorder.is_awaited = False
        if batch is _END:
            return
        stop = recorder.now()
        recorder.add(Category.wait, "next batch", start, stop, flags=_EXPOSED)
        yield batch  # type: ignore[misc]


@contextmanager
def evaluation(name: str = "evaluation") -> Iterator[None]:
    """Loops within the block are not those that train: their steps and epochs are not recorded."""
    recorder = active.recorder
    if recorder is None:
        yield
        return
    before, recorder.is_evaluating = recorder.is_evaluating, True
    try:
        with active.around(Category.evaluation, name):
            yield
    finally:
        recorder.is_evaluating = before
