import itertools

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.io import ArraySpec
from hyperslab.io.spec import axes_of
from hyperslab.layout import Box
from hyperslab.store.arrived import Arrived
from hyperslab.store.augment import Augmentation
from hyperslab.store.deliver import SlabDelivery
from hyperslab.store.rows import Rows

DTYPES = ["i1", "u2", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "?", "c8", "c16"]


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
    arrived = Arrived(later, torch.from_numpy(later.memory))
    for asked in (arrived.dtype, torch.complex128 if dtype.startswith("c") else torch.float32):
        found = arrived.converted(asked)
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
