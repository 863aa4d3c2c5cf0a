"""Softmaxes along any dim, on every mesh."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)

CASES = {
    "of channels": lambda x: F.softmax(x, dim=1) + x.log_softmax(1),
    "of a split dim": lambda x: torch.softmax(x, 2) + x.softmax(-1) + torch.special.softmax(x, 3),
    "logarithms": lambda x: torch.log_softmax(x, 2) + F.log_softmax(x, -1) * x.log_softmax(dim=0),
    "of the negative": lambda x: F.softmin(x, 2) + F.softmin(x, dim=1),
    "modules": lambda x: nn.Softmax2d()(x[:, :, 0]) + nn.LogSoftmax(2)(x[:, :, 0]),
    "large numbers": lambda x: (x * 1e3).softmax(2) + (x * 1e3).log_softmax(4),
    "masked": lambda x: x.masked_fill(x < 0.5, -torch.inf).softmax(2).nan_to_num(0),
    "sums of exponentials": lambda x: x.logsumexp(2) + (x * 99).logsumexp((0, 2), True)[:, :, 0],
    "sums of all exponentials": lambda x: torch.special.logsumexp(x, (0, 1, 2, 3, 4)),
}  # fmt: skip


def check_cases(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name, function in CASES.items():
        try:
            assert_same_as_serial(function, [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


def test_a_softmax_equals_that_of_one_process(run, place):
    run(place, check_cases)


def check_any(place, shape, dim, logarithm):
    function = torch.log_softmax if logarithm else torch.softmax
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(
        lambda x: function(x, dim), [seeded(*shape)], mesh=place.mesh(), cuts=cuts
    )


@examples
@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
def test_any_softmax_equals_that_of_one_process(run, data, shape, logarithm):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    run(data.draw(places(shape)), check_any, tuple(shape), dim, logarithm)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x = seeded(*X5)
    for whole, options in (
        (x.bfloat16(), {}), (x.half(), {}), (x.float(), {"dtype": torch.float64}),
        (x.int(), {"dtype": torch.float32}),
    ):  # fmt: skip
        slab = hs.shard(whole, mesh, cuts=cuts)
        for function in (torch.softmax, F.log_softmax):
            ours, expected = function(slab, 2, **options), function(whole, 2, **options)
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(hs.gather(ours), expected, rtol=0.01, atol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        slab = hs.shard(x.bfloat16(), mesh, cuts=cuts)
        assert slab.softmax(2).dtype == x.bfloat16().softmax(2).dtype
    whole = x.clone()
    whole[0, 0] = -torch.inf
    whole[1, 1, 3] = torch.inf
    whole[2, 2, 3] = torch.nan
    slab = hs.shard(whole, mesh, cuts=cuts)
    for function in (torch.softmax, torch.log_softmax, torch.logsumexp):
        ours, expected = hs.gather(function(slab, 2)), function(whole, 2)
        torch.testing.assert_close(ours, expected, equal_nan=True)


def test_short_and_special_numbers_are_treated_as_in_one_process(run, place):
    run(place, check_dtypes)


REFUSED = {
    "of integers": (lambda x: x.int().softmax(2), RuntimeError, "not implemented for"),
    "no such dim": (lambda x: x.softmax(5), IndexError, "dim 5 is out of range"),
    "sums over nothing": (lambda x: x.logsumexp(()), hs.LayoutError, "at least one dim"),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
