"""A picture of one slice of a sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.info.values import has_long_tail, place_of_slice, read_slice
from hyperslab.io.partial import explained_writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

MAX_CHANNELS = 4
MAX_LABELS = 20
"""Whole numbers below this are taken for classes, and drawn in a colour each."""


class Panel(NamedTuple):
    """One picture of several."""

    title: str
    values: NDArray[Any]
    has_long_tail: bool
    is_target: bool


def draw_slice(dataset: Dataset, path: Path, index: int = 0) -> None:
    """Writes a PNG of the middle slice: up to four channels side by side, and label maps."""
    figure_type = _figure_type()
    panels = _panels(dataset, index)
    if not all(panel.values.size for panel in panels):
        raise ConfigError(f"samples of shape {dataset.shape} have no values to draw")
    height, width = panels[0].values.shape
    aspect = min(4.0, max(0.25, height / max(1, width)))
    figure: Figure = figure_type(
        figsize=(4 * len(panels), 3.3 * aspect + 0.8), layout="constrained"
    )
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(figure, axes, panel)
    shape = "x".join(map(str, dataset.shape))
    figure.suptitle(
        f"{dataset.place_of(index)[0].name}, {dataset.name_of(index)}, {shape} {dataset.dtype}, "
        f"{place_of_slice(dataset.spec)}",
        fontsize="medium",
    )
    with explained_writing(path):
        figure.savefig(path, format="png", dpi=120)


def _figure_type() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'hyperslab[plot]', or leave out --png"
        ) from error
    return Figure


def _panels(dataset: Dataset, index: int) -> list[Panel]:
    panels = []
    for spec in dataset.arrays.values():
        if spec.is_cut:
            channels = read_slice(dataset, spec, index)
            names = [f"{spec.name}, channel {i}" for i in range(len(channels))]
            titles = names if len(channels) > 1 else [spec.name]
            is_target, is_log = spec.name != dataset.spec.name, has_long_tail(channels)
            shown = zip(titles[:MAX_CHANNELS], channels, strict=False)
            panels += [Panel(title, values, is_log, is_target) for title, values in shown]
    return panels


def _draw(figure: Figure, axes: Axes, panel: Panel) -> None:
    bar: dict[str, Any] = {"ax": axes, "fraction": 0.046, "pad": 0.03}
    if panel.is_target and _looks_like_labels(panel.values):
        num = int(panel.values.max()) + 1
        image = axes.imshow(
            panel.values, cmap="tab20", vmin=-0.5, vmax=MAX_LABELS - 0.5, interpolation="nearest"
        )
        scale = figure.colorbar(image, ticks=range(num), label="class", **bar)
        scale.ax.set_ylim(-0.5, num - 0.5)
    elif panel.has_long_tail and panel.values.max() > 0:
        image = axes.imshow(panel.values, cmap="magma", norm=_log_norm(panel.values))
        figure.colorbar(image, label="log scale", **bar)
    else:
        image = axes.imshow(panel.values.astype(np.float64), cmap="viridis")
        figure.colorbar(image, **bar)
    axes.set_title(panel.title, fontsize="small")
    axes.tick_params(labelsize="x-small")


def _log_norm(values: NDArray[Any]) -> Normalize:
    """Logarithmic, but from 0, which has no logarithm, to the typical value."""
    from matplotlib.colors import SymLogNorm

    typical = 1.0 if values.dtype.kind in "iu" else float(values[values > 0].mean()) / 10
    return SymLogNorm(linthresh=typical, vmin=0, vmax=float(values.max()))


def _looks_like_labels(values: NDArray[Any]) -> bool:
    is_whole = values.dtype.kind in "iub" or bool((values == np.floor(values)).all())
    return is_whole and bool(values.min() >= 0 and values.max() < MAX_LABELS)
