"""What is to be found on a weather map: tropical cyclones, and rivers of vapour in the air."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.sphere import RADIUS, Array, Grid, vectors

AIR_DENSITY = 1.15
"""Near the sea, in kg/m^3."""
EARTH_TURNS = 7.292e-5
"""Radians a second."""
ALL_CELLS = 2 * np.pi**2 * RADIUS**2
"""The Earth, in square metres, if all its cells had the size of those at the equator."""
GALE = 17.0
"""A cyclone's mask ends where its own wind falls below this, in m/s."""

RIVER_WIDTHS = (140e3, 230e3)
"""Standard deviations of the vapour across a river, in metres."""
RIVER_LENGTHS = (3000e3, 6000e3)
EDGE = 0.5
"""A river's mask ends where its vapour falls below this share of that on its axis."""
STEP = 60e3
"""Between the points of a river's axis."""


@dataclass(frozen=True)
class Place:
    """Cells around a storm, and where they lie as seen from it."""

    rows: slice
    distance: Array
    """In metres, as if the storm were not drawn larger than it is."""
    east: Array
    """The direction of turning counterclockwise, as its part to the east."""
    north: Array


@dataclass(frozen=True, kw_only=True)
class Cyclone:
    """A vortex with the profile of Holland (1980, Mon. Weather Rev. 108, 1212)."""

    latitude: float
    longitude: float
    drop: float
    """Of pressure at the centre, in Pa."""
    core: float
    """The radius of the strongest wind, in metres."""
    peak: float
    """Holland's B: how sharp that ring is."""
    stretch: float = 1.0
    """By how much it is drawn larger than it is, to be seen in large cells."""

    @classmethod
    def drawn(cls, cell: float, rng: np.random.Generator) -> Cyclone:
        """One in the tropics, where it is warm and the Earth's turning is felt.

        It is not too small to be seen in cells of ``cell`` metres.
        """
        core = rng.uniform(40e3, 70e3)
        return cls(
            latitude=float(np.radians(rng.uniform(9, 28)) * rng.choice([-1, 1])),
            longitude=rng.uniform(0, 2 * np.pi),
            drop=rng.uniform(2500, 6500),
            core=core,
            peak=rng.uniform(1.3, 1.8),
            stretch=max(1.0, 0.7 * cell / core),
        )

    @property
    def turning(self) -> float:
        """The Coriolis parameter: positive in the north, where cyclones turn counterclockwise."""
        return 2 * EARTH_TURNS * float(np.sin(self.latitude))

    def pressure(self, distance: Array) -> Array:
        """By how much it lies under that of the surroundings."""
        return np.asarray(self.drop * (1 - np.exp(-self._ratio(distance))), np.float32)

    def wind(self, distance: Array) -> Array:
        """Its speed, by the balance of pressure, the Earth's turning and the curve of the path."""
        ratio = self._ratio(distance)
        push = self.peak / AIR_DENSITY * ratio * self.drop * np.exp(-ratio)
        coriolis = distance * (abs(self.turning) / 2)
        return np.asarray(np.sqrt(push + coriolis**2) - coriolis, np.float32)

    def _ratio(self, distance: Array) -> Array:
        return np.asarray((self.core / np.maximum(distance, 1.0)) ** self.peak)

    @property
    def reach(self) -> float:
        """Where its wind is a gale no more, in metres."""
        distance = np.linspace(self.core, 20 * self.core, 400, dtype=np.float32)
        return float(distance[np.flatnonzero(self.wind(distance) >= GALE)[-1]])

    @property
    def coverage(self) -> float:
        """The share of a grid's cells under its mask."""
        return float(np.pi * (self.stretch * self.reach) ** 2 / np.cos(self.latitude) / ALL_CELLS)

    def place(self, grid: Grid) -> Place:
        rows = grid.rows_near(self.latitude, 4 * self.reach * self.stretch)
        up = grid.up[rows]
        centre = vectors(self.latitude, self.longitude).astype(np.float32)
        around = np.cross(centre, up)
        sine = np.linalg.norm(around, axis=-1)
        around /= np.maximum(sine, 1e-7)[..., None]
        distance = RADIUS / self.stretch * np.arctan2(sine, np.einsum("hwc,c->hw", up, centre))
        parts = ((around * way[rows]).sum(-1) for way in (grid.east, grid.north))
        return Place(rows, distance, *parts)


@dataclass(frozen=True, kw_only=True)
class River:
    """A narrow band of vapour and wind, from the subtropics toward a pole."""

    axis: NDArray[np.float64]
    """Latitudes and longitudes, ``STEP`` apart."""
    width: float
    vapour: float
    """On the axis, above that of the surroundings, in kg/m^2."""
    wind: float
    """Along the axis, in m/s."""

    @classmethod
    def drawn(cls, cell: float, rng: np.random.Generator) -> River:
        width = max(rng.uniform(*RIVER_WIDTHS), 0.7 * cell)
        vapour, wind = rng.uniform(16, 30), rng.uniform(12, 22)
        return cls(axis=_axis(rng), width=width, vapour=vapour, wind=wind)

    @property
    def _along(self) -> Array:
        """Its strength at the points of the axis, which fades toward the ends."""
        ways = np.linspace(0.02, 0.98, self.axis.shape[1], dtype=np.float32)
        return np.asarray(np.sqrt(np.sin(np.pi * ways)))

    @property
    def coverage(self) -> float:
        """The share of a grid's cells under its mask."""
        widths = 2 * self.width * np.sqrt(2 * np.log(np.maximum(self._along / EDGE, 1)))
        return float((widths * STEP / np.cos(self.axis[0])).sum() / ALL_CELLS)

    def cells(self, grid: Grid) -> tuple[slice, NDArray[np.int64]]:
        """Rows and columns around it."""
        latitude, longitude = self.axis
        reach = 4 * self.width
        middle, half = (latitude.max() + latitude.min()) / 2, np.ptp(latitude) / 2
        rows = grid.rows_near(float(middle), float(half) * RADIUS + reach)
        beside = reach / RADIUS / max(0.1, np.cos(np.abs(latitude).max() + reach / RADIUS))
        return rows, grid.columns_between(longitude.min() - beside, longitude.max() + beside)

    def strength(self, grid: Grid) -> tuple[Array, Array]:
        """In ``cells``: its share of ``vapour``, and the heading of its wind."""
        latitude, longitude = self.axis.astype(np.float32)
        points = vectors(latitude, longitude)
        up = grid.up[self.cells(grid)]
        nearest = np.einsum("hwc,pc->hwp", up, points).argmax(-1)
        chord = np.linalg.norm(up - points[nearest], axis=-1) * RADIUS
        across = np.exp(-((chord / self.width) ** 2) / 2)
        to_north, to_east = np.gradient(self.axis, axis=1)
        heading = np.arctan2(to_north, to_east * np.cos(latitude)).astype(np.float32)
        return across * self._along[nearest], heading[nearest]


def _axis(rng: np.random.Generator) -> NDArray[np.float64]:
    """A path that sets out in the subtropics and bends toward the east."""
    num = int(rng.uniform(*RIVER_LENGTHS) / STEP)
    turn = rng.uniform(-0.5, 0.3) + 0.3 * np.sin(np.linspace(0, rng.uniform(2, 6), num))
    heading = rng.uniform(0.5, 0.9) + np.linspace(0, 1, num) * turn
    latitude = np.radians(rng.uniform(14, 26)) + np.cumsum(np.sin(heading)) * STEP / RADIUS
    latitude = np.minimum(latitude, np.radians(66))
    steps = np.cos(heading) * STEP / RADIUS / np.cos(latitude)
    longitude = rng.uniform(0, 2 * np.pi) + np.cumsum(steps)
    return np.stack([rng.choice([-1.0, 1.0]) * latitude, longitude])
