"""Windows laid side by side, and images made of them, on every mesh."""

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
X5, X4 = (3, 4, 11, 9, 10), (3, 4, 9, 10)

CASES = {
    "depth": (lambda x: x.unfold(2, 3, 2), X5),
    "height": (lambda x: x.unfold(-2, 4, 1), X5),
    "two dims": (lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2).mean((-1, -2)), X5),
    "all of it": (lambda x: x.unfold(2, 11, 1), X5),
    "samples": (lambda x: x.unfold(dimension=0, size=2, step=1), X5),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", CASES)
def test_the_windows_of_a_dim_equal_those_of_one_process(run, place, name):
    run(place, check_case, name)


class Patches(NamedTuple):
    """Patches of images as hypothesis draws them."""

    shape: tuple[int, ...]
    options: dict

    def unfold(self, x):
        return F.unfold(x, **self.options)

    def fold(self, x):
        return F.fold(x, self.shape[2:], **self.options)


@st.composite
def patches(draw):
    def pair(low, high):
        return draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    kernel, dilation, padding = pair(1, 3), pair(1, 2), pair(0, 2)
    spare = pair(0, 5)
    extents = [
        max(1, d * (k - 1) + 1 - 2 * p) + more
        for k, d, p, more in zip(kernel, dilation, padding, spare, strict=True)
    ]
    options = {
        "kernel_size": kernel,
        "dilation": dilation,
        "padding": padding,
        "stride": pair(1, 3),
    }
    return Patches((draw(st.integers(1, 3)), draw(st.integers(1, 2)), *extents), options)


def check_unfold(place, patches):
    mesh, cuts = place.mesh(), place.cuts_of(4)
    assert_same_as_serial(patches.unfold, [seeded(*patches.shape)], mesh=mesh, cuts=cuts)


@examples
@given(st.data(), patches())
def test_patches_equal_those_of_one_process(run, data, patches):
    whole_rows = places(patches.shape).filter(lambda place: "width" not in place.axes)
    run(data.draw(whole_rows), check_unfold, patches)


def check_fold(place, patches):
    columns = patches.unfold(seeded(*patches.shape))
    mesh, cuts = place.mesh(), place.cuts_of(3)
    assert_same_as_serial(patches.fold, [seeded(*columns.shape)], mesh=mesh, cuts=cuts)


@examples
@given(st.data(), patches())
def test_images_made_of_patches_equal_those_of_one_process(run, data, patches):
    columns = patches.unfold(torch.zeros(patches.shape))
    run(data.draw(places(columns.shape)), check_fold, patches)


def check_both(place):
    options = {"kernel_size": 3, "padding": 1, "stride": 2}
    mesh, cuts = place.mesh(), place.cuts_of(4)
    unfold, fold = nn.Unfold(**options), nn.Fold((9, 10), **options)
    assert_same_as_serial(lambda x: fold(unfold(x).sin()), [seeded(*X4)], mesh=mesh, cuts=cuts)
    assert_same_as_serial(
        lambda x: fold(unfold(x.sum(0)).sin()), [seeded(*X4)], mesh=mesh, cuts=cuts
    )


@pytest.mark.parametrize(
    "axes", [{"height": 2}, {"height": 4}, {"sample": 2, "height": 2}], ids=str
)
def test_images_are_taken_apart_and_put_together(run, axes):
    run(Place(axes), check_both)


def check_one_row(place):
    x = seeded(2, 3, 2, 10)
    assert_same_as_serial(lambda x: F.unfold(x, 2, stride=(3, 1)), [x], mesh=place.mesh())


def test_one_row_of_patches_may_be_split(run):
    run(Place({"width": 3}), check_one_row)


REFUSED = {
    "split rows of patches": (
        lambda x: F.unfold(x, 2),
        hs.UnsupportedOp,
        "rows of patches are split",
    ),
    "long windows": (
        lambda x: x.unfold(3, 11, 1),
        hs.UnsupportedOp,
        "its windows of 11, every 1, do not fit dim 3",
    ),
    "no such dim": (lambda x: x.unfold(4, 1, 1), IndexError, "dim 4 is out of range"),
    "columns that make no image": (
        lambda x: F.fold(x.sum(0), (9, 8), 2),
        hs.LayoutError,
        "8x7 patches of 4 pixels make up an image of 9x8",
    ),
    "large patches": (lambda x: F.unfold(x, 12), hs.LayoutError, "does not fit"),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X4), place.mesh())
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"width": 2}), check_refused, name)
