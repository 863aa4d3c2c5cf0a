"""Figures of a run: how the loss fell, and what was predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyperslab.train.log_file import Line, read_log
from hyperslab.train.metrics import Floats
from hyperslab.train.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    count_whole,
    new_figure,
    save_figure,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 5000
"""That are drawn of a scatter; of more, an even choice."""


def draw_curves(log: Path, folder: Path) -> list[Path]:
    """Writes ``curves.png``: the losses of training and validation and the learning rate.

    Gives its path, or nothing if the log has no steps.
    """
    lines = read_log(log)
    steps = [line for line in lines if line.get("kind") == "step"]
    if not steps or (figure := new_figure(7.5, 5.5)) is None:
        return []
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_losses(upper, steps, [line for line in lines if line.get("kind") == "scores"])
    _draw_rate(lower, steps)
    for axes in (upper, lower):
        tidy(axes)
        axes.margins(x=0.02)
    count_whole(lower.xaxis)
    figure.align_ylabels()
    return save_figure(figure, folder / "curves.png")


def _draw_losses(axes: Axes, steps: Sequence[Line], scores: Sequence[Line]) -> None:
    drawn = [_points(steps, "loss")]
    axes.plot(*drawn[0], color=BLUE, linewidth=1.3, marker=_marker(steps), label="training")
    validation = [line for line in scores if line.get("part") == "validation"]
    if validation:
        drawn.append(_points(validation, "loss"))
        axes.plot(
            *drawn[1], color=ORANGE, linewidth=1.6, marker="o", markersize=4, label="validation"
        )
    values = np.concatenate([losses for _, losses in drawn])
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > 10 * known.min():
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.set_title("Loss and learning rate")
    axes.legend(frameon=False)


def _draw_rate(axes: Axes, steps: Sequence[Line]) -> None:
    """From 0 to a little above the highest, so that a constant rate is seen too."""
    points = _points(steps, "lr")
    axes.plot(*points, color=GREEN, linewidth=1.6, marker=_marker(steps), markersize=4)
    highest = max(points[1][np.isfinite(points[1])], default=0.0)
    axes.set_ylim(0, 1.15 * highest or None)
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _marker(steps: Sequence[Line]) -> str | None:
    """So few steps are hardly a line."""
    return "o" if len(steps) < 3 else None


def _points(lines: Sequence[Line], key: str) -> tuple[Floats, Floats]:
    """Steps and values; what is no number leaves a gap."""
    values = [line.get(key) for line in lines]
    numbers = [value if isinstance(value, int | float) else math.nan for value in values]
    return np.array([line["step"] for line in lines], float), np.array(numbers, float)


def draw_predictions(
    true: Floats, predicted: Floats, r2: Floats, names: Sequence[str], path: Path
) -> list[Path]:
    """Writes predicted against true values (samples, numbers), one panel a number."""
    num_panels = true.shape[1]
    num_columns = min(num_panels, 4 if num_panels > 6 or num_panels == 4 else 3)
    num_rows = -(-num_panels // num_columns)
    figure = new_figure(3.2 * num_columns + 0.6, 3.4 * num_rows + 0.7)
    if figure is None:
        return []
    figure.set_layout_engine("constrained", h_pad=0.1)  # "compressed" has no room for the title
    cells = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes in cells[num_panels:]:
        axes.axis("off")
    step = -(-len(true) // MOST_POINTS)
    for number, axes in enumerate(cells[:num_panels]):
        name = names[number] if names else f"number {number}" if num_panels > 1 else "prediction"
        _draw_scatter(axes, true[::step, number], predicted[::step, number])
        axes.set_title(f"{name}   R² = {r2[number]:.3f}")
    figure.suptitle(f"Predicted against true values of {len(true)} samples")
    figure.supxlabel("true")
    figure.supylabel("predicted")
    return save_figure(figure, path)


def _draw_scatter(axes: Axes, true: Floats, predicted: Floats) -> None:
    tidy(axes)
    known = np.isfinite(true) & np.isfinite(predicted)
    true, predicted = true[known], predicted[known]
    alpha = min(0.8, max(0.15, 60 / max(1, len(true)) ** 0.75))
    axes.scatter(true, predicted, s=14, color=BLUE, alpha=alpha, linewidths=0)
    if not true.size:
        return
    low, high = (end(np.concatenate([true, predicted])) for end in (np.min, np.max))
    margin = 0.05 * (high - low) or 1.0
    ends = (low - margin, high + margin)
    axes.plot(ends, ends, color=GREY, linewidth=1.2, linestyle="--", zorder=0)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
