import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

CASES = {
    "vectors": (lambda x, w, b: F.linear(x, w, b), (3, 4), ((5, 4), (5,))),
    "without bias": (lambda x, w: F.linear(x, w), (3, 4), ((5, 4),)),
    "after flatten": (
        lambda x, w, b: F.linear(x.flatten(1), w, b),
        (3, 4, 11, 9, 10),
        ((2, 4 * 11 * 9 * 10), (2,)),
    ),
    "along channels last": (
        lambda x, w, b: F.linear(x.permute(0, 2, 3, 4, 1), w, b),
        (3, 4, 11, 9, 10),
        ((6, 4), (6,)),
    ),
    "to one number": (lambda x, w: F.linear(x, w), (3, 4), ((4,),)),
}


def check(place, name):
    function, shape, weights = CASES[name]
    assert_same_as_serial(
        function,
        [seeded(*shape)],
        [seeded(*weight, seed=1) for weight in weights],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(shape)),
    )


@pytest.mark.parametrize("name", CASES)
def test_linear_equals_that_of_one_process(run, place, name):
    run(place, check, name)


def check_split_features(place):
    x = hs.shard(seeded(2, 3, 8), place.mesh())
    with pytest.raises(hs.UnsupportedOp, match="the dim that it multiplies is split"):
        F.linear(x, torch.zeros(5, 8, dtype=torch.float64))


def test_a_split_dim_is_not_multiplied(run):
    run(Place({"width": 2}), check_split_features)
