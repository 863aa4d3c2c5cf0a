"""One slice of a sample: its values in numbers, and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.partial import explained_writing
from hyperslab.io.spec import AXIS_OF, ArraySpec
from hyperslab.layout import Box, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure


MAX_EXTENT = 4096
"""Of a slice: more is neither needed for its statistics, nor can it be seen in a picture."""
MAX_CHANNELS = 4
MAX_LABELS = 20
"""Whole numbers below this are taken for classes, and drawn in a colour each."""
NUM_BINS = 24
LONG_TAIL = 20
"""Values from 0 to so many times their mean are looked at by their logarithm."""


@dataclass(frozen=True, kw_only=True)
class ChannelInfo:
    """The finite values of one channel; None where there are none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    zeros: float
    """The fraction of values that are 0."""
    not_finite: float
    """The fraction that is NaN or infinite."""
    histogram: tuple[int, ...]
    """How many values lie in each of ``NUM_BINS`` bins of equal width, from least to most."""


@dataclass(frozen=True, kw_only=True)
class SliceInfo:
    """One slice of one sample."""

    place: str
    """Where it was taken, in words."""
    is_log: bool
    """Whether histograms are of log(1 + value)."""
    channels: tuple[ChannelInfo, ...]


def describe_slice(dataset: Dataset, index: int = 0) -> SliceInfo:
    """Statistics of the middle slice of a sample."""
    values = read_slice(dataset, dataset.spec, index)
    is_log = has_long_tail(values)
    return SliceInfo(
        place=f"{dataset.name_of(index)}, {place_of_slice(dataset.spec)}",
        is_log=is_log,
        channels=tuple(_describe_channel(channel, is_log) for channel in values),
    )


def read_slice(dataset: Dataset, spec: ArraySpec, index: int) -> NDArray[Any]:
    """The middle slice of an array, as channels x height x width; complex values by their size."""
    values = dataset.read(index, slice_box(spec), array=spec.name)
    if values.dtype.kind == "c":
        values = np.abs(values)
    channels = values if spec.axes.names.startswith("C") else values[None]
    *above, width = channels.shape[1:] or (1,)
    return channels.reshape(len(channels), math.prod(above), width)


def slice_box(spec: ArraySpec) -> Box:
    """The middle along depth, and of what is very large along other dims, the middle part."""
    spans = []
    for letter, extent in zip(spec.axes.names, spec.shape, strict=True):
        size = extent if letter == "C" else min(extent, MAX_EXTENT)
        if letter == "D" and len(spec.axes.names.replace("C", "")) == 3:
            size = min(1, extent)
        start = (extent - size + (size == 1)) // 2 if extent else 0
        spans.append(Span(start, start + size))
    return Box(tuple(spans))


def place_of_slice(spec: ArraySpec) -> str:
    parts = [
        f"{AXIS_OF[letter]} {span.start}" + (f" to {span.stop}" if span.size > 1 else "")
        for letter, span, extent in zip(
            spec.axes.names, slice_box(spec).spans, spec.shape, strict=True
        )
        if letter != "C" and span.size < extent
    ]
    return ", ".join(parts) or "all of it"


def has_long_tail(values: NDArray[Any]) -> bool:
    """Whether there are few large values among many small ones, and none below 0, as of counts."""
    finite = _finite(values)
    if not finite.size or finite.min() < 0:
        return False
    return bool(finite.max() > LONG_TAIL * finite.mean(dtype=np.float64))


def _describe_channel(values: NDArray[Any], is_log: bool) -> ChannelInfo:
    finite = _finite(values).astype(np.float64)
    return ChannelInfo(
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        std=float(finite.std()) if finite.size else None,
        zeros=float((values == 0).mean()) if values.size else 0.0,
        not_finite=1 - finite.size / values.size if values.size else 0.0,
        histogram=_histogram(np.log1p(finite) if is_log else finite),
    )


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return found


def _histogram(values: NDArray[np.float64]) -> tuple[int, ...]:
    if not values.size or not np.isfinite(np.ptp(values)):
        return ()
    counts, _ = np.histogram(values, NUM_BINS)
    return tuple(int(count) for count in counts)


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
