"""Files of weather, as the climate benchmark has them: a moment, and a mask of its storms."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.synth.sphere import Grid
from hyperslab.synth.weather import CHANNELS, make_weather
from hyperslab.synth.whole_file import Settings

LEAST, MOST = 16, 8192
"""Cells along a dim."""


@dataclass(frozen=True, kw_only=True)
class Climate:
    """``climate/data`` (16, lat, lon), ``climate/labels`` (lat, lon) and ``climate/stats`` (16, 4).

    Labels are 0 for the background, 1 in a cyclone, 2 in a river of vapour. Columns of the
    statistics are the least, the most, the mean and the standard deviation of this file's channels.
    """

    shape: tuple[int, int] = (768, 1152)
    """Rows from south to north, and columns to the east, around the whole Earth."""
    count: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not LEAST <= min(self.shape) <= max(self.shape) <= MOST:
            raise ConfigError(
                f"the size of a map must be {LEAST}x{LEAST} to {MOST}x{MOST}, got {self.shape}"
            )
        if self.count < 1 or self.seed < 0:
            raise ConfigError(f"count must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return self.count

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 560 * self.shape[0] * self.shape[1]

    def file_name(self, index: int) -> str:
        return f"climate_{index:06d}.h5"

    def file_nbytes(self, index: int) -> int:
        return (4 * len(CHANNELS) + 1) * self.shape[0] * self.shape[1] + 2**14

    def settings(self, index: int) -> Settings:
        size = "x".join(map(str, self.shape))
        return {"kind": "climate", "size": size, "seed": self.seed, "index": index}

    def fill(self, file: h5py.File, index: int) -> None:
        data, mask = make_weather(Grid(*self.shape), np.random.default_rng([self.seed, index]))
        file["climate/data"] = data
        file["climate/labels"] = mask
        wide = data.reshape(len(CHANNELS), -1).astype(np.float64)
        columns = [wide.min(1), wide.max(1), wide.mean(1), wide.std(1)]
        file["climate/stats"] = np.stack(columns, axis=1).astype(np.float32)
