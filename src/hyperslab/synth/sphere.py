"""Fields on the Earth: a grid of cells, random fields, and how winds carry them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
RADIUS = 6.371e6
"""Of the Earth, in metres."""
NUM_STEPS = 6
"""In which the way of the air is followed back."""
MOST_WAVES = 96
"""The finest random structure has this many waves around the Earth."""


@dataclass(frozen=True)
class Grid:
    """Cells of equal angles: rows from south to north, columns from 0 degrees to the east."""

    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.height, self.width

    @cached_property
    def latitude(self) -> Array:
        """Of each row, in radians, as a column."""
        rows = (np.arange(self.height) + 0.5) / self.height - 0.5
        return (np.pi * rows).astype(np.float32)[:, None]

    @cached_property
    def longitude(self) -> Array:
        columns = (np.arange(self.width) + 0.5) / self.width
        return (2 * np.pi * columns).astype(np.float32)

    @property
    def cell(self) -> float:
        """The height of a cell in metres, and its width at the equator, whichever is larger."""
        return max(np.pi / self.height, 2 * np.pi / self.width) * RADIUS

    @cached_property
    def up(self) -> Array:
        """Unit vectors ``(height, width, 3)`` from the Earth's centre."""
        return vectors(self.latitude, self.longitude)

    @cached_property
    def east(self) -> Array:
        zero = np.zeros(self.shape, np.float32)
        return np.stack([zero - np.sin(self.longitude), zero + np.cos(self.longitude), zero], -1)

    @cached_property
    def north(self) -> Array:
        return np.cross(self.up, self.east)

    def rows_near(self, latitude: float, distance: float) -> slice:
        """Of those that are nowhere farther than ``distance`` metres to the north or south."""
        reach = distance / RADIUS
        bounds = [
            (latitude + end) / np.pi * self.height + self.height / 2 for end in (-reach, reach)
        ]
        first, last = np.clip(np.floor(bounds), 0, self.height - 1).astype(int)
        return slice(int(first), int(last) + 1)

    def columns_between(self, west: float, east: float) -> NDArray[np.int64]:
        """Of those from one longitude to another, all around if these are that far apart."""
        first, last = (int(np.floor(end / (2 * np.pi) * self.width)) for end in (west, east))
        return np.arange(first, min(last + 1, first + self.width)) % self.width

    def slopes(self, field: Array) -> tuple[Array, Array]:
        """Derivatives to the east and to the north, per metre."""
        to_north = np.gradient(field, np.pi * RADIUS / self.height, axis=0)
        around = np.pad(field, ((0, 0), (1, 1)), mode="wrap")
        step = 4 * np.pi * RADIUS / self.width * np.cos(self.latitude)
        return (around[:, 2:] - around[:, :-2]) / step, to_north


def vectors(latitude: Array | float, longitude: Array | float) -> Array:
    """Unit vectors from the Earth's centre, along a new last dim."""
    across = np.cos(latitude)
    z = np.sin(latitude) + np.zeros_like(longitude)
    return np.stack([across * np.cos(longitude), across * np.sin(longitude), z], -1)


def random_field(grid: Grid, peak: float, fall: float, rng: np.random.Generator) -> Array:
    """Gaussian, alike in all directions, with mean 0 and variance 1.

    Power is even up to ``peak`` waves around the Earth, and falls with the power ``fall`` beyond.
    """
    degree = np.arange(MOST_WAVES + 1)
    power = (1 + (degree / peak) ** 2) ** (-fall / 2)
    power[0] = 0
    power *= 4 * np.pi / ((2 * degree + 1) * power).sum()
    noise = rng.standard_normal((2, MOST_WAVES + 1, MOST_WAVES + 1))
    waves = np.zeros((2, grid.height, MOST_WAVES + 1))
    for order, legendre in enumerate(_legendre(grid.height)):
        # Not a product by BLAS: its threads would fight with the other processes.
        amplitudes = noise[:, order, order:] * np.sqrt(power[order:])
        waves[..., order] = np.einsum("cl,lh->ch", amplitudes, legendre)
    return _around(waves[0] + 1j * waves[1], grid)


def _around(waves: NDArray[np.complex128], grid: Grid) -> Array:
    """The sum of waves around the Earth, in each row, at the longitudes of the columns."""
    finer = -(-2 * waves.shape[1] // grid.width)
    turned = waves * np.exp(1j * grid.longitude[0] * np.arange(waves.shape[1]))
    turned[:, 1:] /= np.sqrt(2)
    points = finer * grid.width
    return np.asarray(np.fft.irfft(turned, points)[:, ::finer] * points, np.float32)


@lru_cache(maxsize=4)
def _legendre(height: int) -> list[NDArray[np.float64]]:
    """Normalised associated Legendre functions of sin(latitude): for each order, (degree, row)."""
    x = np.sin(np.pi * ((np.arange(height) + 0.5) / height - 0.5))
    first = np.full(height, np.sqrt(1 / (4 * np.pi)))
    table = []
    for m in range(MOST_WAVES + 1):
        if m:
            first = np.sqrt((2 * m + 1) / (2 * m)) * np.sqrt(1 - x**2) * first
        rows = [first, np.sqrt(2 * m + 3) * x * first]
        for n in range(m + 2, MOST_WAVES + 1):
            a = np.sqrt((4 * n**2 - 1) / (n**2 - m**2))
            b = np.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1))
            rows.append(a * (x * rows[-1] - b * rows[-2]))
        table.append(np.array(rows[: MOST_WAVES + 1 - m]))
    return table


def came_from(grid: Grid, eastward: Array, northward: Array, seconds: float) -> tuple[Array, Array]:
    """Rows and columns, as fractions, where the air of each cell was ``seconds`` ago."""
    row: Array
    column: Array
    row, column = np.indices(grid.shape, np.float32)
    step = seconds / NUM_STEPS
    per_row = step * grid.height / (np.pi * RADIUS)
    per_column = step * grid.width / (2 * np.pi * RADIUS)
    for _ in range(NUM_STEPS):
        latitude = np.pi * ((row + 0.5) / grid.height - 0.5)
        across = np.maximum(np.cos(latitude), 0.1)  # keeps steps short at the poles
        u, v = (sampled(wind, row, column) for wind in (eastward, northward))
        row = np.clip(row - v * per_row, 0, grid.height - 1)
        column = column - u * per_column / across
    return row, column


def sampled(field: Array, row: Array, column: Array) -> Array:
    """``field`` between its cells, which columns wrap around."""
    height, width = field.shape
    top, left = np.floor(row).astype(np.int32), np.floor(column).astype(np.int32)
    down, right = row - top, column - left
    below = np.minimum(top + 1, height - 1) * width
    top *= width
    after = (left + 1) % width
    left %= width
    flat = field.ravel()
    upper = flat[top + left] * (1 - right) + flat[top + after] * right
    lower = flat[below + left] * (1 - right) + flat[below + after] * right
    return np.asarray(upper * (1 - down) + lower * down)
