import itertools
import os

import numpy as np
import pytest

import hyperslab as hs

SHAPE = (1, 8, 4)
NUM = 9
BAD = (2, 5)


@pytest.fixture
def damaged(tmp_path):
    """Nine files, of which number 2 has lost its last rows and number 5 all of it."""
    for index in range(NUM):
        np.save(tmp_path / f"{index}.npy", np.full(SHAPE, index, np.float32))
    os.truncate(tmp_path / "2.npy", 128 + 4 * 4 * 6)
    os.truncate(tmp_path / "5.npy", 0)
    return str(tmp_path / "*.npy")


def rows(slab):
    return hs.gather(slab)[:, 0, 0, 0].tolist()


AXES = [{"sample": 1}, {"sample": 3}, {"height": 2}, {"sample": 2, "height": 2}]


@pytest.mark.ranks
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_ranks_skip_the_same_samples(axes, store, damaged):
    mesh = hs.init(**axes, device="cpu")
    loader = hs.Loader(
        hs.open(damaged, axes="CHW"), mesh, batch_size=4, store=store, bad_samples="skip"
    )
    with loader:
        for _ in range(2):
            found = list(itertools.chain.from_iterable(map(rows, loader)))
            assert sorted(found) == [0, 1, 3, 4, 6, 7, 8]
        assert sorted(loader.skipped) == list(BAD)
        assert "2.npy" in loader.skipped[2]


@pytest.mark.ranks
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_all_ranks_stop_at_the_same_sample(axes, store, damaged):
    mesh = hs.init(**axes, device="cpu")
    with hs.Loader(
        hs.open(damaged, axes="CHW"), mesh, batch_size=2, store=store, shuffle="none"
    ) as loader:
        steps = iter(loader)
        assert rows(next(steps)) == [0, 1]
        with pytest.raises(hs.FormatError, match=r"sample 2, array .* .*2\.npy") as raised:
            next(steps)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("store", ["memory", "none"])
def test_a_batch_of_bad_samples_only_is_left_out(store, damaged):
    data = hs.open(damaged, axes="CHW").take([0, 2, 5, 1])
    loader = hs.Loader(data, batch_size=1, store=store, shuffle="none", bad_samples="skip")
    with loader:
        assert [int(x[0, 0, 0, 0]) for x in loader.numpy()] == [0, 1]
        assert sorted(loader.skipped) == [1, 2]


def fail_at(loader, index, rank):
    """Lets ``rank`` fail when it reads sample ``index``, for a reason that is not in the file."""
    data = loader._dataset
    read = data.read

    def failing(asked, *args, **kwargs):
        if asked == index and loader._placement.rank == rank:
            raise ValueError("a reader of the user's own")
        return read(asked, *args, **kwargs)

    data.read = failing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("bad_samples", ["stop", "skip"])
def test_all_ranks_stop_if_one_fails(bad_samples, store, num_nodes, tmp_path):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for index in range(4):
            np.save(tmp_path / f"{index}.npy", np.full(SHAPE, index, np.float32))
        mesh = hs.init(sample=2, device="cpu")
        monkeypatch.setenv("HYPERSLAB_NODE", f"node {mesh.rank % num_nodes}")
        data = hs.open(tmp_path / "*.npy", axes="CHW")
        settings = {"batch_size": 2, "shuffle": "none", "store": store, "bad_samples": bad_samples}
        with hs.Loader(data, mesh, **settings) as loader:
            fail_at(loader, 3, rank=1)
            for _ in range(2):  # nor is it forgotten when the loop is begun again
                steps = iter(loader)
                assert rows(next(steps)) == [0, 1]
                with pytest.raises((ValueError, hs.CommError)) as raised:
                    next(steps)
                assert "a reader of the user's own" in str(raised.value)
            assert mesh.rank or "(rank 1)" in str(raised.value)
            assert loader.skipped == {}


@pytest.mark.ranks(2)
def test_all_ranks_stop_if_one_fails_before_the_first_batch(tmp_path):
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", np.full(SHAPE, index, np.float32))
    mesh = hs.init(sample=2, device="cpu")
    data = hs.open(tmp_path / "*.npy", axes="CHW")
    with hs.Loader(data, mesh, batch_size=2, shuffle="none", preload=True) as loader:
        fail_at(loader, 3, rank=1)
        with pytest.raises((ValueError, hs.CommError), match="a reader of the user's own"):
            next(iter(loader))
