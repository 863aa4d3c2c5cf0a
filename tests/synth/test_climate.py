import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Climate, produce


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
    with pytest.raises(ConfigError, match="must be 16x16 to 8192x8192"):
        Climate(shape=(8, 100))
