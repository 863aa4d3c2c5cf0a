"""Figures of classes: which is taken for which, and how well they are told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperslab.train.metrics import Floats, Labels, auc, roc
from hyperslab.train.plotting import GREY, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NUMBERS = 12
"""Classes up to which shares are written into the matrix."""
MOST_TICKS = 30
MOST_CURVES = 10


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
