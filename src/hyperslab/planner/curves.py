"""Strong and weak scaling as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperslab.errors import ConfigError
from hyperslab.io.info.pictures import BLUE, ORANGE
from hyperslab.partial import write_file
from hyperslab.planner.report import samples
from hyperslab.planner.scaling import Point, strong_scaling, weak_scaling
from hyperslab.planner.search import Found

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 130


def draw_curves(found: Found, path: Path) -> None:
    """Writes a PNG: samples a second by GPUs, for this batch and for one that grows with them."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ConfigError(
            "curves as PNG need matplotlib: pip install 'hyperslab[plot]' (--html does not)"
        ) from error
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    job = found.job
    figure.suptitle(f"{job.network.name} on {found.machine.name}, {job.precision}")
    left, right = figure.subplots(1, 2)
    _draw(left, strong_scaling(found), found.gpus, f"strong: {samples(job.batch)} a step", BLUE)
    share = f"{samples(job.batch)} on {found.gpus} GPUs, in proportion on others"
    _draw(right, weak_scaling(found), found.gpus, f"weak: {share}", ORANGE)
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    write_file(path, content.getvalue())


def _draw(axes: Axes, points: Sequence[Point], asked: int, title: str, colour: str) -> None:
    from matplotlib.ticker import LogLocator

    fitting = [point for point in points if point.best is not None]
    gpus = [point.gpus for point in fitting]
    rates = [point.best.samples_per_second for point in fitting if point.best]
    axes.set_title(title, fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if fitting:
        ideal = [rates[0] * each / gpus[0] for each in gpus]
        axes.plot(gpus, ideal, "--", color="#8d99ae", label="ideal")
        axes.plot(gpus, rates, "o-", color=colour, label="predicted")
        axes.legend(frameon=False)
    axes.axvline(asked, color="#e5e9f0", linewidth=6, zorder=0)
    ticks = [point.gpus for point in points]
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.minorticks_off()
    axes.set_xlabel("GPUs" + _note(points))
    axes.set_ylabel("samples a second")
    axes.grid(color="#e5e9f0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _note(points: Sequence[Point]) -> str:
    """Of those on which nothing fits."""
    missing = [str(point.gpus) for point in points if point.best is None]
    return f" (nothing fits on {', '.join(missing)})" if missing else ""
