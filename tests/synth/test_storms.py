import numpy as np
import pytest

from hyperslab.synth.sphere import Grid
from hyperslab.synth.storms import Cyclone, River


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
