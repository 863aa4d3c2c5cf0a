"""How figures of a run look, and how they get to the disk."""

from __future__ import annotations

import io
import logging
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.errors import FormatError
from hyperslab.io.partial import make_folder, partial_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_log = logging.getLogger("hyperslab")

DPI = 130
BLUE, ORANGE, GREEN, GREY = "#2a6f97", "#d1603d", "#4c956c", "#8d99ae"
CLASS_COLOURS = (
    "#e9ecef",
    BLUE,
    ORANGE,
    GREEN,
    "#e9c46a",
    "#7b2cbf",
    "#90be6d",
    "#f28482",
    "#48cae4",
    "#6d597a",
)
"""The first is that of a background."""


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


def count_whole(*axis: Axis) -> None:
    """Ticks at whole numbers only, for what is counted: steps, cells."""
    from matplotlib.ticker import MaxNLocator

    for each in axis:
        each.set_major_locator(
            MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
        )


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
        with partial_file(path) as (_, fd), os.fdopen(os.dup(fd), "wb") as file:
            file.write(memory.getbuffer())
    except (FormatError, ValueError) as error:  # or a name that is no formula, such as $x
        _log.warning("figure %s is missing: %s", path.name, " ".join(str(error).split()))
        return []
    return [path]
