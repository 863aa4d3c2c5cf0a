"""A picture of a tournament: who beat whom, learning rates, and where the winner comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.io.info.pictures import count_whole
from hyperslab.train.config import Config
from hyperslab.train.figures import GREY, new_figure, save_figure, tidy
from hyperslab.train.recorder import Line, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2a6f97", "#e07a1f", "#3a8f5c", "#a23b72", "#7a6c5d", "#5b5bd6", "#c0392b", "#1b9aaa")
GOLD = "#f2b705"

Place = tuple[int, int]
"""A step, and the trainer at whom the model was until then."""


def ancestry(lines: Sequence[Line], winner: int) -> list[Place]:
    """Where the winner's model was: trainers, each with the step at which it left, oldest first.

    The last one, the winner itself, has the last step of all.
    """
    matches = sorted(lines, key=lambda line: (line["number"], line["trainer"]))
    at, found = winner, [(max((line["step"] for line in matches), default=0), winner)]
    for line in reversed(matches):
        if line["trainer"] == at and line["adopted"] and found[-1][0] >= line["step"]:
            at = line["partner"]
            found.append((line["step"], at))
    return found[::-1]


def draw_tournament(log: Path, folder: Path, config: Config, winner: int) -> list[Path]:
    """Writes ``tournament.png``; gives its path, or nothing where no match was played."""
    lines = [line for line in read_log(log) if line.get("kind") == "match"]
    if not lines or (figure := new_figure(8.5, 8.0)) is None:
        return []
    num = config.tournament.trainers
    upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    _draw_matches(upper, lines, num, winner)
    _draw_scores(middle, lines, num)
    _draw_rates(lower, log.parent, num)
    for axes in (upper, middle, lower):
        tidy(axes)
        axes.margins(x=0.02)
    count_whole(lower.xaxis)
    figure.align_ylabels()
    return save_figure(figure, folder / "tournament.png")


def _color(trainer: int) -> str:
    return COLORS[trainer % len(COLORS)]


def _draw_matches(axes: Axes, lines: Sequence[Line], num: int, winner: int) -> None:
    """A row for each trainer; an arrow leads from a model that won to where it went on."""
    start = 0
    for step, trainer in ancestry(lines, winner):
        axes.plot([start, step], [trainer, trainer], color=GOLD, linewidth=9, alpha=0.55, zorder=1)
        start = step
    for line in lines:
        step, trainer, partner = line["step"], line["trainer"], line["partner"]
        axes.plot(step, trainer, "o", color=_color(trainer), markersize=5, zorder=4)
        if partner is None:
            axes.plot(step, trainer, "o", color="white", markersize=2.5, zorder=5)
        elif line["adopted"]:
            axes.annotate(
                "",
                xy=(step, trainer),
                xytext=(step, partner),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": _color(partner),
                    "linewidth": 1.4,
                    "connectionstyle": "arc3,rad=0.18",
                    "shrinkA": 3,
                    "shrinkB": 4,
                },
                zorder=3,
            )
    axes.set_yticks(range(num), [f"trainer {n}{' (winner)' * (n == winner)}" for n in range(num)])
    axes.set_ylim(num - 0.5, -0.5)
    axes.set_title("Who beat whom: arrows lead from a better model to where it went on")
    axes.plot([], [], color=GOLD, linewidth=7, alpha=0.55, label="the winner's ancestry")
    axes.plot([], [], "o", color=GREY, mfc="white", markersize=5, label="no partner")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.04), ncols=2, frameon=False, fontsize=8)


def _draw_scores(axes: Axes, lines: Sequence[Line], num: int) -> None:
    """What each trainer's own model was worth when it came to a match."""
    values = []
    for trainer in range(num):
        mine = [line for line in lines if line["trainer"] == trainer and line["own"] is not None]
        scores = [float(line["own"]) for line in mine]
        values += [score for score in scores if math.isfinite(score)]
        axes.plot(
            [line["step"] for line in mine],
            scores,
            color=_color(trainer),
            marker="o",
            markersize=3,
            linewidth=1.3,
        )
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    axes.set_ylabel("own score")


def _draw_rates(axes: Axes, folder: Path, num: int) -> None:
    """The learning rates that the trainers have used, from their own logs."""
    highest, lowest = 0.0, math.inf
    for trainer in range(num):
        steps = [
            line
            for line in read_log(folder / f"trainer-{trainer}" / "log.jsonl")
            if line.get("kind") == "step" and line.get("lr") is not None
        ]
        rates = [float(line["lr"]) for line in steps]
        highest, lowest = max([highest, *rates]), min([lowest, *rates])
        axes.plot(
            [line["step"] for line in steps],
            rates,
            color=_color(trainer),
            linewidth=1.4,
            label=f"trainer {trainer}",
        )
    if 0 < lowest < highest / 10:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.15 * highest or None)
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    if num <= len(COLORS):
        axes.legend(frameon=False, fontsize=8, ncols=min(num, 4))
