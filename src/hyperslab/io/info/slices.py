"""One slice of a sample: its values in numbers, and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io.dataset import Dataset
from hyperslab.io.info.pictures import Picture, draw_picture, finite_of, has_long_tail
from hyperslab.io.spec import AXIS_OF, ArraySpec, shown_shape
from hyperslab.layout import Box, Span
from hyperslab.partial import explained_writing

MAX_EXTENT = 4096
"""Of a slice: more is neither needed for its statistics, nor can it be seen in a picture."""
MAX_CHANNELS = 4
MAX_LABELS = 20
"""Whole numbers below this are taken for classes, and drawn in a colour each."""
NUM_BINS = 24


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


def _describe_channel(values: NDArray[Any], is_log: bool) -> ChannelInfo:
    finite = finite_of(values).astype(np.float64)
    return ChannelInfo(
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        std=float(finite.std()) if finite.size else None,
        zeros=float((values == 0).mean()) if values.size else 0.0,
        not_finite=1 - finite.size / values.size if values.size else 0.0,
        histogram=_histogram(np.log1p(finite) if is_log else finite),
    )


def _histogram(values: NDArray[np.float64]) -> tuple[int, ...]:
    if not values.size or not np.isfinite(np.ptp(values)):
        return ()
    counts, _ = np.histogram(values, NUM_BINS)
    return tuple(int(count) for count in counts)


def draw_slice(dataset: Dataset, path: Path, index: int = 0) -> None:
    """Writes a PNG of the middle slice: up to four channels side by side, and label maps."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'hyperslab[plot]', or leave out --png"
        ) from error
    pictures = _pictures(dataset, index)
    if not all(picture.values.size for picture in pictures):
        raise ConfigError(f"samples of shape {dataset.shape} have no values to draw")
    height, width = pictures[0].values.shape
    aspect = min(4.0, max(0.25, height / max(1, width)))
    figure = Figure(figsize=(4 * len(pictures), 3.3 * aspect + 0.8), layout="constrained")
    rows = figure.subplots(1, len(pictures), squeeze=False)
    for axes, picture in zip(rows[0], pictures, strict=True):
        draw_picture(figure, axes, picture)
    figure.suptitle(
        f"{dataset.place_of(index)[0].name}, {dataset.name_of(index)}, "
        f"{shown_shape(dataset.shape)} {dataset.dtype}, {place_of_slice(dataset.spec)}",
        fontsize="medium",
    )
    with explained_writing(path):
        figure.savefig(path, format="png", dpi=120)


def _pictures(dataset: Dataset, index: int) -> list[Picture]:
    """The first channels of the sample, and of maps that are cut like it."""
    pictures = []
    for spec in dataset.arrays.values():
        if spec.is_cut:
            channels = read_slice(dataset, spec, index)[:MAX_CHANNELS]
            for number, values in enumerate(channels):
                title = f"{spec.name}, channel {number}" if len(channels) > 1 else spec.name
                is_map = spec.name != dataset.spec.name and _looks_like_labels(values)
                num_classes = int(values.max()) + 1 if is_map else None
                pictures.append(Picture(title, values, num_classes=num_classes))
    return pictures


def _looks_like_labels(values: NDArray[Any]) -> bool:
    is_whole = values.dtype.kind in "iub" or bool((values == np.floor(values)).all())
    return values.size > 0 and is_whole and bool(values.min() >= 0 and values.max() < MAX_LABELS)
