"""Weather of the whole Earth with its storms marked, in files as the climate benchmark has them.

The wind follows a random stream function and the mean circulation; pressure balances it; warmth
and vapour are carried from where the air was two days before. Cyclones and rivers of vapour are
added to all fields they show in. The fields, their order and their units are those of CAM5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.io.spec import shown_shape
from hyperslab.synth.production import SampleFiles, Settings, check_size
from hyperslab.synth.sphere import RADIUS, Array, Grid, came_from, random_field, sampled, vectors

# What is to be found on a weather map: tropical cyclones, and rivers of vapour in the air


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


# A moment of weather: sixteen fields that fit together, and where its storms are

CHANNELS = (
    *("TMQ", "U850", "V850", "UBOT", "VBOT", "QREFHT", "PS", "PSL"),
    *("T200", "T500", "PRECT", "TS", "TREFHT", "Z1000", "Z200", "ZBOT"),
)
FRACTIONS = {Cyclone: 0.00071, River: 0.017}
"""Of all cells, on average: those of the data that the benchmark's class weights come from."""
CLASSES = {Cyclone: 1, River: 2}
"""In a mask; the background is 0."""
GRAVITY, GAS = 9.81, 287.0
"""In m/s^2, and in J/(kg K)."""


@dataclass
class Weather:
    """Fields under construction, by their names."""

    grid: Grid
    fields: dict[str, Array]
    mask: NDArray[np.uint8]


def make_weather(grid: Grid, rng: np.random.Generator) -> tuple[Array, NDArray[np.uint8]]:
    """``CHANNELS`` as (16, height, width), and the mask of classes."""
    weather = _air(grid, rng)
    for _ in range(rng.poisson(_expected(River, grid.cell))):
        _add_river(weather, River.drawn(grid.cell, rng))
    for _ in range(rng.poisson(_expected(Cyclone, grid.cell))):
        _add_cyclone(weather, _cyclone_at_sea(grid, rng), rng)
    fields = _finished(weather, rng)
    return np.stack([fields[name] for name in CHANNELS]).astype(np.float32), weather.mask


@lru_cache
def _expected(kind: type[Cyclone] | type[River], cell: float) -> float:
    """How many storms cover their share of ``FRACTIONS``.

    Where cells are large, storms are drawn larger, so that they can be seen: fewer are needed then.
    """
    rng = np.random.default_rng(0)
    covered = np.mean([kind.drawn(cell, rng).coverage for _ in range(200)])
    return FRACTIONS[kind] / float(covered)


def _air(grid: Grid, rng: np.random.Generator) -> Weather:
    """Without storms."""
    degrees = np.degrees(grid.latitude)
    stream = 6e6 * random_field(grid, 7, 6, rng) * (0.35 + 0.65 * np.abs(np.sin(grid.latitude)))
    slope_east, slope_north = grid.slopes(stream)
    westerly = 12 * _bump(np.abs(degrees), 45, 14) - 6 * _bump(degrees, 0, 15)
    u, v = westerly - slope_north, slope_east
    row, column = came_from(grid, u, v, seconds=2 * 86400)
    origin = np.pi * ((row + 0.5) / grid.height - 0.5) - np.radians(rng.uniform(-8, 8))
    moist = 1 / (1 + np.exp(-1.5 * sampled(random_field(grid, 14, 3, rng), row, column)))
    warmth = np.sin(origin) ** 2
    pressure = 101200 + 700 * _bump(np.abs(degrees), 30, 12) - 1300 * _bump(np.abs(degrees), 63, 13)
    balance = AIR_DENSITY * 2 * EARTH_TURNS * np.sin(grid.latitude) * stream
    surface = 300.5 - 44 * warmth - 14 * warmth**3 + 0.5 * random_field(grid, 20, 3, rng)
    fields = {
        "U850": u,
        "V850": v,
        "PSL": pressure + balance,
        "TREFHT": surface,
        "T500": 268.5 - 30 * warmth - 6 * warmth**3,
        "T200": 217.5 + 5 * warmth + 1.5 * random_field(grid, 10, 4, rng),
        "TMQ": 56 * np.exp(0.062 * (surface - 300.5)) * (0.35 + 0.65 * moist),
        "PRECT": np.zeros(grid.shape, np.float32),
    }
    return Weather(grid, fields, np.zeros(grid.shape, np.uint8))


def _cyclone_at_sea(grid: Grid, rng: np.random.Generator) -> Cyclone:
    height = _land_height(grid)
    while True:
        cyclone = Cyclone.drawn(grid.cell, rng)
        row = int((cyclone.latitude / np.pi + 0.5) * grid.height)
        column = int(cyclone.longitude / (2 * np.pi) * grid.width)
        if height[row, column] == 0:
            return cyclone


def _add_cyclone(weather: Weather, cyclone: Cyclone, rng: np.random.Generator) -> None:
    place = cyclone.place(weather.grid)
    fields, rows = weather.fields, place.rows
    near = place.distance / cyclone.reach
    fade = np.exp(-((near / 2.5) ** 4))
    speed = cyclone.wind(place.distance) * fade * np.sign(cyclone.turning)
    fields["U850"][rows] += speed * place.east
    fields["V850"][rows] += speed * place.north
    fields["PSL"][rows] -= cyclone.pressure(place.distance) * fade
    core = np.exp(-((place.distance / (1.5 * cyclone.core)) ** 2))
    fields["T500"][rows] += 5 * cyclone.drop / 4000 * core
    fields["T200"][rows] += 7 * cyclone.drop / 4000 * core
    angle = np.arctan2(-place.east, place.north)
    spiral = angle - np.sign(cyclone.turning) * 4 * np.log(near + 0.1) + rng.uniform(0, 6.28)
    bands = np.exp(-(near**2)) * (0.6 + 0.4 * np.cos(2 * spiral))
    fields["TMQ"][rows] += 22 * bands
    fields["PRECT"][rows] += 6e-7 * bands
    weather.mask[rows][near <= 1] = CLASSES[Cyclone]


def _add_river(weather: Weather, river: River) -> None:
    cells = river.cells(weather.grid)
    share, heading = river.strength(weather.grid)
    fields = weather.fields
    fields["TMQ"][cells] += river.vapour * share
    fields["U850"][cells] += river.wind * share * np.cos(heading)
    fields["V850"][cells] += river.wind * share * np.sin(heading)
    fields["PRECT"][cells] += 1.2e-7 * share**2
    fields["T500"][cells] += 1.5 * share
    weather.mask[cells] = np.where(share >= EDGE, CLASSES[River], weather.mask[cells])


def _finished(weather: Weather, rng: np.random.Generator) -> dict[str, Array]:
    """All fields: those that follow from the others are added."""
    grid, fields = weather.grid, weather.fields
    height = _land_height(grid)
    land = height > 0
    # Friction turns wind toward low pressure, to the left in the north.
    turn = np.radians(22) * np.tanh(grid.latitude / np.radians(6))
    u, v = 0.72 * fields["U850"], 0.72 * fields["V850"]
    at_sea = fields["TREFHT"]
    near_ground = at_sea - 0.0065 * height
    ground = near_ground + 0.8 + land * 4 * random_field(grid, 25, 3, rng)
    pressure = fields["PSL"] * np.exp(-GRAVITY * height / (GAS * at_sea))
    low = (fields["PSL"] - 1e5) / (AIR_DENSITY * GRAVITY)
    mean = 0.3 * at_sea + 0.45 * fields["T500"] + 0.25 * fields["T200"]
    damp = np.clip(fields["TMQ"] / (56 * np.exp(0.062 * (at_sea - 300.5))), 0.2, 1.05)
    showers = np.maximum(random_field(grid, 40, 2.5, rng) + 2 * damp - 2.2, 0) ** 2
    return fields | {
        "TMQ": np.maximum(fields["TMQ"] * np.exp(-height / 2500), 0.1),
        "UBOT": u * np.cos(turn) - v * np.sin(turn),
        "VBOT": u * np.sin(turn) + v * np.cos(turn),
        "QREFHT": 0.85 * damp * _saturated(near_ground, pressure),
        "PS": pressure,
        "PRECT": fields["PRECT"] + 4e-8 * showers * fields["TMQ"] / 50,
        "TS": ground,
        "TREFHT": near_ground,
        "Z1000": low,
        "Z200": low + GAS / GRAVITY * np.log(5) * mean,
        "ZBOT": 0.217 * near_ground,
    }


def _saturated(kelvin: Array, pressure: Array) -> Array:
    """The most vapour that air holds, in kg/kg."""
    vapour = 611 * np.exp(17.27 * (kelvin - 273.15) / (kelvin - 35.85))
    return np.asarray(0.622 * vapour / (pressure - 0.378 * vapour), np.float32)


@lru_cache(maxsize=4)
def _land_height(grid: Grid) -> Array:
    """Of the land above the sea, in metres: the same planet in all files."""
    field = random_field(grid, 3, 3, np.random.default_rng(4))
    return np.asarray(1500 * np.maximum(field - 0.55, 0), np.float32)


def _bump(value: Array, centre: float, width: float) -> Array:
    return np.asarray(np.exp(-(((value - centre) / width) ** 2)))


# Files of weather, as the climate benchmark has them: a moment, and a mask of its storms

LEAST, MOST = 16, 8192
"""Cells along a dim."""


@dataclass(frozen=True, kw_only=True)
class Climate(SampleFiles):
    """``climate/data`` (16, lat, lon), ``climate/labels`` (lat, lon) and ``climate/stats`` (16, 4).

    Labels are 0 for the background, 1 in a cyclone, 2 in a river of vapour. Columns of the
    statistics are the least, the most, the mean and the standard deviation of this file's channels.
    """

    prefix = "climate"
    shape: tuple[int, int] = (768, 1152)
    """Rows from south to north, and columns to the east, around the whole Earth."""
    count: int = 8

    def __post_init__(self) -> None:
        check_size("a map", self.shape, LEAST, MOST)
        super().__post_init__()

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 560 * self.shape[0] * self.shape[1]

    def file_nbytes(self, index: int) -> int:
        return (4 * len(CHANNELS) + 1) * self.shape[0] * self.shape[1] + 2**14

    @property
    def sizes(self) -> Settings:
        return {"size": shown_shape(self.shape)}

    def fill(self, file: h5py.File, index: int) -> None:
        data, mask = make_weather(Grid(*self.shape), self.rng(index))
        file["climate/data"] = data
        file["climate/labels"] = mask
        wide = data.reshape(len(CHANNELS), -1).astype(np.float64)
        columns = [wide.min(1), wide.max(1), wide.mean(1), wide.std(1)]
        file["climate/stats"] = np.stack(columns, axis=1).astype(np.float32)
