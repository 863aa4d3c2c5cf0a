"""What was measured of a data set, as values that travel with its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ChannelStatistics:
    """The finite values of one channel in all samples; None where there are none."""

    count: int
    not_finite: int
    """Values that are NaN or infinite, and do not count."""
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    percentiles: Mapping[str, float]
    """Interpolated between neighbours, as NumPy does."""
    histogram: tuple[int, ...]
    """How many values lie in each of some bins of equal width, from least to most."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Of the sample's own array, over all samples of a manifest."""

    array: str
    num_samples: int
    foreground: str | None
    """What counts: None is all, ``nonzero``, or a label map, where it is above 0."""
    channels: tuple[ChannelStatistics, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Statistics:
        channels = tuple(
            ChannelStatistics(**{**each, "histogram": tuple(each["histogram"])})
            for each in content["channels"]
        )
        return cls(**{**content, "channels": channels})
