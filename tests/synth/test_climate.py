import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Climate, produce
from hyperslab.synth.climate import (
    CHANNELS,
    FRACTIONS,
    Cyclone,
    River,
    Weather,
    _add_cyclone,
    make_weather,
)
from hyperslab.synth.sphere import Grid


def test_a_cyclone_s_wind_balances_its_pressure():
    cyclone = Cyclone(latitude=0.4, longitude=0, drop=5000, core=60e3, peak=1.5)
    r = np.linspace(20e3, 600e3, 2000)
    wind = cyclone.wind(r)
    slope = -np.gradient(cyclone.pressure(r), r)
    balance = wind**2 / r + abs(cyclone.turning) * wind
    np.testing.assert_allclose(balance[5:-5], (slope / 1.15)[5:-5], rtol=0.02)
    assert r[wind.argmax()] == pytest.approx(60e3, rel=0.1)


@pytest.mark.parametrize("shape", [(64, 96), (192, 288)])
@pytest.mark.parametrize("kind", [Cyclone, River])
def test_masks_cover_what_was_foretold(kind, shape):
    grid, rng = Grid(*shape), np.random.default_rng(0)
    storms = [kind.drawn(grid.cell, rng) for _ in range(40)]
    if kind is Cyclone:
        covered = [(storm.place(grid).distance <= storm.reach).sum() for storm in storms]
    else:
        covered = [(storm.strength(grid)[0] >= 0.5).sum() for storm in storms]
    foretold = np.mean([storm.coverage for storm in storms])
    assert np.mean(covered) / (shape[0] * shape[1]) == pytest.approx(foretold, rel=0.1)


GRID = Grid(96, 144)


@pytest.fixture(scope="module")
def maps():
    made = [make_weather(GRID, np.random.default_rng([0, i])) for i in range(30)]
    data, masks = map(np.array, zip(*made, strict=True))
    return dict(zip(CHANNELS, data.swapaxes(0, 1), strict=True)), masks


def lone_cyclone(latitude):
    grid = Grid(192, 288)
    fields = {
        name: np.zeros(grid.shape)
        for name in ("U850", "V850", "PSL", "T500", "T200", "TMQ", "PRECT")
    }
    weather = Weather(grid, fields, np.zeros(grid.shape, np.uint8))
    cyclone = Cyclone(latitude=latitude, longitude=3.0, drop=5000, core=120e3, peak=1.5)
    _add_cyclone(weather, cyclone, np.random.default_rng(0))
    return weather


@pytest.mark.parametrize("latitude", [0.35, -0.35])
def test_cyclones_turn_with_the_earth_and_have_a_low_and_warm_core(latitude):
    weather = lone_cyclone(latitude)
    _, to_north_of_u = weather.grid.slopes(weather.fields["U850"])
    to_east_of_v, _ = weather.grid.slopes(weather.fields["V850"])
    inside = weather.mask == 1
    assert np.sign((to_east_of_v - to_north_of_u)[inside].mean()) == np.sign(latitude)
    assert weather.fields["PSL"].min() < -3000
    assert weather.fields["T500"][inside].max() > 4
    row, column = np.unravel_index(weather.fields["PSL"].argmin(), weather.grid.shape)
    assert weather.grid.latitude[row, 0] == pytest.approx(latitude, abs=0.02)
    assert weather.grid.longitude[column] == pytest.approx(3.0, abs=0.03)


def test_classes_have_about_the_fractions_of_the_real_data(maps):
    _, masks = maps
    assert set(np.unique(masks)) == {0, 1, 2}
    assert (masks == 2).mean() == pytest.approx(FRACTIONS[River], rel=0.4)
    assert 0.2 < (masks == 1).mean() / FRACTIONS[Cyclone] < 3


def test_storms_can_be_told_from_the_rest_by_simple_measures(maps):
    fields, masks = maps
    wind = np.hypot(fields["U850"], fields["V850"])
    drop = fields["PSL"].mean(2, keepdims=True) - fields["PSL"]
    moist = fields["TMQ"] / fields["TMQ"].mean(2, keepdims=True)
    cyclone = (wind > 17) & (drop > 500) & (np.abs(GRID.latitude) < 0.6)
    assert cyclone[masks == 1].mean() > 0.5
    assert cyclone[masks != 1].mean() < 0.005
    river = (moist * wind)[masks == 2]
    assert np.median(river) > np.quantile((moist * wind)[masks == 0], 0.95)


def test_fields_have_the_values_that_weather_has(maps):
    fields, _ = maps
    limits = {
        "TMQ": (0, 100), "U850": (-70, 70), "V850": (-70, 70), "UBOT": (-60, 60), "VBOT": (-60, 60),
        "QREFHT": (0, 0.03), "PS": (45e3, 106e3), "PSL": (93e3, 106e3), "T200": (200, 245),
        "T500": (220, 285), "PRECT": (0, 2e-6), "TS": (190, 330), "TREFHT": (190, 320),
        "Z1000": (-700, 600), "Z200": (10000, 13500), "ZBOT": (40, 75),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        assert low <= fields[name].min() < fields[name].max() <= high, name


def test_wind_blows_around_lows_as_the_earth_turns_it(maps):
    # Geostrophic: in the north low pressure is to the left, so v goes with the eastward slope.
    fields, _ = maps
    north, south = slice(66, 84), slice(12, 30)
    slope = np.array([GRID.slopes(pressure)[0] for pressure in fields["PSL"]])
    assert np.corrcoef(slope[:, north].ravel(), fields["V850"][:, north].ravel())[0, 1] > 0.8
    assert np.corrcoef(slope[:, south].ravel(), fields["V850"][:, south].ravel())[0, 1] < -0.8


@pytest.mark.parametrize("shape", [(16, 16), (17, 300), (300, 16)])
def test_odd_shapes_will_do(shape):
    data, mask = make_weather(Grid(*shape), np.random.default_rng(0))
    assert data.shape == (16, *shape)
    assert mask.shape == shape
    assert np.isfinite(data).all()


def test_files_have_the_schema_of_the_climate_benchmark(tmp_path):
    produce(Climate(shape=(32, 48), count=1), tmp_path)
    with h5py.File(tmp_path / "climate_000000.h5") as file:
        climate = {name: (array.shape, array.dtype.str) for name, array in file["climate"].items()}
        assert climate == {
            "data": ((16, 32, 48), "<f4"),
            "labels": ((32, 48), "|u1"),
            "stats": ((16, 4), "<f4"),
        }
        data, stats = file["climate/data"][:].reshape(16, -1), file["climate/stats"][:]
    expected = np.stack([data.min(1), data.max(1), data.mean(1), data.std(1)], axis=1)
    np.testing.assert_allclose(stats, expected, rtol=1e-3)


def test_maps_too_small_to_show_the_earth_are_refused():
    with pytest.raises(ConfigError, match="must be 16 to 8192 along each dim"):
        Climate(shape=(8, 100))
