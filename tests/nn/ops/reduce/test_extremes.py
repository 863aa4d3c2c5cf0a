"""The largest and smallest elements and where they are: values, ties, gradients, on every mesh."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)

CASES = {
    "amax": lambda x: x.amax(2, True) + torch.amax(x, dim=(0, 3), keepdim=True),
    "amin": lambda x: x.amin([2, 4], True) + torch.amin(x, ()),
    "of all": lambda x: x.max() - torch.min(x) + x.amax(),
    "along a dim": lambda x: x.max(2).values * torch.min(x, -3)[0] + x.max(dim=0)[0].sum(1),
    "along a dim that stays": lambda x: torch.max(x, 2, keepdim=True)[0] + x.min(2, True).values,
    "by numpy's names": lambda x: x.max(axis=2, keepdims=True).values,
    "of two": lambda x: torch.max(x, x.mean(2, keepdim=True)) + x.min(other=x.square()),
    "both ends": lambda x: torch.aminmax(x).max - x.aminmax(dim=2, keepdim=True).min,
    "of what ties": lambda x: x.round().amax((2, 3)) + x.relu().min() + x.relu().amin(2).sum(2),
    "of what ties and has a gradient": lambda x: (x - x.detach() + x.detach().round()).amax((2, 3)),
    "first of what ties": lambda x: x.round().max(2).values + x.relu().min(2)[0],
}  # fmt: skip


def check_cases(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name, function in CASES.items():
        try:
            assert_same_as_serial(function, [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


def test_an_extreme_equals_that_of_one_process(run, place):
    run(place, check_cases)


INDICES = [
    lambda x: x.argmax(), lambda x: torch.argmin(x), lambda x: x.argmax(2),
    lambda x: torch.argmin(x, dim=-1, keepdim=True), lambda x: x.max(2).indices,
    lambda x: torch.min(x, 2, True)[1], lambda x: x.argmax(keepdim=True), lambda x: x.min(0)[1],
]  # fmt: skip
DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.int64, torch.uint8)


def check_indices(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    numbers = seeded(*X5)
    holey = numbers.masked_fill(numbers > 2, torch.nan)
    endless = numbers.masked_fill(numbers < 1.9, -torch.inf)
    ties = [(numbers * 2).round().to(dtype) for dtype in DTYPES]
    for whole in (numbers, holey, endless, *ties):
        slab = hs.shard(whole, mesh, cuts=cuts)
        for number, function in enumerate(INDICES):
            message = f"function {number} of {whole.dtype}"
            assert torch.equal(hs.gather(function(slab)), function(whole)), message
        for function in (lambda x: x.max(2), lambda x: torch.min(x, 4), lambda x: x.aminmax(dim=2)):
            ours, expected = function(slab), function(whole)
            assert type(ours) is type(expected)
            for mine, theirs in zip(ours, expected, strict=True):
                torch.testing.assert_close(hs.gather(mine), theirs, rtol=0, atol=0, equal_nan=True)
    truths = numbers > 1
    slab = hs.shard(truths, mesh, cuts=cuts)
    assert torch.equal(hs.gather(slab.max(2).values), truths.amax(2))
    assert torch.equal(hs.gather(slab.amin((0, 2))), truths.amin((0, 2)))


def test_the_first_of_equal_elements_is_found(run, place):
    run(place, check_indices)


class Extreme(NamedTuple):
    """An extreme along one dim as hypothesis draws it, of numbers many of which are equal."""

    shape: tuple[int, ...]
    dim: int
    name: str
    largest: bool
    keepdim: bool

    def __call__(self, x):
        x = (x * 2).round() / 2
        if self.name == "along":
            found = (x.max if self.largest else x.min)(self.dim, self.keepdim)
            return found.values + 0 * found.indices
        if self.name == "where":
            return (x.argmax if self.largest else x.argmin)(self.dim, self.keepdim)
        return (x.amax if self.largest else x.amin)(self.dim, self.keepdim)


@st.composite
def extremes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    name = draw(st.sampled_from(["along", "where", "over"]))
    return Extreme(shape, dim, name, draw(st.booleans()), draw(st.booleans()))


def check_extreme(place, extreme):
    cuts = place.cuts_of(len(extreme.shape))
    assert_same_as_serial(extreme, [seeded(*extreme.shape)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), extremes())
def test_any_extreme_equals_that_of_one_process(run, data, extreme):
    run(data.draw(places(extreme.shape)), check_extreme, extreme)


REFUSED = {
    "of nothing": (lambda x: x[:, :, :0].amax(2), IndexError, "non-zero size|amax of nothing"),
    "of complex numbers": (lambda x: torch.complex(x, x).amax(2), TypeError, "complex"),
    "the first truth": (lambda x: (x > 0).argmax(2), TypeError, "does not take bools"),
    "out": (
        lambda x: torch.amax(x, 2, out=torch.empty(1)),
        hs.UnsupportedOp,
        "torch.amax cannot run .* out= is not supported",
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
