"""A moment of weather: sixteen fields that fit together, and where its storms are.

The wind follows a random stream function and the mean circulation; pressure balances it; warmth
and vapour are carried from where the air was two days before. Cyclones and rivers of vapour are
added to all fields they show in. The fields, their order and their units are those of CAM5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.sphere import Array, Grid, came_from, random_field, sampled
from hyperslab.synth.storms import AIR_DENSITY, EARTH_TURNS, EDGE, Cyclone, River

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
