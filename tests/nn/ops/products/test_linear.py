"""Dense layers on every mesh: values, input gradients, weight gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X2 = (3, 4, 11, 9, 10), (3, 4)

CASES = {
    "vectors": (lambda x, w, b: F.linear(x, w, b), X2, [(5, 4), (5,)]),
    "by name": (lambda x, w: F.linear(input=x, weight=w, bias=None), X2, [(5, 4)]),
    "to numbers": (lambda x, w: F.linear(x, w), X2, [(4,)]),
    "flattened volumes": (
        lambda x, w, b: F.linear(x.flatten(1), w, b),
        X5,
        [(7, 4 * 11 * 9 * 10), (7,)],
    ),
    "channels last": (
        lambda x, w, b: F.linear(x.permute(0, 2, 3, 4, 1), w, b).permute(0, 4, 1, 2, 3),
        X5,
        [(5, 4), (5,)],
    ),
    "one channel, flattened": (
        lambda x, w, b: F.linear(x.mean(1, keepdim=True).flatten(1), w, b),
        X5,
        [(7, 11 * 9 * 10), (7,)],
    ),
    "along a spatial dim": (
        lambda x, w, b: F.linear(x.transpose(2, 4), w, b).transpose(2, 4),
        X5,
        [(5, 11), (5,)],
    ),
    "a spatial dim to numbers": (lambda x, w: F.linear(x, w), X5, [(10,)]),
    "a vector to a number": (lambda x, w: F.linear(x.mean((0, 1, 3, 4)), w), X5, [(11,)]),
    "pooled volumes": (
        lambda x, w, v: F.linear(F.relu(F.linear(x.mean((2, 3, 4)), w)), v),
        X5,
        [(6, 4), (2, 6)],
    ),
    "a gate": (
        lambda x, w: x * torch.sigmoid(F.linear(x.mean((2, 3, 4)), w)).view(3, 4, 1, 1, 1),
        X5,
        [(4, 4)],
    ),
    "filters split as the samples": (
        lambda x: F.linear(x.mean((0, 1, 3)), x.square().mean((0, 1, 3))),
        X5,
        [],
    ),
    "columns split as the samples": (
        lambda x: F.linear(x.mean((0, 1, 3)), x.square().mean((0, 1, 3))[:10].t()),
        X5,
        [],
    ),
    "module": (
        lambda x, w, b: functional_call(nn.Linear(4, 5), {"weight": w, "bias": b}, (x,)),
        X2,
        [(5, 4), (5,)],
    ),
}


def check_case(place, name):
    function, shape, weights = CASES[name]
    assert_same_as_serial(
        function,
        [seeded(*shape)],
        [seeded(*weight, seed=1) for weight in weights],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(shape)),
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_dense_layer_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


def check_flattened(place, shape, input_grads):
    assert_same_as_serial(
        lambda x, w, b: F.linear(x.flatten(1), w, b),
        [seeded(*shape)],
        [seeded(3, seeded(*shape)[0].numel(), seed=1), seeded(3, seed=2)],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(shape)),
        input_grads=input_grads,
    )


@examples
@given(st.data(), st.lists(st.integers(1, 5), min_size=2, max_size=5), st.booleans())
def test_any_flattened_tensor_equals_that_of_one_process(run, data, shape, input_grads):
    run(data.draw(places(shape)), check_flattened, tuple(shape), input_grads)


def check_slab_weights(place):
    """Weights that are whole, or of which each rank has some filters or columns."""
    mesh = place.mesh()
    x, weight, bias = seeded(3, 4, 10), seeded(6, 10, seed=1), seeded(6, seed=2)
    for axes in ((None, None), ("width", None), (None, "width")):
        w = hs.shard(weight, mesh, axes=axes)
        b = hs.shard(bias, mesh, axes=axes[:1])
        for slab in (x, hs.shard(x, mesh, axes=("sample", None, None))):
            out = hs.gather(F.linear(slab, w, b))
            torch.testing.assert_close(out, F.linear(x, weight, bias))


def test_weights_may_be_slabs(run):
    run(Place({"sample": 2, "width": 2}), check_slab_weights)


REFUSED = {
    "a number": (
        lambda x: F.linear(hs.shard(torch.ones(()), x.mesh), torch.ones(2, 3)),
        hs.LayoutError,
        r"a weight of shape \(2, 3\) does not fit an input of shape \(\)",
    ),
    "too many inputs": (
        lambda x: F.linear(x, torch.ones(2, 11, dtype=torch.float64)),
        hs.LayoutError,
        r"a weight of shape \(2, 11\) does not fit an input of shape \(3, 4, 11, 9, 10\)",
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
