import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Universes, produce
from hyperslab.synth.cosmology import RANGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cosmo")
    produce(Universes(size=32, count=24), out)
    return out


def test_files_have_the_schema_of_cosmoflow(folder):
    with h5py.File(folder / "cosmo_000003.h5") as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "full": ((32, 32, 32, 4), "<i2"),
            "unitPar": ((4,), "<f4"),
            "physPar": ((4,), "<f4"),
            "namePar": ((4,), "|S7"),
            "redshifts": ((4,), "<f4"),
        }
        assert file["full"].chunks is None
        assert list(file["redshifts"]) == [0, 0.5, 1.5, 3]
        assert list(file["namePar"].asstr()) == ["Omega_m", "sigma_8", "N_spec", "H_0"]


def test_parameters_lie_where_their_units_say(folder):
    for path in folder.iterdir():
        with h5py.File(path) as file:
            unit, physical = file["unitPar"][:], file["physPar"][:]
        assert (np.abs(unit) <= 1).all()
        low, high = np.transpose(list(RANGES.values()))
        np.testing.assert_allclose(physical, low + (unit + 1) / 2 * (high - low), rtol=1e-6)


def test_sigma_8_can_be_read_off_the_counts(folder):
    spreads, sigmas = [], []
    for path in folder.iterdir():
        with h5py.File(path) as file:
            spreads.append(file["full"][..., 3].std())
            sigmas.append(file["physPar"][1])
    assert np.corrcoef(spreads, sigmas)[0, 1] > 0.6  # boxes of 32 Mpc/h differ much by chance


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"size": 3}, "must be 4 to 1024, got 3"),
        ({"size": 1025}, "must be 4 to 1024, got 1025"),
        ({"particles": 2}, "must be a cube, such as 1, 8 or 27, got 2"),
        ({"count": 0}, "count must be above 0"),
    ],
)
def test_settings_that_will_not_do_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        Universes(**setting)


def test_memory_is_foretold_for_the_largest_sizes():
    assert 3.0 < Universes(size=512).memory_nbytes / 2**30 < 4.5
