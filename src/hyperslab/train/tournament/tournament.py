"""``hyperslab.Tournament``: models that are trained at once, and play against each other."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperslab.comm.join import MOST_SECONDS, init
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel, ask_first, do_together
from hyperslab.comm.worlds import World, split_ranks
from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.store.segment import node_name
from hyperslab.train.checkpoint_state import (
    TENSOR,
    Parts,
    Tree,
    destinations,
    empties,
    leaves,
    load_state,
    put_together,
    random_state,
    set_random_state,
    state_of,
    take_apart,
)
from hyperslab.train.run_folder import without_nan
from hyperslab.train.tournament.board import Board, append_line
from hyperslab.train.tournament.mailbox import GoneError, Mailbox, Offer
from hyperslab.train.tournament.rules import (
    changed_values,
    check_ranges,
    check_rules,
    first_values,
    is_better,
    partner_of,
    select,
)

_log = logging.getLogger("hyperslab")

POLL_SECONDS = (0.00005, 0.02)
"""From one look at the board to the next: at first, and at most."""
ROUND_SECONDS = 0.25
"""So long rank 0 looks before the ranks agree whether to go on: signals to stop are seen then."""
LOG = "log.jsonl"
MEET_SECONDS = 600.0
"""So long trainers wait for each other before the first match."""
VALUES = "values"
"""The part beside model and optimizer: hyperparameters, steps, random generators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What became of a match, as one of its trainers sees it."""

    number: int
    step: int
    trainer: int
    partner: int | None
    """None: it had no partner, and goes on with its own model."""
    own: float = math.nan
    theirs: float = math.nan
    """What the two models are worth here; of a selection the other's is what it is worth there."""
    adopted: bool = False
    """Whether the partner's model goes on here."""
    why: str = ""
    """Why there was no partner."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Hyperparameters from here on."""

    def __str__(self) -> str:
        head = f"trainer {self.trainer}, match {self.number}: "
        if self.partner is None:
            return head + (self.why or "no partner this time, goes on")
        if self.adopted:
            lost = "" if math.isfinite(self.own) else f": its own score is {self.own}"
            told = f"loses to trainer {self.partner} ({self.own:.6g} against {self.theirs:.6g})"
            return f"{head}{told}, goes on with that model{lost}"
        beats = "is level with" if self.own == self.theirs else "wins against"
        told = f"{beats} trainer {self.partner} ({self.own:.6g} against {self.theirs:.6g})"
        if not math.isfinite(self.own):
            told = f"its score is {self.own}, and that of trainer {self.partner} {self.theirs}"
        return f"{head}{told}, goes on with its own model"


class _Gone(NamedTuple):
    """Why a trainer did not come."""

    why: str


class Tournament:
    """Several trainers, each on its own share of the ranks, whose models play against each other.

    The ranks are cut into ``trainers`` worlds of equally many that follow each other. Every
    ``every`` steps trainers meet. With ``method="pairs"`` random pairs exchange models in memory,
    each trainer scores both, and goes on with the better (LTFB). With ``"population"`` the last
    ``fraction`` by score take over models of the first.

    Hyperparameters begin with ``values`` (a number for all, or one for each trainer) or somewhere
    in their ``ranges``, and travel with the model. A model that is taken over has those with a
    range multiplied or divided by ``perturb``, within the range (left out: by 1.25 in a population,
    not at all in pairs). They are settings of the optimizer's groups, such as ``lr``, unless
    ``apply`` takes them.

    ``carry`` names what comes with weights: ``optimizer`` state, ``step`` (``model_steps``) and
    ``rng`` (the random generators). Who has a score that is no finite number loses.

    All that is random follows from ``seed``. A trainer that dies, or does not come to a match
    within ``timeout_seconds``, leaves the others playing. Trainers leave notes for each other in
    ``folder``, which all nodes see; left out, a temporary one, on a single node.

    Collective over all ranks, as is nothing after it: methods are collective over a trainer's.
    """

    def __init__(
        self,
        trainers: int,
        *,
        every: int = 100,
        seed: int = 0,
        folder: str | Path | None = None,
        method: str = "pairs",
        carry: Sequence[str] = ("optimizer", "step"),
        ranges: Mapping[str, Sequence[float]] | None = None,
        values: Mapping[str, float | Sequence[float]] | None = None,
        perturb: float | None = None,
        fraction: float = 0.25,
        higher_is_better: bool = False,
        apply: Callable[[Mapping[str, float]], object] | None = None,
        say: Callable[[str], object] = _log.warning,
        timeout_seconds: float = 300.0,
        trainer: int | None = None,
    ) -> None:
        """``trainer`` is for one that comes back alone, with its number, while the others play."""
        check_rules(
            trainers=trainers,
            every=every,
            method=method,
            carry=carry,
            perturb=perturb,
            fraction=fraction,
        )
        if not 0 < timeout_seconds <= MOST_SECONDS:
            raise ConfigError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        self.every, self.seed, self.num_trainers = every, seed, trainers
        self.method, self.carry, self.fraction = method, tuple(carry), fraction
        self.ranges = check_ranges(ranges or {})
        self._starts = _checked_starts(values or {}, self.ranges, trainers)
        self._factor = perturb or (1.25 if method == "population" else 1.0)
        self.higher_is_better, self._apply, self.say = higher_is_better, apply, say
        self._timeout = timedelta(seconds=timeout_seconds)
        self.comes_back = trainer is not None
        if trainer is not None and not 0 <= trainer < trainers:
            raise ConfigError(f"trainer must be from 0 to {trainers - 1}, got {trainer}")
        num_worlds = 1 if self.comes_back else trainers
        self.world: World = split_ranks(
            num_worlds, what="trainers", timeout_seconds=max(MEET_SECONDS, timeout_seconds)
        )
        self.trainer = self.world.number if trainer is None else trainer
        self.values = first_settings(self.ranges, self._starts, seed, self.trainer)
        self.number = 0
        """Of the last match."""
        self.last_score = math.nan
        """Of the model that went on after it."""
        self.steps = self.model_steps = 0
        """Calls of ``step``, and steps that the model has had."""
        try:
            self._folder, self._is_temporary = self._find_folder(folder)
        except BaseException as error:
            self.world.fail(f"{type(error).__name__}: {error}")
            self.world.close()
            raise
        self.has_met = False
        """Whether all trainers were ready: from then on each goes on without the others."""
        self._board: Board | None = None
        self._channel: SideChannel | None = None
        self._mailbox: Mailbox | None = None
        self._playing: list[int] | None = None
        self._readers: set[int] = set()
        """Trainers that may still read what was laid out for the last match."""
        self._missed: set[int] = set()
        """Trainers of which a line has said that they are gone."""
        self._is_checked = False
        self._inbox: tuple[object, dict[str, Tensor]] = (None, {})
        self._kept: dict[str, Tensor] = {}
        """The model that this trainer came to a match with."""

    # Where it is played

    def mesh(self, **settings: Any) -> Mesh:
        """The mesh of this trainer's ranks; the arguments are those of ``hyperslab.init``.

        Collective over the trainer's ranks.
        """
        mesh = init(**settings)
        self.sit_down(mesh)
        return mesh

    def sit_down(self, mesh: Mesh) -> None:
        """Takes a mesh of this trainer's ranks as its own, and meets the others.

        Collective over all ranks of all trainers the first time.
        """
        if self._channel is None:
            self._channel = SideChannel(mesh, "playing a tournament")
            do_together(self._take_seat, self._channel)
            self._mailbox = Mailbox(mesh, self._channel, self._timeout)
            self.world.tell_all("ready", self._timeout + timedelta(seconds=MEET_SECONDS))
            self.has_met = True

    def _find_folder(self, asked: str | Path | None) -> tuple[Path, bool]:
        """The folder of this session, a new one for each start of the whole; if temporary.

        Collective over all ranks.
        """
        limit = timedelta(seconds=MEET_SECONDS)
        nodes = {*self.world.tell_all(node_name(), limit)}
        if asked is None and (len(nodes) > 1 or self.comes_back):
            raise ConfigError(
                f"the trainers run on {len(nodes)} nodes, or join others: give the tournament a "
                "folder that all nodes see (folder=...)"
            )
        found: str | None = None
        if self.world.first + self.world.rank == 0:
            place = Path(asked or tempfile.mkdtemp(prefix="hyperslab-tournament-"))
            found = str(_session(place, is_new=not self.comes_back))
        told = self.world.tell_all(found, limit)[0]
        return Path(str(told)), asked is None

    def _take_seat(self) -> None:
        if self._channel is not None and self._channel.rank == 0:
            self._board = Board(self._folder)
            self._board.hold(_name(self.trainer))
            if self.comes_back:
                for note in ("absent", "finished", "result", "told"):
                    self._board.remove(f"{note}-{self.trainer}")

    # Between matches

    def step(
        self, model: nn.Module, optimizer: Optimizer, score: Callable[[], float]
    ) -> Match | None:
        """To be called after each step of the optimizer; plays every ``every`` calls.

        ``score`` tells what the model is worth, on samples that it has not learned from.
        """
        self.check(optimizer)
        self.steps += 1
        self.model_steps += 1
        if self.steps % self.every:
            return None
        return self.play({"model": model, "optimizer": optimizer}, score)

    def check(self, optimizer: Optimizer) -> None:
        """Gives the optimizer its hyperparameters the first time; raises if it has no such."""
        if self._is_checked:
            return
        if self._apply is None:
            known = sorted({key for group in optimizer.param_groups for key in group} - {"params"})
            for name in self.values:
                if name not in known:
                    raise ConfigError(
                        f"there is no hyperparameter {name!r} in the groups of "
                        f"{type(optimizer).__name__}{did_you_mean(name, known, '; ')} (it has "
                        f"{', '.join(known)}; others need apply=)"
                    )
        self._is_checked = True
        self._give(optimizer)

    def _give(self, optimizer: Optimizer) -> None:
        if self._apply is not None:
            self._apply(self.values)
            return
        for group in optimizer.param_groups:
            group.update(self.values)

    def state_dict(self) -> dict[str, Any]:
        """What a trainer needs, beside model and optimizer, to go on from here."""
        return {
            "number": self.number,
            "steps": self.steps,
            "model_steps": self.model_steps,
            "values": dict(self.values),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state_dict`` was called; who comes back alone joins the next match."""
        self.number, self.steps = int(state["number"]), int(state["steps"])
        self.model_steps, self.values = int(state["model_steps"]), dict(state["values"])
        self._is_checked = False
        if self.comes_back:
            latest = self._ask(lambda board: board.highest("roster"))
            self.number = max(self.number, latest or 0)

    # A match

    def play(
        self, parts: Parts, score: Callable[[], float], poll: Callable[[], object] = lambda: None
    ) -> Match | None:
        """The next match; None, and nothing is changed, if ``poll`` told to stop while waiting.

        ``parts`` are the ``model`` and the ``optimizer``. All ranks get the same answer.
        """
        number, before = self.number + 1, random_state()
        playing = self._meet(number)
        play = self._play_pair if self.method == "pairs" else self._play_all
        match = play(number, playing, parts, score, poll)
        if match is None or not (match.adopted and "rng" in self.carry):
            set_random_state(before)
        if match is not None:
            self._post(f"done-{self.trainer}", number)  # also who gave up reads no more
            self.number = number
            self.last_score = match.theirs if match.adopted else match.own
            self._write(match)
        return match

    def _play_pair(
        self,
        number: int,
        playing: Sequence[int],
        parts: Parts,
        score: Callable[[], float],
        poll: Callable[[], object],
    ) -> Match | None:
        partner = partner_of(self.trainer, playing, self.seed, number)
        if partner is None or self.trainer not in playing:
            return self._match(number, None)
        trees, offer = self._lay_out(number, parts, {partner})
        found = self._await_offer(partner, number, poll)
        if found is None:
            return None
        if isinstance(found, _Gone):
            return self._match(number, None, why=self._told_gone(partner, found))
        theirs = Offer.of_note(found["offer"])
        inbox = self._room(found["trees"], parts)
        try:
            self._read(number, partner, offer, theirs, inbox)
        except GoneError as error:
            return self._match(number, None, why=self._told_gone(partner, _Gone(str(error))))
        finally:
            self._post(f"done-{self.trainer}", number)
        return self._decide(number, partner, parts, trees, found, inbox, score)

    def _decide(
        self,
        number: int,
        partner: int,
        parts: Parts,
        trees: Mapping[str, Tree],
        found: Mapping[str, Any],
        inbox: Mapping[str, Tensor],
        score: Callable[[], float],
    ) -> Match:
        """Scores both models; the better stays in ``parts``."""
        model = parts["model"]
        own = self._scored(score)
        mine: dict[str, Tensor] = {}
        tree = take_apart(state_of(model, parts), "model", mine)
        self._keep(mine)
        load_state(model, put_together(found["trees"]["model"], inbox), parts)
        theirs = self._scored(score)
        if not is_better(theirs, own, higher_is_better=self.higher_is_better):
            load_state(model, put_together(tree, self._kept), parts)
            return self._match(number, partner, own=own, theirs=theirs)
        self._take_over(number, parts, found, inbox, is_lost=not math.isfinite(own))
        return self._match(number, partner, own=own, theirs=theirs, adopted=True)

    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies this trainer's model, into the memory of the last match if that fits."""
        like = [(name, x.shape, x.dtype, x.device) for name, x in self._kept.items()]
        if like != [(name, x.shape, x.dtype, x.device) for name, x in tensors.items()]:
            self._kept = {name: torch.empty_like(x.detach()) for name, x in tensors.items()}
        with torch.no_grad():
            for name, kept in self._kept.items():
                kept.copy_(tensors[name])

    def _play_all(
        self,
        number: int,
        playing: Sequence[int],
        parts: Parts,
        score: Callable[[], float],
        poll: Callable[[], object],
    ) -> Match | None:
        """Truncation selection among all who play."""
        if self.trainer not in playing:
            return self._match(number, None)
        own = self._scored(score)
        others = [each for each in playing if each != self.trainer]
        _, offer = self._lay_out(number, parts, {*others}, score=own)
        notes: dict[int, Any] = {}
        for other in others:
            found = self._await_offer(other, number, poll)
            if found is None:
                return None
            if isinstance(found, _Gone):
                self._told_gone(other, found)
            else:
                notes[other] = found
        scores = {self.trainer: own} | {t: float(note["score"]) for t, note in notes.items()}
        chosen = select(
            scores, self.fraction, self.seed, number, higher_is_better=self.higher_is_better
        )
        match = self._match(number, None, own=own, why="is neither first nor last, goes on")
        for loser, winner in sorted(chosen.items()):
            if self.trainer == loser:
                match = self._copy_of(number, winner, offer, notes[winner], parts, own)
            elif self.trainer == winner:
                match = self._match(number, loser, own=own, theirs=scores[loser])
                self._give_to(number, loser, offer, Offer.of_note(notes[loser]["offer"]))
        return match

    def _copy_of(
        self,
        number: int,
        winner: int,
        offer: Offer,
        found: Mapping[str, Any],
        parts: Parts,
        own: float,
    ) -> Match:
        inbox = self._room(found["trees"], parts)
        try:
            self._read(number, winner, offer, Offer.of_note(found["offer"]), inbox)
        except GoneError as error:
            return self._match(number, None, why=self._told_gone(winner, _Gone(str(error))))
        load_state(parts["model"], put_together(found["trees"]["model"], inbox), parts)
        self._take_over(number, parts, found, inbox, is_lost=not math.isfinite(own))
        theirs = float(found["score"])
        return self._match(number, winner, own=own, theirs=theirs, adopted=True)

    def _give_to(self, number: int, other: int, mine: Offer, theirs: Offer) -> None:
        """Sends what is laid out to one that cannot read it in memory."""
        assert self._mailbox is not None
        if not self._mailbox.can_read(theirs):
            try:
                self._read(number, other, mine, theirs, {})
            except GoneError as error:
                self._told_gone(other, _Gone(str(error)))

    def _take_over(
        self,
        number: int,
        parts: Parts,
        found: Mapping[str, Any],
        inbox: Mapping[str, Tensor],
        *,
        is_lost: bool,
    ) -> None:
        """What comes with a model whose weights are here."""
        optimizer = parts["optimizer"]
        if "optimizer" in self.carry:
            copies = {name: tensor.clone() for name, tensor in inbox.items()}
            load_state(optimizer, put_together(found["trees"]["optimizer"], copies), parts)
        elif is_lost:  # its moments are no numbers either
            optimizer.state.clear()
        told = put_together(found["trees"][VALUES], inbox)
        if "step" in self.carry:
            self.model_steps = int(told["model_steps"])
        if "rng" in self.carry:
            set_random_state(told["random"])
        self.values = changed_values(
            {**self.values, **told["values"]},
            self.ranges,
            self._factor,
            self.seed,
            number,
            self.trainer,
        )
        self._give(optimizer)

    # What trainers tell each other

    def _meet(self, number: int) -> list[int]:
        """Who plays this match, as the first who comes to it finds: the same for all."""

        def look(board: Board, is_late: bool) -> list[int] | None:
            if self._are_reading(board, number - 1) and not is_late:
                return None
            for note in ("absent", "told"):
                board.remove(f"{note}-{self.trainer}")
            found = board.read(f"roster-{number}")
            return list(found or board.post_first(f"roster-{number}", self._living(board)))

        playing: list[int] = self._wait(look, lambda: None)
        self._readers = set()
        before, self._playing = self._playing or [], playing
        gone = [each for each in before if each not in {*playing, *self._missed}]
        if gone and self._is_first_to_tell(gone):
            others = ", ".join(map(str, playing))
            what = "done" if self._ask(self._is_finished(gone)) else "gone"
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

        found: bool = self._ask(look)
        return found

    def _say(self, text: str) -> None:
        if self._channel is not None and self._channel.rank == 0:
            self.say(f"tournament: {text}")

    def _living(self, board: Board) -> list[int]:
        return [
            each
            for each in range(self.num_trainers)
            if board.is_held(_name(each))
            and not any(board.read(f"{what}-{each}") for what in ("absent", "finished"))
        ]

    def _lay_out(
        self, number: int, parts: Parts, readers: set[int], score: float = math.nan
    ) -> tuple[Mapping[str, Tree], Offer]:
        """Shows this trainer's model, and what goes with it, to the others."""
        assert self._mailbox is not None
        values: dict[str, Any] = {"values": dict(self.values), "model_steps": self.model_steps}
        if "rng" in self.carry:
            values["random"] = random_state()
        shown = {"model": parts["model"], VALUES: values}
        if "optimizer" in self.carry:
            shown["optimizer"] = parts["optimizer"]
        tensors: dict[str, Tensor] = {}
        trees = {
            name: take_apart(state_of(part, parts), name, tensors) for name, part in shown.items()
        }
        offer = self._mailbox.offer(number, tensors, ("model", "optimizer"))
        self._readers = readers
        note = {"number": number, "score": score, "trees": trees, "offer": offer}
        self._post(f"offer-{self.trainer}", note)  # who reads waits until all is there
        self._mailbox.fill(number, tensors)
        return trees, offer

    def _await_offer(self, other: int, number: int, poll: Callable[[], object]) -> Any:
        """What ``other`` shows for the match, ``_Gone``, or None if ``poll`` told to stop."""

        def look(board: Board, is_late: bool) -> Any:
            is_there = board.is_held(_name(other))
            note = board.read(f"offer-{other}")
            if note is not None and note["number"] == number:
                return note
            if note is not None and note["number"] > number:
                return _Gone(f"has gone on to match {note['number']}")
            if board.read(f"finished-{other}") is not None:
                return _Gone("has finished")
            if not is_there:
                return _Gone("has ended: its process is gone")
            if is_late:
                board.post(f"absent-{other}", number)
                limit = self._timeout.total_seconds()
                return _Gone(f"did not come within {limit:g} s")
            return None

        return self._wait(look, poll)

    def _are_reading(self, board: Board, number: int) -> bool:
        """Whether any still reads what was laid out for the match of that ``number``."""
        late = (each for each in self._readers if (board.read(f"done-{each}") or 0) < number)
        return any(each in self._living(board) for each in late)

    def _await_readers(self) -> None:
        """Returns when nobody reads any more what was laid out for the last match."""

        def look(board: Board, is_late: bool) -> bool | None:
            return True if is_late or not self._are_reading(board, self.number) else None

        self._wait(look, lambda: None)

    def _wait(self, look: Callable[[Board, bool], Any], poll: Callable[[], object]) -> Any:
        """What ``look`` gives on rank 0, once that is not None; None if ``poll`` told to stop."""
        until = time.monotonic() + self._timeout.total_seconds()
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

        while (found := self._ask(watch)) is None:
            if poll():
                return None
        return found

    def _ask(self, look: Callable[[Board], Any]) -> Any:
        """What ``look`` finds on rank 0, on all ranks of the trainer."""
        assert self._channel is not None

        def ask() -> Any:
            assert self._board is not None
            return look(self._board)

        return ask() if self.world.num_ranks == 1 else ask_first(ask, self._channel)

    def _post(self, name: str, note: Any) -> None:
        if self._board is not None:
            self._board.post(name, note)

    def _read(
        self, number: int, other: int, mine: Offer, theirs: Offer, inbox: Mapping[str, Tensor]
    ) -> None:
        """Fills ``inbox`` with what ``other`` has laid out."""
        assert self._mailbox is not None
        if self._mailbox.can_read(theirs):
            self._mailbox.read(theirs, inbox)
            return
        first, second = sorted((self.trainer, other))
        name = f"match {number} of {first} and {second}"
        self._mailbox.swap(name, mine, theirs, inbox, first=self.trainer == first)

    def _room(self, trees: Mapping[str, Tree], parts: Parts) -> dict[str, Tensor]:
        """Tensors for what another trainer lays out, cut like those here, kept for later."""
        key = [(leaf[TENSOR], leaf["shape"], leaf["dtype"]) for leaf in leaves(dict(trees))]
        if self._inbox[0] != key:
            inbox: dict[str, Tensor] = {}
            for name, tree in trees.items():
                if name == VALUES:
                    inbox |= empties(tree)
                    continue
                found = destinations(parts[name], tree, parts)
                inbox |= {each: torch.empty_like(tensor) for each, tensor in found.items()}
            self._inbox = key, inbox
        return self._inbox[1]

    def _scored(self, score: Callable[[], float]) -> float:
        """The score that rank 0 finds."""
        assert self._channel is not None
        with torch.no_grad():
            found = float(score())
        return self._channel.tell_all(found)[0]

    def _told_gone(self, other: int, gone: _Gone) -> str:
        """Why a match is not played; a line says so."""
        text = f"trainer {other} {gone.why}; trainer {self.trainer} goes on without it"
        if other not in self._missed and self._is_first_to_tell([other]):
            self._say(text)
        self._missed.add(other)
        return text

    def _match(self, number: int, partner: int | None, **found: Any) -> Match:
        return Match(
            number=number,
            step=self.steps,
            trainer=self.trainer,
            partner=partner,
            values=dict(self.values),
            **found,
        )

    def lowest(self, name: str, number: int) -> int:
        """The lowest ``number`` that any who plays has told last under ``name``."""

        def look(board: Board) -> int:
            board.post(f"{name}-{self.trainer}", number)
            told = [board.read(f"{name}-{each}") for each in self._living(board)]
            return min((each or 0 for each in told), default=number)

        found: int = self._ask(look)
        return found

    @property
    def folder(self) -> Path:
        """Of the whole tournament."""
        return self._folder.parent.parent

    @property
    def log(self) -> Path:
        """The lines of all matches, of all trainers."""
        return self.folder / LOG

    def _write(self, match: Match) -> None:
        if self._board is not None:
            append_line(self.log, {"kind": "match", **without_nan(asdict(match))})

    # The end

    def finish(self) -> None:
        """Tells the others that this trainer plays no more; they may still take what it showed."""
        self._await_readers()
        self._post(f"finished-{self.trainer}", self.number + 1)

    def results(self, mine: Mapping[str, Any]) -> dict[int, Any]:
        """What all trainers that live until they have one tell at their end, by number."""
        self._post(f"result-{self.trainer}", mine)

        def look(board: Board) -> dict[int, Any] | None:
            told = {each: board.read(f"result-{each}") for each in range(self.num_trainers)}
            late = [t for t, note in told.items() if note is None and board.is_held(_name(t))]
            return None if late else {t: note for t, note in told.items() if note is not None}

        while (found := self._ask(look)) is None:
            time.sleep(POLL_SECONDS[1])
        return {int(trainer): note for trainer, note in found.items()}

    def await_end(self, writer: int) -> None:
        """Returns when the ``writer`` has told that all is written, or is gone."""
        while not self._ask(
            lambda board: board.read("written") is not None or not board.is_held(_name(writer))
        ):
            time.sleep(POLL_SECONDS[1])

    def tell_end(self) -> None:
        self._post("written", 1)

    @property
    def speaker(self) -> int:
        """The trainer that is to speak for all."""
        return min(self._playing or [0])

    def close(self) -> None:
        """Leaves the tournament, and the ranks' world."""
        if self._channel is not None:
            if self._mailbox is not None:
                self._mailbox.close()
            if self._board is not None:
                self._board.post(f"closed-{self.trainer}", 1)
                others = self._living(self._board)
                self._board.close()
                if self._is_temporary and others in ([], [self.trainer]):
                    shutil.rmtree(self.folder, ignore_errors=True)
            self._channel.close()
            self._channel = None
        self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.world.fail(f"{type(error).__name__}: {error}")
        elif self._channel is not None:
            self.finish()
        self.close()


def first_settings(
    ranges: Mapping[str, Sequence[float]],
    starts: Mapping[str, float | Sequence[float]],
    seed: int,
    trainer: int,
) -> dict[str, float]:
    """What the hyperparameters of a trainer begin with."""
    given = {
        name: float(each[trainer]) if isinstance(each, Sequence) else float(each)
        for name, each in starts.items()
    }
    return {**first_values(ranges, seed, trainer), **given}


def _session(folder: Path, *, is_new: bool) -> Path:
    """The folder for the notes of one start of a tournament."""
    place = folder / "board"
    place.mkdir(parents=True, exist_ok=True)
    found = [int(path.name.removeprefix("session-")) for path in place.glob("session-*")]
    number = max(found, default=0) + is_new
    if number == 0:
        raise ConfigError(f"{folder} holds no tournament to come back to: leave trainer out")
    session = place / f"session-{number}"
    session.mkdir(exist_ok=True)
    return session


def _checked_starts(
    values: Mapping[str, float | Sequence[float]],
    ranges: Mapping[str, tuple[float, float]],
    trainers: int,
) -> dict[str, float | Sequence[float]]:
    for name, each in values.items():
        numbers: list[Any] = [*each] if isinstance(each, Sequence) else [each] * trainers
        if len(numbers) != trainers:
            raise ConfigError(
                f"values: {name} has {len(numbers)} numbers for {trainers} trainers: give one for "
                "each, or one for all"
            )
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ConfigError(f"values: {name} must be finite numbers, got {each!r}")
        low, high = ranges.get(name, (-math.inf, math.inf))
        if outside := [number for number in numbers if not low <= number <= high]:
            raise ConfigError(
                f"values: {name} = {outside[0]:g} lies outside of its range, {low:g} to {high:g}"
            )
    return dict(values)


def _name(trainer: int) -> str:
    return f"trainer-{trainer}"
