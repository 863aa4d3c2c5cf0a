"""What the trainers of a tournament tell each other, by notes that rank 0 of each reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from hyperslab.comm.side_channel import SideChannel, ask_first, do_together
from hyperslab.train.tournament.board import Board

POLL_SECONDS = (0.00005, 0.02)
"""From one look at the board to the next: at first, and at most."""
ROUND_SECONDS = 0.25
"""So long rank 0 looks before the ranks agree whether to go on: signals to stop are seen then."""
END_SECONDS = 0.05
"""From one look to the next for trainers that are still to end."""


class Gone(NamedTuple):
    """Why a trainer did not come; the text goes behind its name."""

    why: str


class Others:
    """The other trainers, as one sees them: who plays, who is gone, and what they show.

    All methods are collective over the ranks of the trainer, unless they say otherwise.
    """

    def __init__(
        self,
        trainer: int,
        num_trainers: int,
        folder: Path,
        channel: SideChannel,
        *,
        say: Callable[[str], object],
        timeout: timedelta,
    ) -> None:
        self.trainer, self.num_trainers = trainer, num_trainers
        self.timeout, self._say_line, self._channel = timeout, say, channel
        self.playing: list[int] | None = None
        """Who came to the last match."""
        self.readers: set[int] = set()
        """Trainers that may still read what was laid out for the last match."""
        self._missed: set[int] = set()
        """Trainers of which a line has said that they are gone."""
        self.board: Board | None = None
        """Of rank 0."""
        do_together(lambda: self._take_seat(folder), channel)

    def _take_seat(self, folder: Path) -> None:
        if self._channel.rank == 0:
            self.board = Board(folder)
            self.board.hold(_name(self.trainer))

    def come_back(self) -> int:
        """Takes back what this trainer has told before it died; the match after which it joins.

        Whoever makes a later roster sees that it lives. It reads nothing of earlier ones any more.
        """

        def look(board: Board) -> int:
            for note in ("absent", "finished", "result", "told"):
                board.remove(f"{note}-{self.trainer}")
            latest = board.highest("roster") or 0
            board.post(f"done-{self.trainer}", latest)
            return latest

        found: int = self.ask(look)
        return found

    # A match

    def meet(self, number: int) -> list[int]:
        """Who plays this match, as the first who comes to it finds: the same for all."""

        def look(board: Board, is_late: bool) -> list[int] | None:
            if self._are_reading(board, number - 1) and not is_late:
                return None
            for note in ("absent", "told"):
                board.remove(f"{note}-{self.trainer}")
            found = board.read(f"roster-{number}")
            return list(found or board.post_first(f"roster-{number}", self._living(board)))

        playing: list[int] = self.wait(look, lambda: None)
        self.readers = set()
        before, self.playing = self.playing or [], playing
        gone = [each for each in before if each not in {*playing, *self._missed}]
        if gone and self._is_first_to_tell(gone):
            others = ", ".join(map(str, playing))
            what = "done" if self.ask(self._is_finished(gone)) else "gone"
            names = ", ".join(map(str, gone))
            self._say(f"trainer {names} {what} at match {number}; playing on: {others}")
        self._missed = {*self._missed, *gone} - {*playing}
        return playing

    def _is_finished(self, trainers: Sequence[int]) -> Callable[[Board], bool]:
        return lambda board: all(board.read(f"finished-{each}") is not None for each in trainers)

    def _is_first_to_tell(self, gone: Sequence[int]) -> bool:
        """Whether no other trainer has told, or will, that these are gone: one line is enough."""

        def look(board: Board) -> bool:
            told = [board.post_first(f"told-{each}", self.trainer) for each in gone]
            return self.trainer in told

        found: bool = self.ask(look)
        return found

    def _say(self, text: str) -> None:
        if self._channel.rank == 0:
            self._say_line(f"tournament: {text}")

    def _living(self, board: Board) -> list[int]:
        return [
            each
            for each in range(self.num_trainers)
            if board.is_held(_name(each))
            and not any(board.read(f"{what}-{each}") for what in ("absent", "finished"))
        ]

    def await_offer(self, other: int, number: int, poll: Callable[[], object]) -> Any:
        """What ``other`` shows for the match, ``Gone``, or None if ``poll`` told to stop."""

        def look(board: Board, is_late: bool) -> Any:
            is_there = board.is_held(_name(other))
            note = board.read(f"offer-{other}")
            if note is not None and note["number"] == number:
                return note
            if note is not None and note["number"] > number:
                return Gone(f"has gone on to match {note['number']}")
            if board.read(f"finished-{other}") is not None:
                return Gone("has finished")
            if not is_there:
                return Gone("has ended: its process is gone")
            if is_late:
                board.post(f"absent-{other}", number)
                limit = self.timeout.total_seconds()
                return Gone(f"did not come within {limit:g} s")
            return None

        return self.wait(look, poll)

    def tell_gone(self, other: int, gone: Gone) -> str:
        """Why a match is not played; a line says so."""
        text = f"trainer {other} {gone.why}; trainer {self.trainer} goes on without it"
        if other not in self._missed and self._is_first_to_tell([other]):
            self._say(text)
        self._missed.add(other)
        return text

    def _are_reading(self, board: Board, number: int) -> bool:
        """Whether any still reads what was laid out for the match of that ``number``."""
        late = (each for each in self.readers if (board.read(f"done-{each}") or 0) < number)
        return any(each in self._living(board) for each in late)

    def _await_readers(self, number: int) -> None:
        """Returns when nobody reads any more what was laid out for the match of that ``number``."""

        def look(board: Board, is_late: bool) -> bool | None:
            return True if is_late or not self._are_reading(board, number) else None

        self.wait(look, lambda: None)

    # How they ask

    def wait(self, look: Callable[[Board, bool], Any], poll: Callable[[], object]) -> Any:
        """What ``look`` gives on rank 0, once that is not None; None if ``poll`` told to stop."""
        until = time.monotonic() + self.timeout.total_seconds()
        pause, most = POLL_SECONDS

        def watch(board: Board) -> Any:
            nonlocal pause
            end = time.monotonic() + ROUND_SECONDS
            while (found := look(board, time.monotonic() > until)) is None:
                if time.monotonic() > end:
                    return None
                time.sleep(pause)
                pause = min(most, 1.2 * pause)
            return found

        while (found := self.ask(watch)) is None:
            if poll():
                return None
        return found

    def ask(self, look: Callable[[Board], Any]) -> Any:
        """What ``look`` finds on rank 0, on all ranks of the trainer."""

        def ask() -> Any:
            assert self.board is not None
            return look(self.board)

        return ask() if self._channel.group is None else ask_first(ask, self._channel)

    def post(self, name: str, note: Any) -> None:
        """Leaves a note, behind whose name this trainer's number is put."""
        if self.board is not None:
            self.board.post(f"{name}-{self.trainer}", note)

    # Where all stand

    def lowest(self, name: str, number: int) -> int:
        """The lowest ``number`` that any who plays has told last under ``name``."""

        def look(board: Board) -> int:
            board.post(f"{name}-{self.trainer}", number)
            told = [board.read(f"{name}-{each}") for each in self._living(board)]
            return min((each or 0 for each in told), default=number)

        found: int = self.ask(look)
        return found

    @property
    def speaker(self) -> int:
        """The trainer that is to speak for all."""
        return min(self.playing or [0])

    def finish(self, number: int) -> None:
        """Tells that this trainer plays no more; others may still take what it showed."""
        self._await_readers(number)
        self.post("finished", number + 1)

    def results(self, mine: Mapping[str, Any]) -> dict[int, Any]:
        """What all trainers that live until they have one tell at their end, by number."""
        self.post("result", mine)

        def look(board: Board) -> dict[int, Any] | None:
            told = {each: board.read(f"result-{each}") for each in range(self.num_trainers)}
            late = [t for t, note in told.items() if note is None and board.is_held(_name(t))]
            return None if late else {t: note for t, note in told.items() if note is not None}

        while (found := self.ask(look)) is None:
            time.sleep(END_SECONDS)
        return {int(trainer): note for trainer, note in found.items()}

    def await_end(self, writer: int) -> None:
        """Returns when the ``writer`` has told that all is written, or is gone."""
        while not self.ask(
            lambda board: board.read("written") is not None or not board.is_held(_name(writer))
        ):
            time.sleep(END_SECONDS)

    def tell_end(self) -> None:
        if self.board is not None:
            self.board.post("written", 1)

    def close(self) -> list[int]:
        """Leaves; the others that are still there, on rank 0. Collective over nobody."""
        if self.board is None:
            return []
        self.post("closed", 1)
        left = [each for each in self._living(self.board) if each != self.trainer]
        self.board.close()
        self.board = None
        return left


def _name(trainer: int) -> str:
    return f"trainer-{trainer}"
