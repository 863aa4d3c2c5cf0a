import h5py
import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.store.deliver import normalized
from hyperslab.store.normalize import Normalize

MESHES = [{"sample": 1}, {"sample": 2}, {"height": 2}]


def images_of(num=5, shape=(3, 8, 6)):
    return np.random.default_rng(1).gamma(2.0, 3.0, (num, *shape)).astype(np.float32)


def write(folder, **kwargs):
    images = images_of(**kwargs)
    np.save(folder / "images.npy", images)
    return images


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """With the same images as NPY, and as HDF5 with their statistics."""
    folder = tmp_path_factory.mktemp("images")
    images = write(folder)
    with h5py.File(folder / "images.h5", "w") as file:
        file["data"] = images
        columns = [op(axis=(2, 3)) for op in (images.min, images.max, images.mean, images.std)]
        file["stats"] = np.stack(columns, -1)
    return folder


def batches(folder, axes, **options):
    mesh = hs.init(**axes, device="cpu")
    data = hs.open(folder / "images.npy", axes="NCHW")
    with hs.Loader(data, mesh, batch_size=2, shuffle="none", **options) as loader:
        return torch.cat([hs.gather(x) for x in loader])


@pytest.mark.ranks
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_values_are_normalized_by_channel(axes, folder):
    images = torch.from_numpy(images_of()).double()
    how = hs.Normalize(scale=[1, 2, 3], log1p=True, mean=[0.5, 0.6, 0.7], std=2.0)
    found = batches(folder, axes, normalize=how, dtype=torch.float64)
    shape = (1, 3, 1, 1)
    want = (images * torch.tensor([1.0, 2, 3]).reshape(shape)).log1p()
    want = (want - torch.tensor([0.5, 0.6, 0.7]).reshape(shape)) / 2
    torch.testing.assert_close(found, want)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("how", ["minmax", "standard"])
def test_each_file_is_normalized_by_its_own_statistics(axes, how, folder):
    mesh = hs.init(**axes, device="cpu")
    data = hs.open(folder / "images.h5", sample="data", axes="NCHW", stats="stats")
    with hs.Loader(data, mesh, batch_size=2, shuffle="none", normalize=how) as loader:
        found = torch.cat([hs.gather(x) for x in loader])
    x = torch.from_numpy(images_of())
    if how == "minmax":
        low, high = x.amin((2, 3), True), x.amax((2, 3), True)
        want = (x - low) / (high - low)
    else:
        want = (x - x.mean((2, 3), True)) / x.std((2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", "?"])
def test_numbers_of_a_file_become_those_of_a_model(dtype, tmp_path):
    images = np.random.default_rng(0).integers(0, 100, (3, 1, 4, 4)).astype(dtype)
    np.save(tmp_path / "images.npy", images)
    data = hs.open(tmp_path / "images.npy", axes="NCHW")
    with hs.Loader(data, hs.init(device="cpu"), batch_size=3, shuffle="none") as loader:
        [x] = loader
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x.local, images.astype(np.float32))


def test_a_batch_that_is_kept_is_never_overwritten(tmp_path):
    images = write(tmp_path, num=20)
    data = hs.open(tmp_path / "images.npy", axes="NCHW")
    for store in ("memory", "none"):
        mesh = hs.init(device="cpu")
        with hs.Loader(data, mesh, batch_size=1, shuffle="none", store=store) as loader:
            kept = [x.local for x in loader]
            arrays = [x[0, 1] for x in loader.numpy()]
            for _ in loader:
                pass
        np.testing.assert_array_equal(torch.cat(kept), images)
        assert sorted(a.tobytes() for a in arrays) == sorted(a.tobytes() for a in images[:, 1])


def test_a_sample_without_channels_has_one(tmp_path):
    np.save(tmp_path / "volume.npy", np.zeros((4, 5, 6), np.float32))
    data = hs.open(tmp_path / "volume.npy", axes="DHW")
    assert data.shape == (4, 5, 6)
    [x] = hs.Loader(data)
    assert x.shape == (1, 1, 4, 5, 6)
    [x] = hs.Loader(data).numpy()
    assert x.shape == (1, 4, 5, 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalize": "loud"}, "log1p, minmax, standard or a Normalize"),
        ({"normalize": "minmax"}, "needs statistics in the files"),
        ({"normalize": hs.Normalize(mean=[1, 2])}, "2 values of mean for 3 channels"),
        ({"store": "disk"}, "store must be one of memory, none, got 'disk'"),
        ({"bad_samples": "hide"}, "bad_samples must be one of stop, skip"),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, got -1"),
        ({"memory_budget": "lots"}, "'lots' is not a size in bytes"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"augment": "spin"}, "augment must be one of flip, cube"),
        ({"transport": "pigeon"}, "transport must be one of torch, mpi"),
        ({"cuts": {"depth": [0, 1]}}, "cuts are given for"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options, words, tmp_path):
    write(tmp_path)
    data = hs.open(tmp_path / "images.npy", axes="NCHW")
    with pytest.raises(hs.HyperslabError, match=words):
        hs.Loader(data, **options)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_a_large_offset_is_subtracted_before_digits_are_dropped(tmp_path, dtype):
    scale = 1.0 if dtype == np.float64 else 1000.0
    values = 2e9 / 1.024 + scale * np.random.default_rng(0).normal(size=(4, 4, 4, 4))
    np.save(tmp_path / "x.npy", values.astype(dtype))
    how = hs.Normalize(mean=2e9 / 1.024, std=scale)
    (x,) = hs.Loader(
        hs.open(tmp_path / "x.npy", axes="NDHW"), batch_size=4, normalize=how, shuffle="none"
    )
    expected = (values.astype(dtype) - 2e9 / 1.024) / scale
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.local[:, 0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("how", ["minmax", "standard"])
def test_a_channel_that_is_constant_becomes_0(how):
    x, stats = torch.full((1, 1, 2, 2), 5.0), torch.tensor([[[5.0, 5.0, 5.0, 0.0]]])
    assert normalized(x, Normalize.named(how), stats, True).tolist() == [[[[0, 0], [0, 0]]]]
