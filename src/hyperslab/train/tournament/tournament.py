"""``hyperslab.Tournament``: models that are trained at once, and play against each other."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from hyperslab.comm.join import MOST_SECONDS, init
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel
from hyperslab.comm.worlds import World, split_ranks
from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.store.segment import node_name
from hyperslab.train.checkpoint_state import Parts, random_state, set_random_state
from hyperslab.train.run_folder import without_nan
from hyperslab.train.tournament.board import append_line
from hyperslab.train.tournament.exchange import Exchange
from hyperslab.train.tournament.match import Contest, Match, Player
from hyperslab.train.tournament.others import Others
from hyperslab.train.tournament.rules import (
    changed_values,
    check_ranges,
    check_rules,
    check_starts,
    first_settings,
)

_log = logging.getLogger("hyperslab")

LOG = "log.jsonl"
MEET_SECONDS = 600.0
"""So long trainers wait for each other before the first match."""


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
        self._starts = check_starts(values or {}, self.ranges, trainers)
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
        self._others: Others | None = None
        self._exchange: Exchange | None = None
        self._channel: SideChannel | None = None
        self._player: Player | None = None
        self._is_checked = False
        self._joined = 0
        """The last match before this trainer came back."""

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
            self._take_seat(mesh, self._channel)
            self.world.tell_all("ready", self._timeout + timedelta(seconds=MEET_SECONDS))
            self.has_met = True

    def _take_seat(self, mesh: Mesh, channel: SideChannel) -> None:
        self._others = Others(
            self.trainer,
            self.num_trainers,
            self._folder,
            channel,
            say=self.say,
            timeout=self._timeout,
        )
        if self.comes_back:
            self.number = self._joined = self._others.come_back()
        self._exchange = Exchange(mesh, channel, self._others, self.carry)
        self._player = Player(
            self._others,
            self._exchange,
            channel,
            seed=self.seed,
            carry=self.carry,
            fraction=self.fraction,
            higher_is_better=self.higher_is_better,
        )

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
        self.number = max(int(state["number"]), self._joined)
        self.steps = int(state["steps"])
        self.model_steps, self.values = int(state["model_steps"]), dict(state["values"])
        self._is_checked = False

    # A match

    def play(
        self, parts: Parts, score: Callable[[], float], poll: Callable[[], object] = lambda: None
    ) -> Match | None:
        """The next match; None, and nothing is changed, if ``poll`` told to stop while waiting.

        ``parts`` are the ``model`` and the ``optimizer``. All ranks get the same answer.
        """
        assert self._player is not None
        number, random = self.number + 1, random_state()
        values = {"values": dict(self.values), "model_steps": self.model_steps}
        contest = Contest(number, self.steps, parts, values, score, poll)
        match = self._player.play(self.method, contest)
        if match is not None and match.adopted:
            random = self._take_over(number, self._player.taken, parts["optimizer"]) or random
        set_random_state(random)
        if match is None:
            return None
        match = replace(match, values=dict(self.values))
        self.others.post("done", number)  # also who gave up reads no more
        self.number = number
        self.last_score = match.theirs if match.adopted else match.own
        self._write(match)
        return match

    def _take_over(
        self, number: int, taken: Mapping[str, Any], optimizer: Optimizer
    ) -> dict[str, Any] | None:
        """Goes on with what came with a model; where its random generators stand, if that came."""
        if "step" in self.carry:
            self.model_steps = int(taken["model_steps"])
        values = {**self.values, **taken["values"]}
        self.values = changed_values(
            values, self.ranges, self._factor, self.seed, number, self.trainer
        )
        self._give(optimizer)
        return taken.get("random")

    @property
    def others(self) -> Others:
        """The other trainers, once ``sit_down`` or ``mesh`` has been called."""
        assert self._others is not None
        return self._others

    @property
    def folder(self) -> Path:
        """Of the whole tournament."""
        return self._folder.parent.parent

    @property
    def log(self) -> Path:
        """The lines of all matches, of all trainers."""
        return self.folder / LOG

    def _write(self, match: Match) -> None:
        if self.world.rank == 0:
            append_line(self.log, {"kind": "match", **without_nan(asdict(match))})

    # The end

    def finish(self) -> None:
        """Tells the others that this trainer plays no more; they may still take what it showed."""
        self.others.finish(self.number)

    def close(self) -> None:
        """Leaves the tournament, and the ranks' world."""
        if self._channel is not None:
            if self._exchange is not None:
                self._exchange.close()
            if self._others is not None:
                is_last = not self._others.close() and self.world.rank == 0
                if self._is_temporary and is_last:
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
