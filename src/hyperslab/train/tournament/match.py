"""A match: whose model goes on, as one of the trainers that play it finds out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperslab.comm.side_channel import SideChannel
from hyperslab.train.checkpoint_state import Parts, load_state, put_together
from hyperslab.train.tournament.exchange import VALUES, Exchange
from hyperslab.train.tournament.mailbox import GoneError
from hyperslab.train.tournament.offer import Offer
from hyperslab.train.tournament.others import Gone, Others
from hyperslab.train.tournament.rules import is_better, partner_of, select


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


class Contest(NamedTuple):
    """What a trainer brings to a match."""

    number: int
    step: int
    parts: Parts
    """The ``model`` and the ``optimizer``."""
    values: Mapping[str, Any]
    """Its hyperparameters (``values``), and ``model_steps``."""
    score: Callable[[], float]
    poll: Callable[[], object]
    """Tells whether to stop waiting."""


class Player:
    """Plays the matches of one trainer. All methods are collective over its ranks."""

    def __init__(
        self,
        others: Others,
        exchange: Exchange,
        channel: SideChannel,
        *,
        seed: int,
        carry: Sequence[str],
        fraction: float,
        higher_is_better: bool,
    ) -> None:
        self._others, self._exchange, self._channel = others, exchange, channel
        self._seed, self._carry, self._fraction = seed, carry, fraction
        self._higher_is_better = higher_is_better
        self.taken: dict[str, Any] = {}
        """What came with the model that was taken over: ``values``, ``model_steps``, ``random``."""

    def play(self, method: str, contest: Contest) -> Match | None:
        """None, and nothing is changed, if ``poll`` told to stop while waiting."""
        self.taken = {}
        playing = self._others.meet(contest.number)
        if self._others.trainer not in playing:
            return self._match(contest, None)
        play = self._play_pair if method == "pairs" else self._play_all
        return play(contest, playing)

    def _play_pair(self, contest: Contest, playing: Sequence[int]) -> Match | None:
        number, others = contest.number, self._others
        partner = partner_of(others.trainer, playing, self._seed, number)
        if partner is None:
            return self._match(contest, None)
        offer = self._exchange.lay_out(number, contest.parts, contest.values, {partner})
        found = others.await_offer(partner, number, contest.poll)
        if found is None:
            return None
        if isinstance(found, Gone):
            return self._match(contest, None, why=others.tell_gone(partner, found))
        inbox = self._exchange.room(found["trees"], contest.parts)
        theirs = Offer.of_note(found["offer"])
        try:
            self._exchange.read(number, partner, offer, theirs, inbox)
        except GoneError as error:
            return self._match(contest, None, why=others.tell_gone(partner, Gone(str(error))))
        finally:
            others.post("done", number)
        return self._decide(contest, partner, found, inbox)

    def _decide(
        self, contest: Contest, partner: int, found: Mapping[str, Any], inbox: Mapping[str, Tensor]
    ) -> Match:
        """Scores both models; the better stays in ``parts``."""
        own, tree = self._scored(contest), self._exchange.keep(contest.parts)
        self._load_model(contest, found, inbox)
        theirs = self._scored(contest)
        if not is_better(theirs, own, higher_is_better=self._higher_is_better):
            self._exchange.put_back(contest.parts, tree)
            return self._match(contest, partner, own=own, theirs=theirs)
        self._take_over(contest, found, inbox, is_lost=not math.isfinite(own))
        return self._match(contest, partner, own=own, theirs=theirs, adopted=True)

    def _play_all(self, contest: Contest, playing: Sequence[int]) -> Match | None:
        """Truncation selection among all who play."""
        number, mine = contest.number, self._others.trainer
        own = self._scored(contest)
        others = [each for each in playing if each != mine]
        offer = self._exchange.lay_out(number, contest.parts, contest.values, {*others}, own)
        notes = self._notes_of(others, contest)
        if notes is None:
            return None
        scores = {mine: own} | {each: float(note["score"]) for each, note in notes.items()}
        chosen = select(
            scores, self._fraction, self._seed, number, higher_is_better=self._higher_is_better
        )
        match = self._match(contest, None, own=own, why="is neither first nor last, goes on")
        for loser, winner in sorted(chosen.items()):
            if mine == loser:
                match = self._copy_of(contest, winner, offer, notes[winner], own)
            elif mine == winner:
                match = self._match(contest, loser, own=own, theirs=scores[loser])
                self._give_to(number, loser, offer, Offer.of_note(notes[loser]["offer"]))
        return match

    def _notes_of(self, others: Sequence[int], contest: Contest) -> dict[int, Any] | None:
        """What those of the ``others`` show who come; None if ``poll`` told to stop."""
        notes: dict[int, Any] = {}
        for other in others:
            found = self._others.await_offer(other, contest.number, contest.poll)
            if found is None:
                return None
            if isinstance(found, Gone):
                self._others.tell_gone(other, found)
            else:
                notes[other] = found
        return notes

    def _copy_of(
        self, contest: Contest, winner: int, offer: Offer, found: Mapping[str, Any], own: float
    ) -> Match:
        inbox = self._exchange.room(found["trees"], contest.parts)
        theirs = Offer.of_note(found["offer"])
        try:
            self._exchange.read(contest.number, winner, offer, theirs, inbox)
        except GoneError as error:
            why = self._others.tell_gone(winner, Gone(str(error)))
            return self._match(contest, None, why=why)
        self._load_model(contest, found, inbox)
        self._take_over(contest, found, inbox, is_lost=not math.isfinite(own))
        score = float(found["score"])
        return self._match(contest, winner, own=own, theirs=score, adopted=True)

    def _give_to(self, number: int, other: int, mine: Offer, theirs: Offer) -> None:
        """Sends what is laid out to one that cannot read it in memory."""
        if not self._exchange.can_read(theirs):
            try:
                self._exchange.read(number, other, mine, theirs, {})
            except GoneError as error:
                self._others.tell_gone(other, Gone(str(error)))

    def _load_model(
        self, contest: Contest, found: Mapping[str, Any], inbox: Mapping[str, Tensor]
    ) -> None:
        state = put_together(found["trees"]["model"], inbox)
        load_state(contest.parts["model"], state, contest.parts)

    def _take_over(
        self,
        contest: Contest,
        found: Mapping[str, Any],
        inbox: Mapping[str, Tensor],
        *,
        is_lost: bool,
    ) -> None:
        """What comes with a model whose weights are here."""
        optimizer = contest.parts["optimizer"]
        if "optimizer" in self._carry:
            copies = {name: tensor.clone() for name, tensor in inbox.items()}
            state = put_together(found["trees"]["optimizer"], copies)
            load_state(optimizer, state, contest.parts)
        elif is_lost:  # its moments are no numbers either
            optimizer.state.clear()
        self.taken = put_together(found["trees"][VALUES], inbox)

    def _scored(self, contest: Contest) -> float:
        """The score that rank 0 finds."""
        with torch.no_grad():
            found = float(contest.score())
        return self._channel.tell_all(found)[0]

    def _match(self, contest: Contest, partner: int | None, **found: Any) -> Match:
        trainer = self._others.trainer
        return Match(
            number=contest.number, step=contest.step, trainer=trainer, partner=partner, **found
        )
