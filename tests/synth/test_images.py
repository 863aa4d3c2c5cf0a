import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.io import open as open_data
from hyperslab.synth import Images, produce
from hyperslab.synth.images import SHAPES, Places, make_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("images")
    produce(Images(shape=(24, 32), count=200, per_file=120), out)
    return out


def test_files_have_many_images_with_their_classes(folder):
    with h5py.File(folder / "images_000001.h5") as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "data": ((80, 3, 24, 32), "|u1"),
            "label": ((80,), "<i4"),
            "names": ((10,), "|S8"),
        }
        assert list(file["names"].asstr()) == list(SHAPES)
    data = open_data(folder / "*.h5", preset="images")
    assert len(data) == 200
    labels = [int(data.read(index, array="label")) for index in range(len(data))]
    assert np.bincount(labels, minlength=10).min() >= 8


def test_colour_tells_nothing_of_the_class(folder):
    data = open_data(folder / "*.h5", preset="images")
    labels = np.array([int(data.read(index, array="label")) for index in range(len(data))])
    means = np.array([data.read(index).mean((1, 2)) for index in range(len(data))])
    between = np.var([means[labels == label].mean(0) for label in range(10)], axis=0)
    assert (between < 0.15 * means.var(0)).all()


def test_shapes_differ_and_lie_about_a_middle():
    ticks = np.linspace(-1.2, 1.2, 96, dtype=np.float32)
    v, u = np.meshgrid(ticks, ticks, indexing="ij")
    found = [inside(Places.of(u, v)) > 0 for inside in SHAPES.values()]
    for number, one in enumerate(found):
        assert 0.05 < one.mean() < 0.6
        assert not one[0].any()
        assert not one[:, 0].any()
        for other in found[:number]:
            assert (one & other).sum() < 0.85 * (one | other).sum()


def test_an_image_depends_on_its_number_alone_and_not_on_its_file(tmp_path, folder):
    produce(Images(shape=(24, 32), count=25, per_file=20), tmp_path)
    ours, theirs = (open_data(path / "*.h5", preset="images") for path in (folder, tmp_path))
    for index in (0, 19, 24):
        np.testing.assert_array_equal(ours.read(index), theirs.read(index))


@pytest.mark.parametrize("shape", [(16, 16), (16, 300)])
def test_the_smallest_and_narrow_images_can_be_made(shape):
    for label in range(10):
        assert make_image(shape, label, np.random.default_rng(label)).shape == (3, *shape)


@pytest.mark.parametrize("setting", [{"shape": (8, 64)}, {"shape": (64, 5000)}, {"per_file": 0}])
def test_settings_that_will_not_do_are_refused(setting):
    with pytest.raises(ConfigError, match="must be"):
        Images(**setting)
