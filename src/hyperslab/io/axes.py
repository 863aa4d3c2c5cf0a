"""The order of an array's dims in its file, and the channels-first order that networks want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.layout import Box, Span

T = TypeVar("T")

ORDER = "CDHW"
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
        spans = self.in_file_order(box.spans)
        return Box((Span(sample, sample + 1), *spans) if self.stacked else spans)

    def file_view(self, out: NDArray[Any]) -> NDArray[Any]:
        """``out``, a channels-first box of one sample, in the file's order."""
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
