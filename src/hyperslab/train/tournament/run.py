"""A tournament of runs: one folder, in which each trainer has a run of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hyperslab.errors import ConfigError, FormatError, HyperslabError
from hyperslab.partial import explained_writing, make_folder, write_file
from hyperslab.train.checkpoint_folder import read_manifest
from hyperslab.train.checkpoints import find_checkpoints
from hyperslab.train.config import Config
from hyperslab.train.process import CAN_GO_ON
from hyperslab.train.recorder import read_log
from hyperslab.train.report import Outcome
from hyperslab.train.run_folder import to_json
from hyperslab.train.task import make_task
from hyperslab.train.tournament.figure import draw_tournament
from hyperslab.train.tournament.rules import check_rules, is_better
from hyperslab.train.tournament.seat import Seat, tell
from hyperslab.train.tournament.settings import ranges_of, starts_of
from hyperslab.train.tournament.tournament import LOG, MEET_SECONDS, Tournament
from hyperslab.train.weight_files import find_weights
from hyperslab.train.write_config import config_to_toml

T = TypeVar("T")
Train = Callable[[Config, Seat], Outcome]


def run_tournament(
    config: Config, train: Train, *, resume: bool, trainer: int | None = None
) -> Outcome:
    """Has each trainer ``train``, and writes down who has won.

    Collective over all ranks of all trainers, or of the one that joins the others.
    """
    check_tournament(config)
    folder = Path(config.run.folder or f"runs/{config.model.name.rpartition(':')[2]}").expanduser()
    game = _tournament(config, folder, trainer)
    with game:
        start = _tell_from_first(game, lambda: _begin(folder, game, resume=resume))
        step = start.steps[game.trainer] if resume or game.comes_back else None
        seat = Seat(game, config, step)
        for line in start.lines if seat.is_shown and game.world.rank == 0 else ():
            tell(line)
        try:
            outcome = train(seat.config(_place(folder, game.trainer)), seat)
        except HyperslabError as error:
            if game.has_met and game.world.rank == 0:  # else all stop, and one of them tells
                tell(f"tournament: trainer {game.trainer} stops: {error}")
            raise
        return _end(config, folder, game, outcome)


def check_tournament(config: Config) -> None:
    """Raises, before anything starts, for a tournament that cannot be played."""
    asked = config.tournament
    check_rules(
        trainers=asked.trainers,
        every=asked.every,
        method=asked.method,
        carry=asked.carry,
        perturb=asked.perturb,
        fraction=asked.fraction,
        prefix="tournament.",
    )
    ranges_of(config)
    starts_of(config)


def _tournament(config: Config, folder: Path, trainer: int | None) -> Tournament:
    asked = config.tournament
    return Tournament(
        asked.trainers,
        every=asked.every,
        seed=config.train.seed,
        folder=folder,
        method=asked.method,
        carry=asked.carry,
        ranges=ranges_of(config),
        values=starts_of(config),
        perturb=asked.perturb,
        fraction=asked.fraction,
        higher_is_better=make_task(config.task).higher_is_better,
        apply=lambda values: None,  # the trainer does so itself
        say=tell,
        timeout_seconds=asked.timeout_seconds,
        trainer=trainer,
    )


def _place(folder: Path, trainer: int) -> Path:
    return folder / f"trainer-{trainer}"


# Where the trainers begin


class _Start(NamedTuple):
    steps: list[int | None]
    """Of the checkpoints that the trainers go on from."""
    lines: list[str]
    """For the user."""


class _Saved(NamedTuple):
    """The steps of a trainer's checkpoints, by the number of the match before."""

    steps: Mapping[int, int]

    @property
    def newest(self) -> int | None:
        return max(self.steps, default=None)


def _tell_from_first(game: Tournament, find: Callable[[], _Start]) -> _Start:
    """What ``find`` gives on the first rank of all, on all; so do errors."""
    found: Any = None
    if game.world.first + game.world.rank == 0:
        try:
            found = [*find(), None]
        except HyperslabError as error:
            found = [[], [], [type(error).__name__, str(error)]]
    told = game.world.tell_all(found, timedelta(seconds=MEET_SECONDS))[0]
    steps, lines, fault = told
    if fault is not None:
        raise (FormatError if fault[0] == "FormatError" else ConfigError)(fault[1])
    return _Start(steps, lines)


def _begin(folder: Path, game: Tournament, *, resume: bool) -> _Start:
    """Looks at what is there, and makes the folder ready; one process does so for all."""
    num = game.num_trainers
    make_folder(folder)
    saved = [_saved(_place(folder, trainer)) for trainer in range(num)]
    if game.comes_back:
        mine = saved[game.trainer]
        step = None if mine.newest is None else mine.steps[mine.newest]
        lines = [f"Tournament: trainer {game.trainer} joins the others from step {step or 0}"]
        return _Start([step] * num, lines)
    reached = max((each.steps[each.newest] for each in saved if each.newest is not None), default=0)
    if reached and not resume:
        raise ConfigError(
            f"{folder} holds a tournament that reached step {reached}: continue it with --resume, "
            "or choose another folder with --folder"
        )
    found = [name for name in ("summary.json", LOG) if (folder / name).exists()]
    if found and not reached and not resume:
        raise ConfigError(
            f"{folder} holds {', '.join(found)}, and no checkpoint to go on from: choose another "
            "folder with --folder"
        )
    common = _common_match(saved, _last_playing(folder, num))
    steps = [_step_at(each, common) for each in saved]
    _cut_log(folder / LOG, common)
    (folder / "summary.json").unlink(missing_ok=True)
    lines = _start_lines(game, common if resume else None, steps)
    return _Start(steps, lines)


def _saved(place: Path) -> _Saved:
    """What a trainer can go on from."""
    found: dict[int, int] = {}
    checkpoints = place / "checkpoints"
    for step, path in find_checkpoints(checkpoints).items() if checkpoints.exists() else ():
        try:
            state = read_manifest(path).trees["values"]["tournament"]
            found[int(state["number"])] = step
        except (FormatError, KeyError, TypeError, ValueError):  # damaged, or of another run
            continue
    return _Saved(found)


def _last_playing(folder: Path, num: int) -> list[int]:
    """Who came to the last match; all, if there was none."""
    lines = [line for line in read_log(folder / LOG) if line.get("kind") == "match"]
    last = max((line["number"] for line in lines), default=0)
    return sorted({line["trainer"] for line in lines if line["number"] == last}) or [*range(num)]


def _common_match(saved: list[_Saved], playing: list[int]) -> int:
    """The last match after which all who played to the end have a checkpoint; 0 is none.

    Before the first match any checkpoint will do: no trainer has met another.
    """
    lasts = [set(saved[each].steps) for each in playing if each < len(saved)]
    common = set.intersection(*lasts) if lasts else set()
    return max(common, default=0)


def _step_at(saved: _Saved, common: int) -> int | None:
    """The newest checkpoint up to a match: of a trainer that died before, an earlier one."""
    numbers = [number for number in saved.steps if number <= common]
    return saved.steps[max(numbers)] if numbers else None


def _cut_log(path: Path, common: int) -> None:
    """Removes what will be played again."""
    if path.exists():
        kept = [line for line in read_log(path) if line.get("number", 0) <= common]
        write_file(path, "".join(to_json(line) + "\n" for line in kept))


def _start_lines(game: Tournament, common: int | None, steps: list[int | None]) -> list[str]:
    size, num = game.world.num_ranks, game.num_trainers
    ranks = "one rank" if size == 1 else f"{size} ranks"
    what = "random pairs" if game.method == "pairs" else "all, by truncation selection"
    line = f"Tournament: {num} trainers of {ranks} each; every {game.every} steps {what} play"
    if common is None:
        return [line]
    shown = ", ".join(f"{number}: {step or 0}" for number, step in enumerate(steps))
    return [line, f"Going on after match {common} (trainers from steps {shown})"]


# How it ends


def _end(config: Config, folder: Path, game: Tournament, outcome: Outcome) -> Outcome:
    """Waits for the others, and writes down who has won; one trainer does so, and reports."""
    if outcome.exit_code == CAN_GO_ON:
        summary = {**outcome.summary, "folder": str(folder)}
        return Outcome(
            summary, CAN_GO_ON, is_told=outcome.is_told and game.trainer == game.others.speaker
        )
    score = make_task(config.task).score
    results = game.others.results(
        {
            "score": _final_score(outcome.summary, score, game.last_score),
            "values": dict(game.values),
            "matches": game.number,
            "summary": outcome.summary,
        }
    )
    is_writer = game.trainer == min(results)
    winner = _winner(results, higher_is_better=game.higher_is_better)
    summary = _summary(config, folder, results, winner, score)
    if is_writer and game.world.rank == 0:
        write_file(folder / "config.toml", config_to_toml(config))
        weights = _copy_weights(_place(folder, winner), folder)
        figures = []
        if config.run.figures:
            figures = draw_tournament(folder / LOG, folder / "figures", config, winner)
        summary |= {"weights": weights, "figures": [str(path) for path in figures]}
        write_file(folder / "summary.json", to_json(summary, indent=2) + "\n")
        game.others.tell_end()
    game.others.await_end(min(results))
    return replace(outcome, summary=summary, is_told=outcome.is_told and is_writer)


def _final_score(summary: Mapping[str, Any], score: str, last: float) -> float:
    """What a trainer's best model is worth: on samples that are the same for all, if there are any.

    Else what it was worth in the last match.
    """
    for part in ("validation", "test"):
        found = summary["scores"].get(part, {}).get(score)
        if found is not None:
            return float(found)
    return last


def _winner(results: Mapping[int, Mapping[str, Any]], *, higher_is_better: bool) -> int:
    best = min(results)
    for trainer in sorted(results):
        mine, others = float(results[trainer]["score"]), float(results[best]["score"])
        if is_better(mine, others, higher_is_better=higher_is_better):
            best = trainer
    return best


def _summary(
    config: Config,
    folder: Path,
    results: Mapping[int, Mapping[str, Any]],
    winner: int,
    score: str,
) -> dict[str, Any]:
    num, best = config.tournament.trainers, results[winner]
    missing = [trainer for trainer in range(num) if trainer not in results]
    gone = f"; {', '.join(map(str, missing))} did not come to the end" if missing else ""
    shown = f"{score} {best['score']:.6g}"
    return {
        **best["summary"],
        "state": f"finished: trainer {winner} of {num} has the best model, {shown}{gone}",
        "folder": str(folder),
        "winner": winner,
        "trainers": [
            {
                "trainer": trainer,
                "score": each["score"],
                "step": each["summary"]["step"],
                "matches": each["matches"],
                "values": each["values"],
                "state": each["summary"]["state"],
                "folder": str(_place(folder, trainer)),
            }
            for trainer, each in sorted(results.items())
        ],
        "missing": missing,
    }


def _copy_weights(place: Path, folder: Path) -> str | None:
    """The winner's weights beside the summary, in one file or several."""
    found = None
    with explained_writing(folder):
        for path in sorted(place.glob("model*.safetensors*")):
            partial = folder / f".{path.name}.part"
            shutil.copyfile(path, partial)
            partial.replace(folder / path.name)
        found = find_weights(folder / "model.safetensors")
    return None if found is None else str(found)
