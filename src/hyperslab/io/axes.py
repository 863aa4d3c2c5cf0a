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
GUESSES = {1: "W", 2: "HW", 3: "CHW", 4: "CDHW", 5: "NCDHW"}
"""What the dims are taken for where neither the user nor the format says."""


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
        back = out.transpose(self.in_file_order(range(self.ndim)))
        return back[None] if self.stacked else back

    def in_file_order(self, values: Sequence[T]) -> tuple[T, ...]:
        """``values``, one a dim in channels-first order, in the file's order."""
        found = dict(zip(self.order, values, strict=True))
        return tuple(found[dim] for dim in range(self.ndim))


def axes_of(letters: str, ndim: int, what: str) -> SampleAxes:
    """The axes that ``letters`` (such as ``DHWC`` or ``NCHW``) give to an array of ``ndim`` dims.

    With one letter fewer than there are dims, samples are stacked along the first.
    """
    plain = letters.upper()
    body = plain.removeprefix("N")
    if set(body) - set(ORDER) or len(set(body)) != len(body) or not body:
        raise ConfigError(
            f"axes {letters!r} of {what} are not understood: name each dim by one of the letters "
            "C, D, H, W, each once, with an N before them where samples are stacked along the "
            "first dim, such as 'DHWC' or 'NCHW'"
        )
    stacked = plain.startswith("N") or len(body) == ndim - 1
    if len(body) + stacked != ndim:
        raise ConfigError(
            f"axes {letters!r} name {len(plain)} dims, but {what} has {ndim}: give a letter a dim"
        )
    return SampleAxes(body, stacked, len(body))
