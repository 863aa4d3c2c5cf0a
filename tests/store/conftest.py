"""Small data sets in which every number tells its sample and its place."""

import h5py
import numpy as np
import pytest

SHAPE = (2, 6, 5, 7)


def image(index, shape=SHAPE):
    return (np.arange(np.prod(shape)).reshape(shape) * 3 + 1000 * index).astype(np.int16)


def label_map(index):
    return (image(index)[0] % 5).astype(np.int8)


def write_samples(folder, num, shape=SHAPE, start=0):
    """One file a sample, channels last: an image, a label map, a vector, a number."""
    for index in range(start, start + num):
        with h5py.File(folder / f"{index:03}.h5", "w") as file:
            file["image"] = np.moveaxis(image(index, shape), 0, -1)
            file["label"] = (image(index, shape)[0] % 5).astype(np.int8)
            file["vector"] = np.array([index, 2 * index], np.float32)
            file["scalar"] = np.int32(index)


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """A pattern of 11 files."""
    folder = tmp_path_factory.mktemp("samples")
    write_samples(folder, 11)
    return str(folder / "*.h5")


@pytest.fixture(scope="session")
def cubes(tmp_path_factory):
    """Seven cubes in one file."""
    path = tmp_path_factory.mktemp("cubes") / "cubes.npy"
    np.save(path, np.arange(7 * 216, dtype=np.float32).reshape(7, 1, 6, 6, 6))
    return str(path)
