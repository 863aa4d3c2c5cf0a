"""Figures of a run: how the loss fell, what was predicted, how classes were told apart."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.info.pictures import BLUE, GREEN, ORANGE, count_whole
from hyperslab.partial import make_folder, write_file
from hyperslab.train.metrics import Floats, Labels, auc, roc
from hyperslab.train.recorder import Line, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger("hyperslab")

MOST_POINTS = 5000
"""That are drawn of a scatter; of more, an even choice."""
MOST_NUMBERS = 12
"""Classes up to which shares are written into the matrix."""
MOST_TICKS = 30
MOST_CURVES = 10
DPI = 130
GREY = "#8d99ae"


def new_figure(width: float, height: float) -> Figure | None:
    """An empty figure in inches; None, with a warning, where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError:
        _warn_once_of_no_figures()
        return None
    return Figure(figsize=(width, height), layout="compressed")


@cache
def _warn_once_of_no_figures() -> None:
    _log.warning("no figures without matplotlib: pip install 'hyperslab[train]'")


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e9f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize="small")


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Writes a PNG and gives its path, or nothing, with a warning, if it cannot be written.

    A run is not worth losing for a picture of it.
    """
    memory = io.BytesIO()
    try:
        figure.savefig(memory, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.12)
        make_folder(path.parent)
        write_file(path, memory.getvalue())
    except (FormatError, ValueError) as error:  # or a name that is no formula, such as $x
        _log.warning("figure %s is missing: %s", path.name, " ".join(str(error).split()))
        return []
    return [path]


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


# Classes: which is taken for which, and how well they are told apart


def draw_confusion(counts: Floats, names: Sequence[str], path: Path) -> list[Path]:
    """Writes which class was taken for which, as shares of the true class."""
    num = len(counts)
    side = 3.2 + 0.45 * min(num, MOST_TICKS)
    if (figure := new_figure(side + 0.8, side)) is None:
        return []
    sizes = counts.sum(1, keepdims=True)
    shares = np.divide(counts, sizes, out=np.full_like(counts, np.nan), where=sizes != 0)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", fraction=0.046, pad=0.03)
    if num <= MOST_TICKS:
        _label(axes, list(names) or [str(number) for number in range(num)])
    if num <= MOST_NUMBERS:
        _write_shares(axes, shares)
    axes.set(xlabel="predicted class", ylabel="true class", title="Confusion of classes")
    return save_figure(figure, path)


def _label(axes: Axes, names: list[str]) -> None:
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if max(map(len, names)) > 3 else {}
    axes.set_xticks(range(len(names)), names, **slanted)
    axes.set_yticks(range(len(names)), names)


def _write_shares(axes: Axes, shares: Floats) -> None:
    for (row, column), share in np.ndenumerate(shares):
        text = "" if np.isnan(share) else "< 0.001" if 0 < share < 0.001 else f"{share:.2g}"
        colour = "white" if share > 0.6 else "#22303c"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize="small")


def draw_roc(
    scores: Floats, labels: Labels, weights: Floats, names: Sequence[str], path: Path
) -> list[Path]:
    """Writes the ROC of each class against the rest; one column of scores is that of class 1."""
    num = scores.shape[1]
    classes = [1] if num == 1 else list(range(min(num, MOST_CURVES)))
    curves = {k: (scores[:, 0 if num == 1 else k], labels == k, weights) for k in classes}
    areas = {k: area for k, curve in curves.items() if not math.isnan(area := auc(*curve))}
    if not areas or (figure := new_figure(5.2, 4.8)) is None:
        return []
    axes = figure.subplots()
    tidy(axes)
    for k, area in areas.items():
        name = names[k] if names else f"class {k}"
        axes.plot(*roc(*curves[k]), linewidth=1.8, label=f"{name}   AUC = {area:.3f}")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1.2, linestyle="--", zorder=0)
    axes.set(xlabel="false positive rate", ylabel="true positive rate", aspect="equal")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), title="ROC")
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    return save_figure(figure, path)
