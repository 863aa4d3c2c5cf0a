import itertools

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.io import ArraySpec
from hyperslab.io.spec import axes_of
from hyperslab.layout import Box, Span
from hyperslab.store.augment import Augmentation
from hyperslab.store.batches import Rows
from hyperslab.store.deliver import ReadyRows, SlabDelivery, normalized
from hyperslab.store.normalize import Normalize

MESHES = [{"sample": 1}, {"sample": 2}, {"height": 2}, {"channel": 2}, {"channel": 4}]
DTYPES = ["i1", "u2", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "?", "c8", "c16"]


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
    assert normalized(x, Normalize.named(how), stats, Span(0, 1)).tolist() == [[[[0, 0], [0, 0]]]]


def filled(spec, box, samples, turns, later):
    """Rows of ``box`` of turned samples, as a loader fills them."""
    memory = np.zeros((len(samples), box.numel), spec.dtype)
    rows = Rows(spec, box.shape, memory, turns if later else ())
    for row, (sample, turn) in enumerate(zip(samples, turns, strict=True)):
        place = rows.place(row) if later else turn.view(rows.place(row))
        place[...] = sample[turn.source(box, spec).slices_in(Box.whole(spec.shape))]
    return rows


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["CDHW", "DHWC", "WHD", "HCW"]),
    st.sampled_from(DTYPES),
    st.sampled_from(["flip", "cube"]),
    st.integers(0, 1000),
    st.data(),
)
def test_samples_turned_on_the_device_are_those_turned_on_the_way(letters, dtype, kind, seed, data):
    axes = axes_of(letters, len(letters), "it")
    extents = {"C": 2, "D": 4, "H": data.draw(st.sampled_from([3, 4])), "W": 4}
    shape = tuple(extents[letter] for letter in axes.names)
    spec = ArraySpec("it", axes, shape, np.dtype(dtype), is_cut=True)
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in shape]
    samples = np.random.default_rng(seed).integers(0, 100, (3, *shape)).astype(dtype)
    spatial = tuple(extents[letter] for letter in axes.names if letter != "C")
    turns = tuple(Augmentation(kind, spatial).symmetry(seed, 0, index) for index in range(3))
    now, later = (filled(spec, Box.of(*bounds), samples, turns, later) for later in (False, True))
    ready = ReadyRows(later, torch.from_numpy(later.memory))
    for asked in (ready.dtype, torch.complex128 if dtype.startswith("c") else torch.float32):
        found = ready.converted(asked)
        assert found.is_contiguous()
        assert found.dtype == asked
        torch.testing.assert_close(found, torch.from_numpy(now.boxes).to(asked), rtol=0, atol=0)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Seven cubes with label maps, channels last; the fifth cannot be read."""
    folder = tmp_path_factory.mktemp("scans")
    for index in range(7):
        with h5py.File(folder / f"{index}.h5", "w") as file:
            image = np.random.default_rng(index).integers(0, 9999, (6, 6, 6, 2)).astype(np.uint16)
            file["image"], file["label"], file["number"] = image, image[..., 0] % 7, index
    (folder / "4.h5").write_bytes(b"something else")
    return str(folder / "*.h5")


def loaded(scans, mesh, turns, **options):
    """What two epochs and the rest of a third, gone on with by another loader, deliver."""
    data = hs.open(scans, sample="image", target=("label", "number"), axes="DHWC")
    options |= {"batch_size": 3, "augment": "cube", "bad_samples": "skip"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabDelivery, "turns", turns)
        with hs.Loader(data, mesh, **options) as loader:
            found = list(itertools.chain(loader, loader, itertools.islice(loader, 1)))
            state = loader.state_dict()
        with hs.Loader(data, mesh, **options) as other:
            other.load_state_dict(state)
            return found + list(other)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"depth": 2, "height": 2}, {"store": "memory", "normalize": "log1p"}),
        ({"sample": 2, "width": 2}, {"store": "memory", "num_nodes": 2}),
        ({"height": 4}, {"store": "none", "prefetch": 0, "dtype": torch.float64}),
    ],
    ids=str,
)
def test_slabs_are_the_same_wherever_samples_are_turned(axes, options, scans):
    mesh, rest = hs.init(**axes, device="cpu"), dict(options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERSLAB_NODE", f"node {mesh.rank % rest.pop('num_nodes', 1)}")
        expected = loaded(scans, mesh, turns=False, **rest)
        found = loaded(scans, mesh, turns=True, **rest)
    assert len(found) == len(expected) == 9
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.layout == b.layout
            torch.testing.assert_close(a.local, b.local, rtol=0, atol=0)


def test_a_loader_that_turns_on_the_device_gives_arrays_that_are_turned_too(scans, monkeypatch):
    monkeypatch.setattr(SlabDelivery, "turns", True)
    data = hs.open(scans, sample="image", target="label", axes="DHWC").take([0, 1, 2, 3])
    with hs.Loader(data, hs.init(device="cpu"), batch_size=2, augment="cube") as loader:
        slabs, state = list(loader), loader.state_dict()
        loader.load_state_dict({**state, "epoch": 0})
        for (x, label), (image, labels) in zip(slabs, loader.numpy(), strict=True):
            np.testing.assert_array_equal(x.local, image)
            np.testing.assert_array_equal(label.local, labels)
            np.testing.assert_array_equal(labels, image[:, 0] % 7)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_standard_takes_the_statistics_of_the_whole_set(axes, folder):
    mesh = hs.init(**axes, device="cpu")
    data = hs.with_statistics(hs.open(folder / "images.npy", axes="NCHW", mesh=mesh), mesh)
    with hs.Loader(data, mesh, batch_size=2, shuffle="none", normalize="standard") as loader:
        found = torch.cat([hs.gather(x) for x in loader])
    x = torch.from_numpy(images_of())
    mean, std = x.mean((0, 2, 3), True), x.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(found, (x - mean) / std)


def test_standard_without_statistics_says_where_they_come_from(folder):
    data = hs.open(folder / "images.npy", axes="NCHW")
    with pytest.raises(
        hs.ConfigError, match=r"name their array by stats= .*; or open an index into"
    ):
        hs.Loader(data, normalize="standard")


def test_a_constant_channel_becomes_0_and_one_without_values_is_refused(tmp_path):
    images = np.stack([np.full((2, 4), 3.0), np.full((2, 4), np.nan)])
    np.save(tmp_path / "x.npy", images[None, :1])
    data = hs.with_statistics(hs.open(tmp_path / "x.npy", axes="NCHW"))
    with hs.Loader(data, hs.init(device="cpu"), normalize="standard") as loader:
        assert not torch.any(next(iter(loader)).local)
    np.save(tmp_path / "x.npy", images[None])
    data = hs.with_statistics(hs.open(tmp_path / "x.npy", axes="NCHW"))
    with pytest.raises(hs.ConfigError, match="channel 1 of 'data' has none that are finite"):
        hs.Loader(data, normalize="standard")
