"""Padding of every mode on every mesh, negative too."""

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
    "constant": (lambda x: F.pad(x, (1, 2, -1, 3, 2, -3), value=1.5), X5),
    "zeros": (lambda x: F.pad(input=x, pad=[1, 1]), X5),
    "all dims": (lambda x: F.pad(x, (1, 0, 0, 1, 2, 2, 1, 0, 0, 3), "constant", 7), X5),
    "reflect": (lambda x: F.pad(x, (1, 2, 3, 0, 2, 5), mode="reflect"), X5),
    "reflect as far as it goes": (lambda x: F.pad(x, (9, 9, 8, 8, 10, 10), "reflect"), X5),
    "replicate": (lambda x: F.pad(x, (1, 2, 3, 0, 2, 15), mode="replicate"), X5),
    "circular": (lambda x: F.pad(x, (1, 2, 3, 0, 2, 5), mode="circular"), X5),
    "once around": (lambda x: F.pad(x, (10, 10, 9, 9, 11, 11), mode="circular"), X5),
    "reflect and crop": (lambda x: F.pad(x, (2, -2, -3, 1, -4, 4), mode="reflect"), X5),
    "replicate and crop": (lambda x: F.pad(x, (2, -2, -3, 1, -4, 4), mode="replicate"), X5),
    "around and crop": (lambda x: F.pad(x, (2, -2, -3, 1, -4, 4), mode="circular"), X5),
    "around what is left": (lambda x: F.pad(x, (0, 0, 0, 0, 7, -4), mode="circular"), X5),
    "one sample": (lambda x: F.pad(x.sum(0), (1, 2, 3, 0, 2, 5), mode="reflect"), X5),
    "transposed": (lambda x: F.pad(x.transpose(1, 2), (1, 2, 0, 0, 1, 1, 2, -5)), X5),
    "crop": (lambda x: F.pad(x, (-2, -2, -1, 0, -3, -4)), X5),
    "2-d": (lambda x: F.pad(x, (1, 2, 3, 0), "reflect"), X4),
    "1-d": (lambda x: F.pad(x, (3, 4), "circular"), X3),
    "nothing": (lambda x: F.pad(x, (0, 0, 0, 0)), X5),
    "zero module": (nn.ZeroPad2d((1, 0, 2, 1)), X4),
    "constant module": (nn.ConstantPad3d(2, -1.0), X5),
    "reflecting module": (nn.ReflectionPad3d(2), X5),
    "replicating module": (nn.ReplicationPad3d((1, 0, 2, 1, 0, 3)), X5),
    "circular module": (nn.CircularPad2d((1, 0, 2, 1)), X4),
    "written into": (lambda x: F.pad(x, (0, 0)).mul_(2) + x, X5),
    "cropped and written into": (lambda x: F.pad(x, (-1, -1, 0, 0, -1, 0)).mul_(2).sum() + x, X5),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_padding_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


class Pad(NamedTuple):
    """Padding as hypothesis draws it."""

    shape: tuple[int, ...]
    ends: tuple[int, ...]
    mode: str

    def __call__(self, x):
        return F.pad(x, self.ends, self.mode, 2.5 if self.mode == "constant" else None)


@st.composite
def pads(draw):
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    num_dims = draw(st.integers(1, 3))
    extents = draw(st.tuples(*[st.integers(1, 6)] * num_dims))
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 2)), *extents)
    ends = []
    for n in reversed(shape if mode == "constant" and draw(st.booleans()) else extents):
        most = {"reflect": n - 1, "circular": n}.get(mode, 7)
        low, high = draw(
            st.lists(st.integers(-((n - 1) // 2), max(0, most)), min_size=2, max_size=2)
        )
        left = n + min(low, 0) + min(high, 0)
        ends += (min(low, left), min(high, left)) if mode == "circular" else (low, high)
    return Pad(shape, tuple(ends), mode)


def check_pad(place, pad):
    cuts = place.cuts_of(len(pad.shape))
    assert_same_as_serial(pad, [seeded(*pad.shape)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), pads())
def test_any_padding_equals_that_of_one_process(run, data, pad):
    run(data.draw(places(pad.shape)), check_pad, pad)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    ends = (1, 1, 2, 0, 3, 1)
    for x, value in ((seeded(*X5) > 0, True), ((seeded(*X5) * 9).int(), 7)):
        out = F.pad(hs.shard(x, mesh, cuts=cuts), ends, value=value)
        torch.testing.assert_close(hs.gather(out), F.pad(x, ends, value=value))


def test_masks_and_integers_are_padded(run, place):
    run(place, check_dtypes)


REFUSED = {
    "half a pair": (lambda x: F.pad(x, (1,)), hs.LayoutError, r"a pair for each of the last dims"),
    "too far around": (
        lambda x: F.pad(x, (0, 0, 0, 0, 12, 0), "circular"),
        hs.LayoutError,
        r"circular padding of \(12, 0\) does not fit an extent of 11 \(dim 2\)",
    ),
    "too far back, whole dim": (
        lambda x: F.pad(x, (0, 10, 0, 0, 1, 1), "reflect"),
        hs.LayoutError,
        r"reflect padding of \(0, 10\) does not fit an extent of 10 \(dim 4\)",
    ),
    "more than there is": (
        lambda x: F.pad(x, (0, 0, 0, 0, -6, -6)),
        hs.LayoutError,
        r"constant padding of \(-6, -6\) does not fit an extent of 11",
    ),
    "an unknown mode": (
        lambda x: F.pad(x, (1, 1, 0, 0, 0, 0), "mirror"),
        hs.UnsupportedOp,
        "torch.nn.functional.pad .*there is no mode='mirror'",
    ),
    "around what is left": (
        lambda x: F.pad(x, (0, 0, 0, 0, -4, 8), "circular"),
        hs.LayoutError,
        r"circular padding of \(-4, 8\) does not fit an extent of 11",
    ),
    "too few dims": (
        lambda x: F.pad(x, (1, 1), "reflect"),
        hs.UnsupportedOp,
        "there is no reflect padding of 1 of 5 dims",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)
    expected = F.pad(seeded(*X5), (1,) * 6, "reflect")
    torch.testing.assert_close(hs.gather(F.pad(x, (1,) * 6, "reflect")), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
