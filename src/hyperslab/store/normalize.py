"""How the numbers of a file become those that a network is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.io.measures import Statistics

Values = float | Sequence[float]
"""One for all channels, or one a channel."""

_NAMED = ("log1p", "minmax", "standard")
_FROM_FILE = {"minmax": 2, "standard": 4}


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """``x`` becomes ``(f(x * scale) - mean) / std``, where ``f`` is ``log1p`` or nothing.

    Values are one for all channels or one a channel, and the same on every rank.
    """

    scale: Values = 1.0
    log1p: bool = False
    mean: Values = 0.0
    std: Values = 1.0
    from_file: str | None = None
    """``minmax`` maps each channel of a sample to 0 to 1, ``standard`` to mean 0 and deviation 1,
    by the statistics in the sample's own file; then ``scale`` and the rest follow. As a name alone,
    ``standard`` takes those of the whole set where the files have none and the manifest has."""

    def __post_init__(self) -> None:
        if self.from_file not in (None, *_FROM_FILE):
            raise ConfigError(f"from_file must be minmax or standard, got {self.from_file!r}")
        if 0.0 in ([self.std] if isinstance(self.std, int | float) else list(self.std)):
            raise ConfigError("std must not be 0")

    @classmethod
    def named(cls, how: str | Normalize | None) -> Normalize:
        if how is None:
            return cls()
        if isinstance(how, Normalize):
            return how
        if how not in _NAMED:
            raise ConfigError(
                f"normalize must be one of {', '.join(_NAMED)} or a Normalize(...), got {how!r}"
            )
        return cls(log1p=True) if how == "log1p" else cls(from_file=how)

    @classmethod
    def of(cls, how: str | Normalize | None, dataset: Dataset) -> Normalize:
        """What a user asked for; raises unless there are values for every channel."""
        normalize = cls.named(how)
        if how == "standard" and not dataset.stats and dataset.manifest.statistics:
            normalize = cls._by_the_set(dataset.manifest.statistics)
        has_channels = "C" in dataset.spec.axes.letters
        stats = dataset.arrays[dataset.stats].shape if dataset.stats else None
        normalize.check(dataset.shape[0] if has_channels else 1, stats)
        return normalize

    @classmethod
    def _by_the_set(cls, statistics: Statistics) -> Normalize:
        """Each channel to mean 0 and deviation 1 over all samples; one that is constant to 0."""
        channels = statistics.channels
        empty = [number for number, channel in enumerate(channels) if channel.mean is None]
        if empty:
            raise ConfigError(
                f"normalize='standard' needs values, and channel {empty[0]} of "
                f"{statistics.array!r} has none that are finite"
                f"{' in the foreground' * bool(statistics.foreground)}"
            )
        return cls(
            mean=tuple(channel.mean or 0.0 for channel in channels),
            std=tuple(channel.std or 1.0 for channel in channels),
        )

    @property
    def is_nothing(self) -> bool:
        return self == Normalize()

    def check(self, num_channels: int, stats_shape: tuple[int, ...] | None) -> None:
        """Raises unless there are values for every channel."""
        for name in ("scale", "mean", "std"):
            value = getattr(self, name)
            if not isinstance(value, int | float) and len(value) != num_channels:
                raise ConfigError(
                    f"normalize gives {len(value)} values of {name} for {num_channels} channels"
                )
        if self.from_file:
            num = _FROM_FILE[self.from_file]
            if stats_shape is None:
                whole = (
                    "; or open an index into which 'hyperslab data stats' wrote those of the set"
                )
                raise ConfigError(
                    f"normalize={self.from_file!r} needs statistics in the files: name their array "
                    f"by stats= when you open them{whole * (self.from_file == 'standard')}"
                )
            fits = len(stats_shape) == 2 and stats_shape[0] == num_channels
            if not fits or stats_shape[1] < num:
                raise ConfigError(
                    f"normalize={self.from_file!r} needs statistics of shape ({num_channels}, {num}"
                    f") for {num_channels} channels, and the files have {stats_shape}"
                )
