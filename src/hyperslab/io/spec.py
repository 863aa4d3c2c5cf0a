"""What one array of every sample is like: its dims in the file, its boxes, those of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError, LayoutError
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.reader import ArrayReader
from hyperslab.layout import Box, Grid, Layout, Span, split_over

T = TypeVar("T")

ORDER = "CDHW"
AXIS_OF = {"C": "channel", "D": "depth", "H": "height", "W": "width"}
"""The axis of a mesh that a dim is cut along, by the dim's letter."""
READINGS = {
    1: ("W", "C"),
    2: ("HW", "CW", "NW", "NC"),
    3: ("CHW", "HWC", "DHW", "NHW", "NCW"),
    4: ("CDHW", "DHWC", "NCHW", "NHWC", "NDHW"),
    5: ("NCDHW", "NDHWC"),
}
"""What arrays of so many dims usually are, to choose from: a shape alone does not tell."""


@dataclass(frozen=True)
class SampleAxes:
    """How one sample of an array lies in the array of its file.

    ``letters`` name the dims of one sample in the file's order, each of C, D, H and W at most once,
    or are empty for a vector, whose dims stay as they are. ``stacked`` says that a dim of samples
    comes before them.
    """

    letters: str
    stacked: bool
    ndim: int
    """Of one sample."""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The sample's dims in channels-first order, as positions in the file's."""
        if not self.letters:
            return tuple(range(self.ndim))
        return tuple(sorted(range(self.ndim), key=lambda dim: ORDER.index(self.letters[dim])))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """The file's dims, as positions in channels-first order."""
        return tuple(map(self.order.index, range(self.ndim)))

    @cached_property
    def _is_as_in_file(self) -> bool:
        """Whether the array is one sample, channels first."""
        return not self.stacked and self.order == tuple(range(self.ndim))

    @property
    def names(self) -> str:
        """The letters in channels-first order."""
        return "".join(sorted(self.letters, key=ORDER.index))

    def sample_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The channels-first shape of one sample of an array of ``shape``."""
        one = shape[1:] if self.stacked else shape
        return tuple(one[dim] for dim in self.order)

    def num_samples(self, shape: Sequence[int]) -> int:
        return shape[0] if self.stacked else 1

    def file_box(self, sample: int, box: Box) -> Box:
        """``box`` of the sample number ``sample`` in the array, in the file's order."""
        if self._is_as_in_file:
            return box
        spans = self.in_file_order(box.spans)
        return Box((Span(sample, sample + 1), *spans) if self.stacked else spans)

    def file_view(self, out: NDArray[Any]) -> NDArray[Any]:
        """``out``, a channels-first box of one sample, in the file's order."""
        if self._is_as_in_file:
            return out
        back = out.transpose(self._places)
        return back[None] if self.stacked else back

    def in_file_order(self, values: Sequence[T]) -> tuple[T, ...]:
        """``values``, one a dim in channels-first order, in the file's order."""
        return tuple([values[place] for place in self._places])


def axes_of(letters: str, ndim: int, what: str) -> SampleAxes:
    """What ``letters``, such as ``DHWC`` or ``NCHW``, say of an array of ``ndim`` dims."""
    plain = letters.upper()
    body = plain.removeprefix("N")
    if set(body) - set(ORDER) or len(set(body)) != len(body) or not body:
        raise ConfigError(
            f"axes {letters!r} of {what} are not understood: name each dim by one of the letters "
            "C, D, H, W, each once, with an N before them where samples are stacked along the "
            "first dim, such as 'DHWC' or 'NCHW'"
        )
    if len(plain) != ndim:
        stacked = f", such as 'N{plain}' if its first dim counts samples"
        raise ConfigError(
            f"axes {letters!r} name {len(plain)} dims, but {what} has {ndim}: give a letter a dim"
            + (stacked if plain == body and len(body) == ndim - 1 else "")
        )
    return SampleAxes(body, plain != body, len(body))


def readings(shape: Sequence[int], *, stacked: bool = False) -> list[str]:
    """What an array of ``shape`` may be, in words; with ``stacked``, one of many samples."""
    fitting = READINGS.get(len(shape), ())
    return [_reading(letters, shape) for letters in fitting if letters[0] == "N" or not stacked]


def _reading(letters: str, shape: Sequence[int]) -> str:
    extents = dict(zip(letters, shape, strict=True))
    num = f"{extents['N']} samples" if "N" in extents else "one sample"
    channels = f"{extents['C']} channels" if "C" in extents else ""
    space = "x".join(str(extents[axis]) for axis in ORDER[1:] if axis in extents)
    return f"axes={letters!r} ({num} of {' of '.join(filter(None, (channels, space)))})"


BoxLike = Box | tuple[slice, ...]
AxisCuts = Mapping[str, Sequence[int]]
"""The bounds along some axes of a mesh."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of every sample: the image, a label map, a vector of targets, a weight."""

    name: str
    axes: SampleAxes
    shape: tuple[int, ...]
    """Of one sample, channels first."""
    dtype: np.dtype[Any]
    """As in the file, in this machine's byte order."""
    is_cut: bool
    """Whether it has the sample's spatial dims, and is cut with them; a vector is not."""

    @property
    def nbytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


def row_spec(name: str, reader: ArrayReader) -> ArraySpec:
    """Of an array with a row of numbers, or one number, for each sample."""
    axes = SampleAxes("", True, len(reader.shape) - 1)
    return ArraySpec(name, axes, reader.shape[1:], reader.dtype, is_cut=False)


def shown_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def has_same_space(letters: str, shape: Sequence[int], sample: ArraySpec) -> bool:
    """Whether dims named by ``letters``, of those extents, are the sample's but for channels."""
    if len(letters) != len(shape) or not letters.replace("C", ""):
        return False
    mine = {axis: extent for axis, extent in zip(letters, shape, strict=True) if axis != "C"}
    theirs = dict(zip(sample.axes.names, sample.shape, strict=True))
    theirs.pop("C", None)
    return mine == theirs


def check_on_grid(name: str, spec: ArraySpec, sample: ArraySpec, path: Path) -> None:
    """Raises for a map, such as that in ``path``, that has other extents than the sample.

    They may divide the sample's: such a map has a value for every block of cells.
    """
    theirs = dict(zip(sample.axes.names, sample.shape, strict=True))
    mine = dict(zip(spec.axes.names, spec.shape, strict=False))
    both = [axis for axis in mine if axis in theirs and axis != "C"]
    if any(not mine[axis] or theirs[axis] % mine[axis] for axis in both):
        raise ConfigError(
            f"{name!r} does not fit its samples: {path} has {_named_extents(mine, both)}, the "
            f"samples have {_named_extents(theirs, both)}; label maps have the same extents, or "
            "such that divide them"
        )


def _named_extents(extents: Mapping[str, int], axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {extents[axis]}" for axis in axes)


def is_like(spec: ArraySpec, reader: ArrayReader) -> bool:
    """Whether ``reader`` has samples as ``spec`` says."""
    fits = len(reader.shape) == spec.axes.ndim + spec.axes.stacked
    return (
        fits and spec.axes.sample_shape(reader.shape) == spec.shape and reader.dtype == spec.dtype
    )


def is_on_grid(
    spec: ArraySpec, reader: ArrayReader, sample: ArraySpec, beside: ArrayReader
) -> bool:
    """Whether ``reader`` has a map like ``spec`` that fits its own sample, in ``beside``.

    Both may be of other extents than those of other samples.
    """
    pairs = ((spec, reader), (sample, beside))
    if any(len(each.shape) != s.axes.ndim + s.axes.stacked for s, each in pairs):
        return False
    mine, theirs = (s.axes.sample_shape(each.shape) for s, each in pairs)
    return (
        spec.is_cut
        and reader.dtype == spec.dtype
        and has_same_space(spec.axes.names, mine, replace(sample, shape=theirs))
    )


def check_like(spec: ArraySpec, reader: ArrayReader, path: Path) -> None:
    """Raises unless ``reader``, of the file at ``path``, has samples as ``spec`` says."""
    if not is_like(spec, reader):
        raise FormatError(
            f"{path} has {reader.dtype} {reader.shape} as {spec.name!r}, but samples of "
            f"{spec.dtype} {spec.shape} were expected, as in the first file (dims "
            f"{spec.axes.letters or 'as they are'} in the file's order)"
        )


def checked_box(box: BoxLike | None, spec: ArraySpec) -> Box:
    """``box`` as a ``Box`` of one sample; raises unless it lies inside."""
    if box is None:
        return Box.whole(spec.shape)
    parts: object = [slice(*span) for span in box.spans] if isinstance(box, Box) else box
    if not isinstance(parts, tuple | list) or len(parts) != len(spec.shape):
        raise LayoutError(
            f"box {_shown(box)} does not fit array {spec.name!r}, whose samples have shape "
            f"{spec.shape}: give a tuple of {len(spec.shape)} slices, one for each dim"
        )
    pairs = zip(parts, spec.shape, strict=True)
    return _box(tuple([_bounds(part, extent, box, spec) for part, extent in pairs]))


@lru_cache(1024)
def _box(bounds: tuple[tuple[int, int], ...]) -> Box:
    """The one with ``bounds``, kept: of one sample after another the same boxes are read."""
    return Box.of(*bounds)


def _bounds(part: object, extent: int, box: object, spec: ArraySpec) -> tuple[int, int]:
    if type(part) is slice and part.step is None:  # as nearly all are: every read comes by here
        start, stop = part.start, part.stop
        if type(start) is type(stop) is int and 0 <= start <= stop <= extent:
            return start, stop
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise LayoutError(
            f"box {_shown(box)} of array {spec.name!r} has {part!r}, and a slice with step 1 was "
            "expected, such as slice(0, 64)"
        )
    try:
        start = 0 if part.start is None else index(part.start)
        stop = extent if part.stop is None else index(part.stop)
    except TypeError as error:
        raise LayoutError(f"box {_shown(box)} has bounds that are not whole numbers") from error
    start, stop = (bound + extent if bound < 0 else bound for bound in (start, stop))
    if not 0 <= start <= extent or not 0 <= stop <= extent:
        raise LayoutError(
            f"box {_shown(box)} does not lie in array {spec.name!r}, whose samples have shape "
            f"{spec.shape}"
        )
    return start, max(start, stop)


def _shown(box: object) -> str:
    if isinstance(box, Box):
        return "[" + ", ".join(f"{a}:{b}" for a, b in box.spans) + "]"
    return repr(box)


def checked_out(out: NDArray[Any] | None, box: Box, spec: ArraySpec) -> NDArray[Any]:
    if out is None:
        shape = spec.axes.in_file_order(box.shape)
        try:
            return empty_aligned(shape, spec.dtype).transpose(spec.axes.order)
        except (MemoryError, ValueError) as error:
            raise FormatError(
                f"there is no memory for a box of {spec.dtype} {box.shape} of array {spec.name!r}: "
                "read smaller boxes, or see whether the file is damaged"
            ) from error
    if not isinstance(out, np.ndarray):
        raise LayoutError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.shape != box.shape or out.dtype != spec.dtype:
        raise LayoutError(
            f"out is {out.dtype} {out.shape}, but the box of array {spec.name!r} is {spec.dtype} "
            f"{box.shape}"
        )
    if not out.flags.writeable:
        raise LayoutError("out cannot be written to")
    return out


def sample_layout(spec: ArraySpec, grid: Grid, cuts: AxisCuts | None = None) -> Layout:
    """How one sample of an array is cut over ``grid``: as a tensor that enters the mesh.

    ``cuts`` gives the bounds along some axes; the others are cut evenly.
    """
    if not spec.is_cut:
        return Layout.unsplit(spec.shape)
    return split_over(spec.shape, grid, [AXIS_OF[letter] for letter in spec.axes.names], cuts)


def check_cuts(spec: ArraySpec, grid: Grid) -> None:
    """Raises if ``grid`` cuts along an axis that the sample ``spec`` does not have."""
    names = spec.axes.names
    spatial = [axis for axis in grid.long_axes if axis not in ("sample", "channel")]
    if missing := [axis for axis in spatial if axis not in {AXIS_OF[n] for n in names}]:
        raise LayoutError(
            f"the mesh {grid.describe()} cuts along {', '.join(missing)}, but the samples have "
            f"dims {names} of shape {spec.shape}: leave it out, or name their dims by axes"
        )


def around(boxes: list[Box]) -> Box:
    """The smallest box that holds all of ``boxes``; empty ones ask for nothing."""
    full = [box for box in boxes if box] or boxes[:1]
    return Box(
        tuple(
            Span(min(span.start for span in spans), max(span.stop for span in spans))
            for spans in zip(*(box.spans for box in full), strict=True)
        )
    )
