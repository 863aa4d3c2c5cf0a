"""Functions that rearrange dims and join tensors, on every mesh."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

examples = settings(max_examples=12, deadline=None)
X5, X4 = (3, 4, 11, 9, 10), (3, 4, 9, 10)

CASES = {
    "flatten": lambda x: x.flatten(),
    "flatten but samples": lambda x: torch.flatten(x, 1),
    "flatten volumes": lambda x: torch.flatten(input=x, start_dim=2),
    "flatten some": lambda x: x.flatten(start_dim=-4, end_dim=2),
    "flatten module": nn.Flatten(),
    "view": lambda x: x.view(3, -1),
    "view of a tuple": lambda x: x.view((3, 4, 99, 10)),
    "view of numpy's integers": lambda x: x.view(np.int64(3), -1).squeeze(np.int64(1)),
    "view of a size": lambda x: x.view(torch.Size([12, 11, 90])),
    "view by name": lambda x: x.view(size=(3, 4, -1)),
    "view that splits a dim": lambda x: x.view(3, 4, 11, 9, 5, 2),
    "view that splits channels": lambda x: x.view(3, 2, 2, *X5[2:]),
    "view with ones": lambda x: x.view(1, 3, 4, 1, 11, 9, 10, 1),
    "view there and back": lambda x: x.view(3, 44, 90).view(X5),
    "reshape": lambda x: x.reshape(12, 11, 9, 10),
    "reshape across dims": lambda x: torch.reshape(x, (9, 4, 10, 33)),
    "reshape by name": lambda x: torch.reshape(input=x, shape=(3, -1)),
    "unsqueeze": lambda x: x.unsqueeze(0) + torch.unsqueeze(x, dim=-6),
    "unsqueeze in the middle": lambda x: x.unsqueeze(axis=2).flatten(2),
    "squeeze": lambda x: x.mean(2, keepdim=True).squeeze(),
    "squeeze a dim": lambda x: x.mean(2, keepdim=True).squeeze(2) + x.sum(2).squeeze(1),
    "squeeze dims": lambda x: torch.squeeze(x.mean((2, 4), keepdim=True), (2, 3, -1)),
    "squeeze to a number": lambda x: x.sum((0, 1, 2, 3, 4), keepdim=True).squeeze(),
    "permute": lambda x: x.permute(0, 2, 3, 4, 1),
    "permute a list": lambda x: torch.permute(x, [4, -4, 0, 2, 3]),
    "permute by name": lambda x: x.permute(dims=(4, 3, 2, 1, 0)),
    "permute and flatten": lambda x: x.permute(0, 2, 3, 4, 1).flatten(1, 3),
    "permute and view": lambda x: x.permute(2, 0, 1, 3, 4).reshape(33, -1),
    "transpose": lambda x: x.transpose(1, 2) + torch.transpose(x, dim0=-4, dim1=-3),
    "swap": lambda x: x.swapaxes(axis0=1, axis1=2) + x.swapdims(1, 2),
    "convolved after a permutation": lambda x: F.max_pool3d(x.transpose(3, 4), 3, 2, 1),
    "cat channels": lambda x: torch.cat([x, x * 2, x.mean(1, keepdim=True)], 1),
    "cat depth": lambda x: torch.cat((x, x * 2), dim=2),
    "cat samples": lambda x: torch.concat([x, x * 2, x * 3], axis=0),
    "cat width": lambda x: torch.cat(tensors=[x, x.mean(4, keepdim=True)], dim=-1),
    "cat dtypes": lambda x: torch.cat([x, (x > 0).float()], 1),
    "cat of one": lambda x: torch.cat([x], 2),
    "cat of nothing more": lambda x: torch.cat([x, torch.zeros(0), x], 1),
}


def check_case(place, name):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    assert_same_as_serial(CASES[name], [seeded(*X5)], mesh=mesh, cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_rearrangement_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


class Reshape(NamedTuple):
    before: tuple[int, ...]
    after: tuple[int, ...]

    def __call__(self, x):
        return x.view(self.after)


@st.composite
def reshapes(draw):
    """Two shapes of as many elements: one factor after the other goes to some dim of each."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=6))
    shapes = []
    for limit in (5, 6):
        num_dims = draw(st.integers(1, limit))
        places = sorted(draw(st.integers(0, num_dims - 1)) for _ in factors)
        dims = [
            math.prod(f for f, place in zip(factors, places, strict=True) if place == dim)
            for dim in range(num_dims)
        ]
        shapes.append(tuple(dims))
    return Reshape(*shapes)


def check_reshape(place, reshape):
    cuts = place.cuts_of(len(reshape.before))
    assert_same_as_serial(reshape, [seeded(*reshape.before)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), reshapes())
def test_any_view_equals_that_of_one_process(run, data, reshape):
    run(data.draw(places(reshape.before)), check_reshape, reshape)


class Cat(NamedTuple):
    dim: int
    shapes: tuple[tuple[int, ...], ...]
    cuts: tuple[dict | None, ...]  # None for plain tensors

    def __call__(self, *given):
        split = iter(given[: sum(cuts is not None for cuts in self.cuts)])
        plain = iter(given[sum(cuts is not None for cuts in self.cuts) :])
        parts = [next(plain if cuts is None else split) for cuts in self.cuts]
        return torch.cat(parts, self.dim)


@st.composite
def cats(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=2, max_size=5)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    place = draw(places(shape))
    shapes, cuts = [shape], [place.cuts]
    for _ in range(draw(st.integers(0, 2))):
        other = list(shape)
        other[dim] = draw(st.integers(0, 5))
        shapes.append(tuple(other))
        cuts.append(draw(st.none() | cuts_for(other, place.axes)))
    order = draw(st.permutations(range(len(shapes))))
    return place, Cat(dim, tuple(shapes[i] for i in order), tuple(cuts[i] for i in order))


def check_cat(place, cat):
    tensors = [seeded(*shape, seed=n) for n, shape in enumerate(cat.shapes)]
    pairs = list(zip(tensors, cat.cuts, strict=True))
    assert_same_as_serial(
        cat,
        [t for t, cuts in pairs if cuts is not None],
        [t for t, cuts in pairs if cuts is None],
        mesh=place.mesh(),
        cuts=[cuts for cuts in cat.cuts if cuts is not None],
    )


@examples
@given(cats())
def test_any_tensors_that_fit_are_joined(run, drawn):
    run(drawn[0], check_cat, drawn[1])


@st.composite
def permutations(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    return shape, draw(st.permutations(range(len(shape))))


def check_permutation(place, shape, order):
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(
        lambda x: x.permute(*order).contiguous(), [seeded(*shape)], mesh=place.mesh(), cuts=cuts
    )


@examples
@given(st.data(), permutations())
def test_any_permutation_equals_that_of_one_process(run, data, drawn):
    run(data.draw(places(drawn[0])), check_permutation, *drawn)


def check_split_stays(place):
    """What stays split where nothing has to move."""
    mesh = place.mesh()
    x = hs.shard(seeded(4, 2, 6, 4, 5), mesh)
    assert x.flatten(2).layout.split_dims == (0, 2)
    assert x.flatten(1).layout.split_dims == (0,)
    assert x.view(4, 2, 2, 3, 4, 5).layout.split_dims == (0, 2)
    assert x.permute(2, 0, 1, 3, 4).layout.split_dims == (0, 1)
    assert torch.cat([x.mean(2, keepdim=True), x], 2).layout.split_dims == (0, 2)
    assert torch.cat([hs.gather(x), x], 1).layout == torch.cat([x, x], 1).layout


def test_dims_stay_split_where_they_can(run):
    run(Place({"sample": 2, "depth": 2}), check_split_stays)


REFUSED = {
    "other number of elements": (
        lambda x: x.view(3, 5),
        hs.LayoutError,
        r"shape \(3, 5\) does not hold the 11880 elements of the tensor",
    ),
    "two unknowns": (lambda x: x.view(-1, -1), hs.LayoutError, "does not hold the 11880 elements"),
    "as another dtype": (
        lambda x: x.view(torch.int64),
        hs.UnsupportedOp,
        "torch.Tensor.view cannot run on a tensor of 3x4x11x9x10, dim 2 split over depth=3",
    ),
    "no such dim": (
        lambda x: x.unsqueeze(7),
        IndexError,
        "dim 7 is out of range for a tensor of 6 dims",
    ),
    "backwards": (lambda x: x.flatten(3, 1), hs.LayoutError, "flatten from dim 3 to 1 of 5 dims"),
    "cat of other shapes": (
        lambda x: torch.cat([x, x.mean(2, keepdim=True)], 1),
        hs.LayoutError,
        r"cat along dim 1 of tensors that differ elsewhere: \[\(3, 4, 11, 9, 10\), \(3, 4, 1, 9",
    ),
    "cat into a tensor": (
        lambda x: torch.cat([x, x], 1, out=torch.empty(1)),
        hs.UnsupportedOp,
        "torch.cat .* out= is not supported",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
