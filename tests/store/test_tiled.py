import itertools

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.io.schedule import Position, Schedule
from hyperslab.store.augment import Augmentation


@pytest.fixture(scope="module")
def cubes(tmp_path_factory):
    """Three samples of 2x4x8x8 in one file, with a label map and a number each."""
    import h5py

    path = tmp_path_factory.mktemp("cubes") / "cubes.h5"
    with h5py.File(path, "w") as file:
        image = np.arange(3 * 2 * 4 * 8 * 8, dtype=np.int32).reshape(3, 4, 8, 8, 2)
        file["image"], file["label"], file["number"] = image, image[..., 0] % 7, np.arange(3)
    return str(path)


def opened(path):
    names = {"sample": "image", "target": ("label", "number"), "axes": "NDHWC"}
    return hs.open(path, **names).tiled(4)


def turned(image, found):
    image = image.transpose(0, *(1 + dim for dim in found.order))
    return np.flip(image, [1 + dim for dim, flip in enumerate(found.flips) if flip])


def check_batch(data, batch, slabs, symmetry):
    x, label, number = (hs.gather(slab).numpy() for slab in slabs)
    assert number.tolist() == [index // 4 for index in batch.indices]
    for row, index in enumerate(batch.indices):
        found = symmetry(batch.seed, batch.at.epoch, index)
        np.testing.assert_array_equal(x[row], turned(data.read(index), found))
        np.testing.assert_array_equal(label[row], x[row, 0] % 7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"store": "none"},
        {"store": "memory", "preload": True},
        {"store": "memory", "memory_budget": "1kB", "prefetch": 0},
        {"store": "memory", "stage": True},
        {"store": "none", "stage": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"sample": 2}, {"height": 2}], ids=str)
def test_tiles_are_loaded_and_turned_like_samples(axes, options, cubes, tmp_path):
    mesh = hs.init(**axes, device="cpu")
    data, rest = opened(cubes), dict(options)
    if rest.pop("stage", False):
        rest["stage_dir"] = tmp_path / "staged"
    symmetry = Augmentation("cube", (4, 4, 4)).symmetry
    batches = Schedule(num_samples=12, batch_size=5, seed=1).batches(Position(0, 0))
    arguments = {"batch_size": 5, "seed": 1, "augment": "cube", "spill_dir": tmp_path}
    with hs.Loader(data, mesh, **arguments, **rest) as loader:
        for slabs in itertools.chain(loader, loader):
            check_batch(data, next(batches), slabs, symmetry)


def test_a_loader_goes_on_in_the_midst_of_a_sample(cubes):
    with hs.Loader(opened(cubes), batch_size=5) as loader:
        steps = iter(loader.numpy())
        next(steps)
        state = loader.state_dict()
        rest = [x.copy() for x, *_ in steps]
    with hs.Loader(opened(cubes), batch_size=5) as other:
        other.load_state_dict(state)
        for (x, *_), expected in zip(other.numpy(), rest, strict=True):
            np.testing.assert_array_equal(x, expected)
    with (
        hs.Loader(opened(cubes).tiled(2), batch_size=5) as other,
        pytest.raises(hs.ConfigError, match="saved with num_samples=12, but the loader has 96"),
    ):
        other.load_state_dict(state)


@pytest.mark.ranks(2)
def test_ranks_that_cut_other_tiles_stop_together(cubes):
    mesh = hs.init(sample=2, device="cpu")
    data = (
        opened(cubes).tiled(2)
        if mesh.rank
        else hs.open(cubes, sample="image", axes="NCDHW").tiled(2)
    )
    loader = hs.Loader(data, mesh)
    with pytest.raises(hs.CommError, match=r"loaders differ in the (arrays|tiles)"):
        next(iter(loader))
