"""Pools to a given output size on every mesh: values, indices and gradients."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)

CASES = {
    "average to a few": (lambda x: F.adaptive_avg_pool3d(x, (4, 3, 7)), X5),
    "average to one": (lambda x: F.adaptive_avg_pool3d(x, 1), X5),
    "average to one along some dims": (lambda x: F.adaptive_avg_pool3d(x, (1, 4, 1)), X5),
    "average to as many": (lambda x: F.adaptive_avg_pool3d(x, (None, 5, None)), X5),
    "average to more": (lambda x: F.adaptive_avg_pool2d(x, (20, 13)), X4),
    "average 1-d": (lambda x: F.adaptive_avg_pool1d(x, 4), X3),
    "average module": (nn.AdaptiveAvgPool2d(7), X4),
    "average of one sample": (lambda x: F.adaptive_avg_pool3d(x.mean(0), 4), X5),
    "max to a few": (lambda x: F.adaptive_max_pool3d(x, (4, 3, 7)), X5),
    "max to one": (lambda x: F.adaptive_max_pool3d(x, 1), X5),
    "max to one along some dims": (lambda x: F.adaptive_max_pool3d(x, (1, 4, 1)), X5),
    "max to more": (lambda x: F.adaptive_max_pool2d(x, (None, 13)), X4),
    "max 1-d": (lambda x: F.adaptive_max_pool1d(x, 4), X3),
    "max module": (nn.AdaptiveMaxPool2d((5, None)), X4),
    "max of one sample": (lambda x: F.adaptive_max_pool2d(x.mean(0), (1, 4)), X4),
    "gate": (lambda x: x * F.adaptive_max_pool3d(x, 1) + F.adaptive_avg_pool3d(x, 1), X5),
    "pyramid": (lambda x: F.adaptive_avg_pool2d(F.adaptive_max_pool2d(x, 6), (4, 5)), X4),
    "of channels that are split": (lambda x: F.adaptive_max_pool2d(x.transpose(1, 2), 3), X4),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_an_adaptive_pool_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


class Pool(NamedTuple):
    """An adaptive pool as hypothesis draws it."""

    kind: str
    shape: tuple[int, ...]
    size: tuple[int | None, ...]

    def __call__(self, x, **options):
        return getattr(F, f"adaptive_{self.kind}_pool{len(self.size)}d")(x, self.size, **options)


@st.composite
def pools(draw):
    num_dims = draw(st.integers(1, 3))
    extents = draw(st.tuples(*[st.integers(1, 9)] * num_dims))
    size = draw(st.tuples(*[st.none() | st.just(1) | st.integers(1, 12)] * num_dims))
    if num_dims == 1:
        size = (size[0] or extents[0],)
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 2)), *extents)
    return Pool(draw(st.sampled_from(["avg", "max"])), shape, size)


def check_pool(place, pool):
    x = seeded(*pool.shape)
    assert_same_as_serial(pool, [x], mesh=place.mesh(), cuts=place.cuts_of(x.ndim))
    if pool.kind == "max":
        for numbers in (x, x.round(), x.masked_fill(x > 0.8, float("nan")), x.log()):
            check_indices(place, pool, numbers)


def check_indices(place, pool, x):
    whole, expected = pool(x, return_indices=True)
    found = pool(hs.shard(x, place.mesh(), cuts=place.cuts_of(x.ndim)), return_indices=True)
    out, indices = map(hs.gather, found)
    torch.testing.assert_close(out, whole, equal_nan=True)
    torch.testing.assert_close(indices, expected, rtol=0, atol=0)


@examples
@given(st.data(), pools())
def test_any_adaptive_pool_equals_that_of_one_process(run, data, pool):
    run(data.draw(places(pool.shape)), check_pool, pool)


def check_short(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x = seeded(*X5).bfloat16()
    for pool in (F.adaptive_avg_pool3d, F.adaptive_max_pool3d):
        for size in (1, (4, 3, 7)):
            out = pool(hs.shard(x, mesh, cuts=cuts), size)
            assert out.dtype == torch.bfloat16
            exact = pool(x.float(), size)  # torch's sums of bfloat16 are themselves rounded
            torch.testing.assert_close(hs.gather(out).float(), exact, rtol=2**-6, atol=2e-2)
            with torch.autocast("cpu", torch.bfloat16):
                out, expected = pool(hs.shard(x, mesh, cuts=cuts), size), pool(x, size)
            assert out.dtype == expected.dtype


def test_short_dtypes_and_autocast_are_those_of_one_process(run, place):
    run(place, check_short)


def check_infinite(place):
    x = seeded(*X4)
    x[0, 0, 5, 5] = float("inf")
    out = F.adaptive_avg_pool2d(hs.shard(x, place.mesh()), (4, 3))
    torch.testing.assert_close(hs.gather(out), F.adaptive_avg_pool2d(x, (4, 3)))


def test_infinity_reaches_only_the_windows_that_hold_it(run):
    run(Place({"height": 2, "width": 2}), check_infinite)


REFUSED = {
    "no outputs": (lambda x: F.adaptive_max_pool3d(x, 0), "no pool of torch.float64 to "),
    "integers": (lambda x: F.adaptive_avg_pool3d(x.long(), 2), "no pool of torch.int64 to "),
    "two sizes": (lambda x: F.adaptive_avg_pool3d(x, (2, 2)), r"its output size is \(2, 2\)"),
}


def check_refused(place, name):
    function, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(hs.UnsupportedOp, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
