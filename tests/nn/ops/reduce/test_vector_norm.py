"""Norms over any dims, on every mesh."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)
ORDERS = [0, 0.5, 1, 2, 3, -1, math.inf, -math.inf]

CASES = {
    "of all": lambda x: x.norm() + torch.norm(x, p=1) + torch.linalg.norm(x),
    "along dims": lambda x: x.norm(dim=2) + torch.norm(x, 2, [0, 2], True).sum((0, 2)),
    "of vectors": lambda x: torch.linalg.vector_norm(x, 3, dim=2) + torch.linalg.norm(x, 1, 2),
    "of matrices": lambda x: torch.linalg.matrix_norm(x, dim=(2, 1)) + x.norm("fro", dim=(1, 2)),
    "of rows": lambda x: torch.linalg.matrix_norm(x, math.inf, (2, 4), keepdim=True),
    "of columns": lambda x: torch.linalg.norm(x, -1, (2, 4)) + torch.linalg.norm(x, 1, (4, 2)),
    "distances": lambda x: torch.dist(x, x.mean(2, keepdim=True), 3) + x.dist(x * 2),
    "normalized": lambda x: F.normalize(x) + F.normalize(x, 1, 2) + F.normalize(x, dim=(0, 4)),
    "of zeros": lambda x: (x * 0).norm(dim=2) + F.normalize(x * 0, dim=2).sum(2) + x.relu().norm(3),
}


def check_cases(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name, function in CASES.items():
        try:
            assert_same_as_serial(function, [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


def test_a_norm_equals_that_of_one_process(run, place):
    run(place, check_cases)


def check_order(place, shape, order, dim):
    def norm(x):
        return torch.linalg.vector_norm(x.relu() - 0.1 * x.sign().relu(), order, dim)

    cuts = place.cuts_of(len(shape))
    grads = order != 0  # torch gives no gradient of a count
    mesh = place.mesh()
    assert_same_as_serial(norm, [seeded(*shape)], mesh=mesh, cuts=cuts, input_grads=grads)


@examples
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(ORDERS))
def test_a_norm_of_any_order_equals_that_of_one_process(run, data, shape, order):
    dim = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    run(data.draw(places(shape)), check_order, tuple(shape), order, dim)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    ones = torch.ones(X5, dtype=torch.bfloat16)
    slab = hs.shard(ones, mesh, cuts=cuts)
    for order in ORDERS:
        ours, expected = slab.norm(order, 2), ones.float().norm(order, 2).bfloat16()
        assert torch.equal(hs.gather(ours), expected)
    assert slab.norm(dtype=torch.float64).dtype == torch.float64
    whole = torch.complex(seeded(*X5), seeded(*X5, seed=1))
    slab = hs.shard(whole, mesh, cuts=cuts)
    torch.testing.assert_close(hs.gather(slab.norm(dim=2)), whole.norm(dim=2))


def test_short_and_complex_numbers_have_the_norms_of_one_process(run, place):
    run(place, check_dtypes)


REFUSED = {
    "singular values": (
        lambda x: torch.linalg.matrix_norm(x, 2, (1, 2)),
        hs.UnsupportedOp,
        "ord=2 wants both dims whole",
    ),
    "nuclear": (lambda x: x.norm("nuc", (1, 2)), hs.UnsupportedOp, "p='nuc' is not supported"),
    "integers": (lambda x: torch.linalg.vector_norm(x.int(), 2, 2), RuntimeError, "floating"),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)
