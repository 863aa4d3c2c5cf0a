import numpy as np
import pytest

from hyperslab.synth.sphere import RADIUS, Grid, came_from, random_field, sampled

GRID = Grid(48, 96)


def test_random_fields_are_alike_everywhere_with_variance_1():
    rng = np.random.default_rng(0)
    square = np.mean([random_field(GRID, 12, 6, rng) ** 2 for _ in range(60)], 0)
    area = np.cos(GRID.latitude) * np.ones(GRID.shape)
    assert np.average(square, weights=area) == pytest.approx(1, abs=0.05)
    rows = square.mean(1)
    assert 0.7 < rows[:4].mean() < 1.3
    assert 0.7 < rows[22:26].mean() < 1.3


def test_slopes_are_per_metre():
    field = np.sin(GRID.latitude) + 0 * GRID.longitude
    east, north = GRID.slopes(field)
    assert np.abs(east).max() == 0
    np.testing.assert_allclose(
        north[2:-2], (np.cos(GRID.latitude) / RADIUS + 0 * east)[2:-2], rtol=0.01
    )
    wave = np.cos(GRID.latitude) * np.sin(GRID.longitude)
    expected = np.cos(GRID.longitude) / RADIUS
    np.testing.assert_allclose(GRID.slopes(wave)[0][20], expected, atol=0.01 / RADIUS)


def test_an_eastward_wind_brings_air_from_the_west():
    u, v = np.full(GRID.shape, 10.0), np.zeros(GRID.shape)
    row, column = came_from(GRID, u, v, seconds=86400)
    np.testing.assert_allclose(row[24], 24)
    cells = 864e3 / (2 * np.pi * RADIUS / 96 * np.cos(GRID.latitude[24, 0]))
    np.testing.assert_allclose(np.arange(96) - column[24], cells, rtol=1e-3)


def test_sampling_at_cells_is_exact_and_wraps_around():
    field = np.random.default_rng(0).random(GRID.shape)
    row, column = np.indices(GRID.shape, np.float32)
    np.testing.assert_allclose(sampled(field, row, column + 96), field)
    between = sampled(field, np.array([3.0]), np.array([-0.5]))
    assert between == pytest.approx((field[3, 0] + field[3, 95]) / 2)
