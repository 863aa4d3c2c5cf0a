import itertools

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.io.schedule import Position, Schedule
from hyperslab.store.augment import Augmentation
from hyperslab.store.loader import restore_state, save_state

NUM = 11
SHAPE = (2, 6, 5, 7)
MESHES = [
    {"sample": 1},
    {"sample": 2},
    {"depth": 2},
    {"height": 3},
    {"sample": 2, "depth": 2},
    {"depth": 2, "width": 2},
    {"channel": 2},
    {"channel": 4},
    {"channel": 2, "depth": 2},
]


def image(index):
    return (np.arange(np.prod(SHAPE)).reshape(SHAPE) * 3 + 1000 * index).astype(np.int16)


def opened(pattern):
    return hs.open(pattern, sample="image", target=("label", "vector", "scalar"), axes="DHWC")


def whole(slab):
    return hs.gather(slab).cpu().numpy()


def check_batch(batch, slabs, symmetry=None):
    x, label, vector, scalar = map(whole, slabs)
    assert scalar.tolist() == list(batch.indices)
    assert x.shape == (len(batch.indices), *SHAPE)
    for row, index in enumerate(batch.indices):
        want = image(index)
        if symmetry:
            found = symmetry(batch.seed, batch.at.epoch, index)
            want = want.transpose(0, *(1 + dim for dim in found.order))
            want = np.flip(want, [1 + dim for dim, flip in enumerate(found.flips) if flip])
        np.testing.assert_array_equal(x[row], want)
        np.testing.assert_array_equal(label[row], want[0] % 5)
        np.testing.assert_array_equal(vector[row], [index, 2 * index])


def schedule_of(**kwargs):
    return Schedule(num_samples=NUM, **kwargs)


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_mesh_visits_the_same_samples_in_the_same_order(axes, store, samples):
    mesh = hs.init(**axes, device="cpu")
    with hs.Loader(opened(samples), mesh, batch_size=4, store=store, seed=3) as loader:
        assert len(loader) == 3
        batches = schedule_of(batch_size=4, seed=3).batches(Position(0, 0))
        for slabs in itertools.chain(loader, loader):
            check_batch(next(batches), slabs)
        assert loader.epoch == 2


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize(
    "axes",
    [{"sample": 2}, {"depth": 2, "width": 2}, {"height": 3}, {"channel": 2, "height": 2}],
    ids=str,
)
def test_each_rank_takes_the_pre_image_of_its_box(axes, store, samples):
    mesh = hs.init(**axes, device="cpu")
    loader = hs.Loader(opened(samples), mesh, batch_size=4, store=store, augment="flip")
    symmetry = Augmentation("flip", SHAPE[1:]).symmetry
    batches = schedule_of(batch_size=4).batches(Position(0, 0))
    with loader:
        for slabs in itertools.chain(loader, loader):
            check_batch(next(batches), slabs, symmetry)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"depth": 2, "height": 2}, {"width": 3}], ids=str)
def test_cubes_are_turned_in_the_memory_of_the_ranks(axes, cubes):
    data = hs.open(cubes, axes="NCDHW")
    symmetry = Augmentation("cube", (6, 6, 6)).symmetry
    batches = Schedule(num_samples=7, batch_size=2, seed=5).batches(Position(0, 0))
    mesh = hs.init(**axes, device="cpu")
    with hs.Loader(data, mesh, batch_size=2, seed=5, augment="cube") as loader:
        for x in itertools.chain(loader, loader):
            batch = next(batches)
            for row, index in zip(whole(x), batch.indices, strict=True):
                found = symmetry(batch.seed, batch.at.epoch, index)
                want = data.read(index).transpose(0, *(1 + dim for dim in found.order))
                want = np.flip(want, [1 + dim for dim, flip in enumerate(found.flips) if flip])
                np.testing.assert_array_equal(row, want)


@pytest.mark.ranks
@pytest.mark.every(2)
@pytest.mark.parametrize(("augment", "num_nodes"), [(None, 2), ("flip", 2), ("flip", 4)])
@pytest.mark.parametrize("axes", [{"sample": 2, "depth": 2}, {"sample": 4}], ids=str)
def test_boxes_come_from_other_nodes_as_messages(axes, num_nodes, augment, samples):
    mesh = hs.init(**axes, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERSLAB_NODE", f"node {mesh.rank % num_nodes}")
        loader = hs.Loader(opened(samples), mesh, batch_size=5, augment=augment)
        symmetry = Augmentation("flip", SHAPE[1:]).symmetry if augment else None
        batches = schedule_of(batch_size=5).batches(Position(0, 0))
        with loader:
            for slabs in itertools.chain(loader, loader):
                check_batch(next(batches), slabs, symmetry)


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("budget", [0, "2kB"])
@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize("axes", [{"sample": 2}, {"depth": 2}], ids=str)
def test_what_does_not_fit_into_memory_is_on_disk_or_read_again(
    axes, disk, budget, samples, tmp_path
):
    mesh = hs.init(**axes, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if not disk:
            patch.setattr("hyperslab.store.slots.free_disk", lambda folder: 0)
        loader = hs.Loader(
            opened(samples), mesh, batch_size=3, memory_budget=budget, spill_dir=tmp_path
        )
        batches = schedule_of(batch_size=3).batches(Position(0, 0))
        with loader:
            for slabs in itertools.chain(loader, loader):
                check_batch(next(batches), slabs)
            [holding] = {(h.num_memory, h.num_disk > 0) for h in loader._pipeline._store.holdings}
        assert holding[1] == disk


@pytest.mark.ranks
@pytest.mark.every(2)
@pytest.mark.parametrize("shuffle", ["global", "local", "none"])
@pytest.mark.parametrize("axes", [{"sample": 2}, {"sample": 4}, {"depth": 2}], ids=str)
def test_an_epoch_goes_on_in_the_middle_on_another_mesh(axes, shuffle, samples):
    first = hs.Loader(opened(samples), hs.init(**axes, device="cpu"), batch_size=2, shuffle=shuffle)
    with first:
        rest = iter(first)
        for _ in range(3):
            next(rest)
        state = first.state_dict()
        expected = [whole(vector) for _, _, vector, _ in rest]
        expected += [whole(vector) for _, _, vector, _ in first]
    num_ranks = np.prod(list(axes.values()))
    other = hs.init(sample=1, width=int(num_ranks), device="cpu")
    with hs.Loader(opened(samples), other, batch_size=2, shuffle=shuffle, seed=9) as second:
        second.load_state_dict(state)
        found = [whole(vector) for _, _, vector, _ in itertools.chain(second, second)]
    assert len(found) == len(expected) == 3 + 6
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"sample": 1}, {"sample": 2}, {"depth": 2}], ids=str)
def test_a_loop_that_is_left_is_followed_by_the_next_epoch(axes, samples):
    mesh = hs.init(**axes, device="cpu")
    with hs.Loader(opened(samples), mesh, batch_size=4) as loader:
        for _ in loader:
            break
        assert loader.state_dict()["sample"] == 4
        second = [whole(vector)[:, 0] for _, _, vector, _ in loader]
    order = schedule_of(batch_size=4).order(1)
    np.testing.assert_array_equal(np.concatenate(second), order)


def test_a_state_loaded_after_a_loop_was_left_goes_on_within_its_epoch(cubes):
    with hs.Loader(hs.open(cubes, axes="NCDHW"), batch_size=2) as loader:
        next(iter(loader.numpy()))
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert len([*loader.numpy()]) == 3
        assert loader.epoch == 1


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"sample": 4}], ids=str)
def test_a_batch_may_have_fewer_samples_than_there_are_ranks(axes, samples):
    mesh = hs.init(**axes, device="cpu")
    with hs.Loader(opened(samples), mesh, batch_size=3) as loader:
        batches = schedule_of(batch_size=3).batches(Position(0, 0))
        for slabs in itertools.chain(loader, loader):
            check_batch(next(batches), slabs)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"sample": 1}, {"depth": 2}], ids=str)
def test_short_batches_may_be_dropped_and_no_batch_made_ahead(axes, samples):
    mesh = hs.init(**axes, device="cpu")
    loader = hs.Loader(
        opened(samples), mesh, batch_size=4, drop_last=True, prefetch=0, preload=True
    )
    with loader:
        assert len(loader) == 2 == len(list(loader))
        assert loader.epoch == 1


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("axes", [{"sample": 2}, {"depth": 2}, {"sample": 1}], ids=str)
def test_ranks_of_a_node_copy_what_they_read_to_its_disk(axes, store, samples, tmp_path):
    mesh = hs.init(**axes, device="cpu")
    for _ in range(2):
        loader = hs.Loader(opened(samples), mesh, batch_size=4, store=store, stage_dir=tmp_path)
        batches = schedule_of(batch_size=4).batches(Position(0, 0))
        with loader:
            for slabs in itertools.chain(loader, loader):
                check_batch(next(batches), slabs)


def test_a_loaded_state_brings_its_seed_to_augmentation_too(cubes):
    data = hs.open(cubes, axes="NCDHW")

    def cubes_of(loader):
        return [x.copy() for x in loader.numpy()]

    with hs.Loader(data, batch_size=2, seed=1, augment="cube") as first:
        state, expected = first.state_dict(), cubes_of(first)
    with hs.Loader(data, batch_size=2, seed=2, augment="cube") as second:
        cubes_of(second)
        second.load_state_dict(state)
        for ours, theirs in zip(cubes_of(second), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.ranks(2)
def test_a_folder_that_one_rank_lacks_stops_all(samples, tmp_path):
    mesh = hs.init(sample=2, device="cpu")
    folder = tmp_path if mesh.rank else tmp_path / "missing"
    loader = hs.Loader(opened(samples), mesh, spill_dir=folder)
    with pytest.raises(hs.ConfigError, match=r"missing is not a directory \(rank 0\)"):
        next(iter(loader))


def test_a_loop_cannot_go_on_after_another_was_begun(samples):
    with hs.Loader(opened(samples), batch_size=4) as loader:
        first = iter(loader.numpy())
        next(first)
        next(iter(loader.numpy()))
        with pytest.raises(ConfigError, match="cannot go on: another was begun"):
            next(first)


def test_a_state_of_another_shuffle_is_refused():
    schedule = Schedule(num_samples=8, batch_size=4, shuffle="none")
    state = save_state(schedule, Position(0, 4))
    assert restore_state(schedule, state) == (schedule, Position(0, 4))
    with pytest.raises(ConfigError, match="saved with shuffle='none', but the loader has 'global'"):
        restore_state(Schedule(num_samples=8, batch_size=4), state)
