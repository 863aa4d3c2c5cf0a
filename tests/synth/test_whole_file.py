import h5py
import pytest

from hyperslab.errors import ConfigError, FormatError
from hyperslab.synth import Universes, produce

UNIVERSES = Universes(size=8, count=4)


def test_files_of_others_are_not_overwritten_unasked(tmp_path):
    with h5py.File(tmp_path / "cosmo_000002.h5", "w") as file:
        file["full"] = 1
    with pytest.raises(ConfigError, match="was not made by this command"):
        produce(UNIVERSES, tmp_path)
    with h5py.File(tmp_path / "cosmo_000002.h5", "w") as file:
        file.attrs["made_with"] = 7
    with pytest.raises(ConfigError, match="was not made by this command"):
        produce(UNIVERSES, tmp_path)
    (tmp_path / "cosmo_000001.h5").write_bytes(b"not hdf5")
    with pytest.raises(FormatError, match=r"cosmo_000001.h5 exists and cannot be read"):
        produce(UNIVERSES, tmp_path)


def test_a_truncated_file_is_noticed(tmp_path):
    produce(UNIVERSES, tmp_path)
    path = tmp_path / "cosmo_000000.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="cannot be read"):
        produce(UNIVERSES, tmp_path)
