"""Statistics of a whole set, beside those of NumPy over all values at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.io import statistics
from hyperslab.io.statistics import with_statistics

WANTED = (0, 1.5, 25, 50, 77.7, 99, 100)
DTYPES = ["i1", "u1", "?", "i2", "u2", "f2", "i4", "u4", "f4", "i8", "u8", "f8"]


class Share:
    """One of several ranks, each a thread."""

    def __init__(self, rank, barrier, told):
        self.rank, self.num_ranks, self._barrier, self._told = rank, len(told), barrier, told

    def tell_all(self, value):
        self._told[self.rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told


def on_threads(num, work):
    barrier, told = threading.Barrier(num, timeout=60), [None] * num
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(work, [Share(rank, barrier, told) for rank in range(num)]))


def values_of(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "?":
        return rng.random(shape) < 0.3
    if np.dtype(dtype).kind == "f":
        return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def measured(folder, arrays, **options):
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    data = with_statistics(hs.open(folder / "*.npy", axes="CHW"), percentiles=WANTED, **options)
    return data.manifest.statistics


def check(found, values):
    """``found`` is of one channel, and so are ``values``."""
    exact = values.astype(np.float64)
    assert (found.count, found.minimum, found.maximum) == (exact.size, exact.min(), exact.max())
    np.testing.assert_allclose(found.mean, exact.mean(), rtol=1e-12, atol=1e-12 * exact.std())
    np.testing.assert_allclose(found.std, exact.std(), rtol=1e-12)
    expected = np.percentile(exact, WANTED)
    np.testing.assert_allclose([*found.percentiles.values()], expected, rtol=1e-14)
    assert sum(found.histogram) == exact.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_all_values_together(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "PIECE_NUMEL", 35)
    arrays = [values_of(dtype, (2, 5, 7), seed) for seed in range(3)]
    found = measured(tmp_path, arrays)
    assert (found.num_samples, len(found.channels)) == (3, 2)
    for channel, one in enumerate(found.channels):
        check(one, np.stack(arrays)[:, channel])


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
def test_percentiles_of_any_values_are_exact(tmp_path_factory, values):
    array = np.array(values, np.float32).reshape(1, 1, -1)
    (found,) = measured(tmp_path_factory.mktemp("x"), [array]).channels
    expected = np.percentile(array.astype(np.float64), WANTED)
    np.testing.assert_allclose([*found.percentiles.values()], expected, rtol=1e-14)


def test_bins_are_those_of_a_histogram(tmp_path):
    array = values_of("f4", (1, 30, 30))
    found = measured(tmp_path, [array]).channels[0]
    expected, _ = np.histogram(array.astype(np.float64), statistics.NUM_BINS)
    assert np.abs(np.array(found.histogram) - expected).sum() <= 2  # edges are rounded
    small = values_of("i2", (1, 30, 30))
    found = measured(tmp_path, [small]).channels[0]
    assert list(found.histogram) == np.histogram(small, statistics.NUM_BINS)[0].tolist()


@pytest.mark.parametrize("dtype", ["i2", "f4"])
def test_any_number_of_ranks_finds_the_same_to_the_last_bit(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "PIECE_NUMEL", 30)
    alone = measured(tmp_path, [values_of(dtype, (2, 5, 7), seed) for seed in range(5)])
    for num in (2, 5):
        assert on_threads(num, lambda rank: measured(tmp_path, [], mesh=rank)) == [alone] * num


def test_a_file_that_one_rank_cannot_read_stops_all(tmp_path):
    measured(tmp_path, [values_of("i2", (1, 2, 3)) for _ in range(4)])
    np.save(tmp_path / "2.npy", values_of("i2", (1, 2, 4)))

    def work(rank):
        with pytest.raises(hs.FormatError, match=r"sample 2.*2\.npy has int16 .* \(rank 0\)"):
            measured(tmp_path, [], mesh=rank)
        return True

    assert on_threads(2, work) == [True, True]


def test_what_is_not_finite_is_counted_apart(tmp_path):
    array = np.array([[[1.0, np.nan, 3.0, np.inf]], [[np.nan] * 4]], np.float32)
    first, second = measured(tmp_path, [array]).channels
    assert (first.count, first.not_finite, first.mean) == (2, 2, 2.0)
    assert (second.count, second.not_finite, second.mean, second.std) == (0, 4, None, None)
    assert second.percentiles == {}


def test_foreground_counts_alone_where_it_is_asked_for(tmp_path):
    image = values_of("i2", (2, 6, 6)) * (np.arange(6) > 2)
    label = (np.arange(36).reshape(6, 6) % 5 == 0).astype(np.uint8)
    (found, _) = measured(tmp_path, [image], foreground="nonzero").channels
    check(found, image[0][image[0] != 0])
    (tmp_path / "labels").mkdir()
    np.save(tmp_path / "labels" / "0.npy", label)
    labels = hs.open(tmp_path / "labels" / "0.npy", axes="HW")
    data = hs.open(tmp_path / "0.npy", axes="CHW").beside(label=labels)
    found = with_statistics(data, foreground="label", percentiles=WANTED).manifest.statistics
    check(found.channels[1], image[1][label > 0])
    with pytest.raises(
        hs.ConfigError, match=r"must be 'nonzero' or a label map .*: there are label"
    ):
        with_statistics(data, foreground="mask")


def test_statistics_go_with_the_manifest(tmp_path):
    np.save(tmp_path / "0.npy", values_of("f4", (2, 5, 7)))
    data = with_statistics(hs.open(tmp_path / "0.npy", axes="CHW"))
    data.save(tmp_path / "data.json")
    again = hs.open(tmp_path / "data.json")
    assert again.manifest.statistics == data.manifest.statistics
    assert again.tiled((5, 1)).take([0]).manifest.statistics == data.manifest.statistics


def test_values_without_an_order_are_refused(tmp_path):
    np.save(tmp_path / "0.npy", np.zeros((1, 2, 2), np.complex64))
    with pytest.raises(hs.ConfigError, match="values of complex64 have no order"):
        measured(tmp_path, [])
    np.save(tmp_path / "0.npy", np.zeros((1, 2, 2)))
    data = hs.open(tmp_path / "0.npy", axes="CHW")
    with pytest.raises(hs.ConfigError, match="percentiles must lie in 0 to 100"):
        with_statistics(data, percentiles=[101])
