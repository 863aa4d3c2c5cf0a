"""Max and average pools on every mesh: values and gradients."""

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
    "max 2": (lambda x: F.max_pool3d(x, 2), X5),
    "max, overlapping": (lambda x: F.max_pool3d(x, 3, 1, 1), X5),
    "max, dilated and rounded up": (
        lambda x: F.max_pool3d(x, 3, 2, 1, dilation=(1, 2, 1), ceil_mode=True),
        X5,
    ),
    "max, windows with gaps": (lambda x: F.max_pool3d(x, (1, 2, 2), (3, 4, 3)), X5),
    "max by torch": (lambda x: torch.max_pool3d(x, [2], []), X5),
    "max 2-d": (lambda x: F.max_pool2d(x, kernel_size=(3, 2), stride=None, padding=(1, 0)), X4),
    "max 1-d": (lambda x: F.max_pool1d(x, 4, 3, 2), X3),
    "max of all": (lambda x: F.max_pool3d(x, (11, 9, 10)), X5),
    "max beyond all": (lambda x: F.max_pool3d(x, 12, ceil_mode=True), X5),
    "max module": (nn.MaxPool3d(3, 2, 1, ceil_mode=True), X5),
    "average 2": (lambda x: F.avg_pool3d(x, 2), X5),
    "average, overlapping": (lambda x: F.avg_pool3d(x, 3, 2, 1), X5),
    "average of what is inside": (
        lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        X5,
    ),
    "average, rounded up": (
        lambda x: F.avg_pool3d(x, (3, 4, 2), (2, 3, 4), (1, 2, 1), True),
        X5,
    ),
    "average with a divisor": (lambda x: F.avg_pool3d(x, 3, 1, 1, divisor_override=5), X5),
    "average with a negative divisor": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False, -2),
        X4,
    ),
    "average 2-d": (lambda x: F.avg_pool2d(x, [3, 2], [2, 1], [0, 1]), X4),
    "average 1-d": (lambda x: F.avg_pool1d(x, (4,), 3, 2, count_include_pad=False), X3),
    "average module": (nn.AvgPool3d(2, padding=1, count_include_pad=False), X5),
    "power average": (lambda x: F.lp_pool3d(x, 2, 3, 2), X5),
    "power average, rounded up": (
        lambda x: F.lp_pool3d(x.abs(), 3.0, (2, 3, 2), ceil_mode=True),
        X5,
    ),
    "power average of zeros": (lambda x: F.lp_pool2d(x.relu(), 2.0, 2, stride=1), X4),
    "power average 1-d": (lambda x: F.lp_pool1d(x, 2, 3), X3),
    "power average module": (nn.LPPool3d(2, 2), X5),
    "max of one sample": (lambda x: F.max_pool3d(x.mean(0), 3, 2, 1), X5),
    "average of one sample": (lambda x: F.avg_pool3d(x.mean(0), 3, 2, 1), X5),
    "of channels that are split": (
        lambda x: F.max_pool2d(x.transpose(1, 2), 3, 2, 1) + F.avg_pool2d(x.transpose(1, 2), 2, 2),
        X4,
    ),
    "both": (lambda x: F.max_pool3d(x, 3, 1, 1) * F.avg_pool3d(x, 3, 1, 1), X5),
}


def check_infinite_powers(place):
    x, mesh = seeded(*X4).clamp(max=0.9), place.mesh()
    for power in (torch.inf, -torch.inf):
        expected = F.lp_pool2d(x, power, 2)  # which depends on the version of torch
        out = hs.gather(F.lp_pool2d(hs.shard(x, mesh), power, 2))
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_infinite_powers_are_what_torch_takes_them_for(run):
    run(Place({"height": 2, "width": 2}), check_infinite_powers)


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_pool_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


def check_no_window_begins_at_the_end(place):
    def pool(x):
        return F.avg_pool2d(x, 2, 3, ceil_mode=True)

    assert_same_as_serial(pool, [seeded(2, 1, 6, 6)], mesh=place.mesh())


def test_no_window_begins_at_the_end_in_ceil_mode(run):
    run(Place({"height": 2}), check_no_window_begins_at_the_end)


class Pool(NamedTuple):
    """A pool as hypothesis draws it."""

    kind: str
    shape: tuple[int, ...]
    options: dict

    def __call__(self, x):
        return getattr(F, f"{self.kind}_pool{len(self.shape) - 2}d")(x, **self.options)


@st.composite
def pools(draw):
    kind = draw(st.sampled_from(["max", "avg"]))
    num_dims = draw(st.integers(1, 3))
    extents, kernel, dilation, padding = [], [], [], []
    for _ in range(num_dims):
        k = draw(st.integers(1, 4))
        d = draw(st.integers(1, 3)) if kind == "max" else 1
        pad = draw(st.integers(0, k // 2))
        least = d * (k - 1) + 1 - (2 * pad if kind == "max" or num_dims < 3 else 0)
        # torch writes out of bounds where a window with gaps sees nothing but padding.
        extents.append(draw(st.integers(max(1, d, least), 10)))
        kernel.append(k), dilation.append(d), padding.append(pad)
    options = {
        "kernel_size": tuple(kernel),
        "stride": draw(st.none() | st.tuples(*[st.integers(1, 4)] * num_dims)),
        "padding": tuple(padding),
        "ceil_mode": draw(st.booleans()),
    }
    if kind == "max":
        options["dilation"] = tuple(dilation)
    else:
        options["count_include_pad"] = draw(st.booleans())
        if num_dims > 1:
            options["divisor_override"] = draw(st.none() | st.integers(1, 7))
    return Pool(kind, (draw(st.integers(0, 3)), draw(st.integers(1, 2)), *extents), options)


def check_pool(place, pool, channels_last):
    x = seeded(*pool.shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if channels_last and x.ndim in formats:
        x = x.to(memory_format=formats[x.ndim])
    assert_same_as_serial(pool, [x], mesh=place.mesh(), cuts=place.cuts_of(x.ndim))


@examples
@given(st.data(), pools(), st.booleans())
def test_any_pool_equals_that_of_one_process(run, data, pool, channels_last):
    run(data.draw(places(pool.shape)), check_pool, pool, channels_last)


def check_indices(place, pool, x):
    """Both outputs of a pool that gives indices."""
    whole, expected = pool(x)
    out, indices = pool(hs.shard(x, place.mesh(), cuts=place.cuts_of(x.ndim)))
    assert out.layout == indices.layout
    assert indices.dtype == expected.dtype
    torch.testing.assert_close(hs.gather(out), whole, equal_nan=True)
    torch.testing.assert_close(hs.gather(indices), expected, rtol=0, atol=0)


INDEXED = {
    "3-d": (lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), X5),
    "3-d, dilated": (lambda x: F.max_pool3d_with_indices(x, 3, 1, 1, 2, True), X5),
    "2-d": (lambda x: F.max_pool2d(x, 2, None, 0, 1, True, True), X4),
    "1-d": (lambda x: F.max_pool1d(x, 3, return_indices=True), X3),
    "1-d by torch": (lambda x: torch.max_pool1d_with_indices(x, 3, 1, 1), X3),
    "2-d module": (nn.MaxPool2d((3, 2), (1, 2), (1, 0), return_indices=True), X4),
    "one sample": (lambda x: F.max_pool2d(x.sum(0), 3, 2, 1, return_indices=True), X4),
}


def numbers(shape, kind):
    """Random numbers, or many equal ones, with NaNs, or such that padding is no lower."""
    x = seeded(*shape)
    if kind == "ties":
        return (x * 1.5).round()
    if kind == "nan":
        return x.masked_fill(x > 1.2, float("nan"))
    return x.masked_fill(x > -1.0, -float("inf")) if kind == "lowest" else x


def check_indices_case(place, name):
    function, shape = INDEXED[name]
    for kind in ("any", "ties", "nan", "lowest"):
        check_indices(place, function, numbers(shape, kind))


INDEXED_ON = [{"depth": 2}, {"height": 4}, {"depth": 2, "height": 2, "width": 2}, {"sample": 2}]


@pytest.mark.parametrize("axes", INDEXED_ON, ids=str)
@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_those_in_the_global_tensor(run, name, axes):
    run(Place(axes), check_indices_case, name)


def check_lowest(place):
    x = numbers(X5, "lowest")
    mesh, cuts = place.mesh(), place.cuts_of(5)
    assert_same_as_serial(lambda x: F.max_pool3d(x, 3, 2, 1), [x], mesh=mesh, cuts=cuts)


def test_no_gradient_goes_to_the_padding(run, place):
    run(place, check_lowest)


def check_ties(place):
    x = (seeded(*X5) * 1.5).round()  # many equal numbers: the first of a window gets the gradient
    mesh, cuts = place.mesh(), place.cuts_of(5)
    assert_same_as_serial(lambda x: F.max_pool3d(x, 3, 2, 1), [x], mesh=mesh, cuts=cuts)


def test_the_first_of_equal_numbers_is_the_largest(run, place):
    run(place, check_ties)


def check_integers(place):
    x = (seeded(*X5) * 100).long()
    mesh, cuts = place.mesh(), place.cuts_of(5)
    assert_same_as_serial(lambda x: F.max_pool3d(x - 1000, 3, 2, 1), [x], mesh=mesh, cuts=cuts)


def test_integers_have_a_largest_too(run, place):
    run(place, check_integers)


def check_autocast(place):
    mesh = place.mesh()
    x = hs.shard(seeded(*X5).bfloat16(), mesh, cuts=place.cuts_of(5))
    even = hs.shard(seeded(*X5).bfloat16(), mesh, cuts=None)
    with torch.autocast("cpu", torch.bfloat16):
        for pool in (F.max_pool3d, F.avg_pool3d):
            serial = pool(seeded(*X5).bfloat16(), 3, 1, 1)
            out = pool(x, 3, 1, 1)
            assert out.dtype == serial.dtype  # on ranks that hold nothing, too
            assert hs.gather(even + out).dtype == serial.dtype


def test_autocast_makes_one_dtype_on_all_ranks(run, place):
    run(place, check_autocast)


REFUSED = {
    "kernel larger than the input": (
        lambda x: F.max_pool3d(x, 12),
        hs.LayoutError,
        "does not fit",
    ),
    "wide padding": (
        lambda x: F.avg_pool3d(x, 3, padding=2),
        hs.LayoutError,
        r"pool padding must be at most half the kernel, got \(2, 2, 2\) for \(3, 3, 3\)",
    ),
    "no stride": (lambda x: F.max_pool3d(x, 2, 0), hs.LayoutError, "must be at least 1"),
    "one kernel too few": (
        lambda x: F.max_pool3d(x, (2, 2)),
        hs.LayoutError,
        "one for each of 3 dims",
    ),
    "nothing to divide by": (
        lambda x: F.avg_pool3d(x, 2, divisor_override=0),
        hs.LayoutError,
        "divisor_override must not be 0",
    ),
    "random windows": (
        lambda x: F.fractional_max_pool3d(x, 2, output_size=4),
        hs.UnsupportedOp,
        "fractional_max_pool3d cannot run on a tensor of 3x4x11x9x10, dim 2 split over depth=3",
    ),
    "too many dims": (
        lambda x: F.max_pool2d(x, 2),
        hs.UnsupportedOp,
        "it has 5 dims, and batched input has 4, a sample 3",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)
    whole = F.max_pool3d(seeded(*X5), 3)  # no rank is left with half an exchange
    torch.testing.assert_close(hs.gather(F.max_pool3d(x, 3)), whole)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)


def check_indices_of_one_rank(place):
    x = hs.shard(seeded(*X4), place.mesh())
    out, indices = F.max_pool2d(x, 2, return_indices=True)
    assert tuple(F.max_unpool2d(out, indices, 2).shape) == (3, 4, 8, 10)


def test_what_has_no_rule_runs_where_nothing_is_split(run):
    run(Place({}), check_indices_of_one_rank)
    run(Place({"depth": 2}), check_indices_of_one_rank)
