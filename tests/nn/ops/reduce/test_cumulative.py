"""Cumulative sums and products along any dim, on every mesh."""

import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import places

examples = settings(max_examples=12, deadline=None)

FUNCTIONS = {
    "sum": lambda x, dim: torch.cumsum(x, dim),
    "sum by method": lambda x, dim: x.cumsum(axis=dim),
    "sum in place": lambda x, dim: (x * 1).cumsum_(dim),
    "product": lambda x, dim: x.cumprod(dim),
    "product with zeros": lambda x, dim: torch.cumprod(x.relu(), dim=dim),
    "product in place": lambda x, dim: (x * 1).cumprod_(dim),
}


def check_any(place, name, shape, dim):
    cuts = place.cuts_of(len(shape))
    function = FUNCTIONS[name]
    assert_same_as_serial(
        lambda x: function(x, dim), [seeded(*shape)], mesh=place.mesh(), cuts=cuts
    )


@examples
@given(
    st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([*FUNCTIONS])
)
def test_what_cumulates_equals_that_of_one_process(run, data, shape, name):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    run(data.draw(places(shape)), check_any, name, tuple(shape), dim)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x = (seeded(3, 4, 11, 9, 10) * 3).round()
    for dtype in (torch.int16, torch.bool, torch.bfloat16):
        for options in ({}, {"dtype": torch.float64}):
            slab, whole = hs.shard(x.to(dtype), mesh, cuts=cuts), x.to(dtype)
            ours, expected = slab.cumsum(2, **options), whole.cumsum(2, **options)
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(hs.gather(ours), expected, rtol=0.02, atol=0.1)


def test_dtypes_are_those_of_one_process(run, place):
    run(place, check_dtypes)
