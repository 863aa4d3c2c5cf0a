"""Pictures of a report as PNG: epochs, and one iteration of all ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.errors import ConfigError
from hyperslab.pages import shown_seconds, shown_share
from hyperslab.partial import write_file
from hyperslab.trace.analysis.iteration import Iteration, Row
from hyperslab.trace.analysis.lanes import COLOURS
from hyperslab.trace.span import Category

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hyperslab.trace.analysis.report import Report

DPI = 130
MOST_RANKS = 16
ROW_INCHES, MOST_INCHES = 0.2, 40.0
MOST_EPOCHS = 40


def draw_report(report: Report, path: Path) -> None:
    """Writes a PNG: where the time of epochs goes, and one iteration with a row for each stream."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ConfigError(
            "a report as PNG needs matplotlib: pip install 'hyperslab[plot]' (--html does not)"
        ) from error
    iteration = report.analysis.iteration
    rows = sum(len(rank.rows) + 1 for rank in iteration.ranks[:MOST_RANKS]) if iteration else 0
    num_epochs = min(MOST_EPOCHS, len(report.analysis.epochs))
    heights = [1.1 + 0.3 * num_epochs, min(MOST_INCHES, 0.9 + ROW_INCHES * rows)]
    heights = heights if rows else heights[:1]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    _draw_epochs(axes[0, 0], report)
    if iteration is not None:
        _draw_iteration(axes[1, 0], iteration)
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    write_file(path, content.getvalue())


def _draw_epochs(axes: Axes, report: Report) -> None:
    epochs = dict([*report.analysis.epochs.items()][:MOST_EPOCHS])
    labels = [f"epoch {number}" for number in epochs]
    reached = [0.0] * len(epochs)
    for name, colour in COLOURS.items():
        seconds = [period.exposed(Category[name]) for period in epochs.values()]
        if any(seconds):
            shown = name.replace("_", "-")
            axes.barh(labels, seconds, left=reached, color=colour, label=shown, height=0.7)
            reached = [a + b for a, b in zip(reached, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the loop, mean of ranks")
    axes.set_title(f"{report.name}: where the time goes", fontsize="medium")
    if epochs:
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_iteration(axes: Axes, iteration: Iteration) -> None:
    places, labels = [], []
    at = 0.0
    for rank in iteration.ranks[:MOST_RANKS]:
        for number, row in enumerate(rank.rows):
            pieces = [(piece.start * 1e3, piece.seconds * 1e3) for piece in row.pieces]
            axes.broken_barh(pieces, (at - 0.4, 0.8), facecolors=COLOURS[row.category.name])
            places.append(at)
            named = f"rank {rank.rank}  " if not number else ""
            labels.append(named + row.category.name.replace("_", "-"))
            axes.text(
                1.01,
                at,
                _note(row),
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize="x-small",
            )
            at += 1.0
        at += 0.6
    axes.set_yticks(places, labels, fontsize="x-small")
    axes.set_ylim(at - 0.6, -1.0)
    streams = "GPU " if any(rank.on_device for rank in iteration.ranks) else ""
    axes.set_xlabel(f"milliseconds of {streams}time")
    left_out = len(iteration.ranks) - MOST_RANKS
    more = f"; {left_out} more ranks are not shown" if left_out > 0 else ""
    seconds = shown_seconds((iteration.stop - iteration.start) / 1e9)
    title = f"step {iteration.number} of epoch {iteration.epoch}, {seconds}{more}"
    axes.set_title(f"One iteration: {title}", fontsize="medium")
    axes.grid(axis="x", color="#e5e9f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _note(row: Row) -> str:
    if row.category is Category.compute:
        return shown_seconds(row.seconds)
    return f"{shown_share(row.hidden_share)} hidden" if row.seconds else "none"
