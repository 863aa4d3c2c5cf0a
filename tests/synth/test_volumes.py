import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.io import open as open_data
from hyperslab.synth import Volumes, produce
from hyperslab.synth.volumes import BLUR, Ellipsoid, _covered, make_phantom


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("volumes")
    produce(Volumes(shape=(40, 48, 56), count=8), out)
    return out


def test_files_have_an_image_its_classes_and_its_statistics(folder):
    with h5py.File(folder / "volumes_000003.h5") as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "image": ((1, 40, 48, 56), "<i2"),
            "label": ((40, 48, 56), "|u1"),
            "stats": ((1, 4), "<f4"),
            "names": ((4,), "|S10"),
        }
        image = file["image"][:]
        expected = [image.min(), image.max(), image.mean(), image.std()]
        np.testing.assert_allclose(file["stats"][0], expected, rtol=1e-5)
    data = open_data(folder / "*.h5", preset="volumes")
    assert data.arrays["label"].is_cut
    assert data.stats == "stats"


def test_every_volume_has_organs_and_lesions_within_them(folder):
    data = open_data(folder / "*.h5", preset="volumes")
    shares = []
    for index in range(len(data)):
        image, label = data.read(index)[0], data.read(index, array="label")
        shares.append(np.bincount(label.ravel(), minlength=4) / label.size)
        assert image[label > 0].mean() > 3 * image[:, 0, 0].mean()  # a corner is air
    shares = np.array(shares)
    assert (shares[:, 1:] > 0).all()
    assert (shares[:, 1] > shares[:, 3]).all()
    assert 0.9 < shares[:, 0].mean() < 0.99


def test_brightness_alone_does_not_tell_the_classes(folder):
    data = open_data(folder / "*.h5", preset="volumes")
    for index in range(len(data)):
        image, label = data.read(index)[0], data.read(index, array="label")
        low, high = np.quantile(image[label == 1], (0.1, 0.9))
        alike = (image > low) & (image < high)
        assert (label[alike] == 1).mean() < 0.6


def test_a_voxel_on_a_surface_is_a_mixture():
    ball = Ellipsoid(np.zeros(3), np.full(3, 0.5), np.eye(3))
    voxel = 0.02
    places = np.zeros((3, 101), np.float32)
    places[0] = voxel * np.arange(101)
    covered = _covered(ball, places, voxel)
    assert covered[25] == pytest.approx(0.5, abs=1e-4)
    assert covered[24] == pytest.approx(0.5 + 1 / BLUR, abs=1e-4) or covered[24] == 1
    assert (covered[:23] == 1).all()
    assert (covered[27:] == 0).all()


def test_a_volume_depends_on_its_number_alone_and_may_be_small_or_flat():
    first, again = (make_phantom((16, 16, 16), np.random.default_rng([0, 5])) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    image, label = make_phantom((16, 90, 20), np.random.default_rng(1))
    assert image.shape == label.shape == (16, 90, 20)
    assert set(np.unique(label)) <= {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(8, 64, 64), (64, 64, 2048)])
def test_sizes_that_will_not_do_are_refused(shape):
    words = rf"must be 16 to 1024 along each dim, got {'x'.join(map(str, shape))}"
    with pytest.raises(ConfigError, match=words):
        Volumes(shape=shape)
