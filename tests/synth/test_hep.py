import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Collisions, produce


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    out = tmp_path_factory.mktemp("hep")
    produce(Collisions(shape=(64, 64), count=200, per_file=150), out)
    return sorted(out.iterdir())


def read(files, name):
    return np.concatenate([h5py.File(path)[name][:] for path in files])


def ranked(scores, labels):
    """The chance that a signal has a higher score than a background."""
    signal, background = scores[labels == 1], scores[labels == 0]
    return (signal[:, None] > background).mean() + (signal[:, None] == background).mean() / 2


def test_files_have_the_schema_of_hepcnn(files):
    assert len(files) == 2
    with h5py.File(files[1]) as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "data": ((50, 3, 64, 64), "<f4"),
            "label": ((50,), "<i4"),
            "psr": ((50,), "<i4"),
            "normweight": ((50,), "<f4"),
            "weight": ((50,), "<f4"),
        }
        assert file["data"].chunks is None


def test_both_classes_are_there_and_weights_tell_which_is_rare(files):
    label, weight = read(files, "label"), read(files, "weight")
    assert 0.4 < label.mean() < 0.6
    assert weight[label == 1].mean() < weight[label == 0].mean() / 100
    assert set(read(files, "psr")) == {0, 1}


def test_the_classes_can_be_told_apart_but_not_by_energy_alone(files):
    data, label = read(files, "data"), read(files, "label")
    energy = data[:, :2].sum(1)
    in_blocks = energy.reshape(-1, 8, 8, 8, 8).sum((2, 4)).reshape(len(energy), -1)
    num_hot = (in_blocks > 60).sum(1)
    assert ranked(num_hot, label) > 0.85
    assert ranked(energy.sum((1, 2)), label) < ranked(num_hot, label)
    cuts = read(files, "psr")
    assert cuts[label == 1].mean() > 3 * cuts[label == 0].mean()


@pytest.mark.parametrize("setting", [{"shape": (0, 5)}, {"shape": (5000, 5)}, {"per_file": 0}])
def test_settings_that_will_not_do_are_refused(setting):
    with pytest.raises(ConfigError, match="must be"):
        Collisions(**setting)


def test_no_file_repeats_the_images_of_another(files):
    first, second = (h5py.File(path)["data"][:50] for path in files)
    assert not np.array_equal(first, second)
