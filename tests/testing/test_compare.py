"""The comparison with one process must itself notice what is wrong."""

import pytest
import torch

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded


class _Doubled(torch.autograd.Function):
    """A tensor as it is, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class _Mixed(torch.autograd.Function):
    """A tensor as it is, whose gradient has the right sum in the wrong places."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1)


def scaled(x, weight):
    return x * weight


def wrong_output(x, weight):
    return scaled(x, weight) + isinstance(x, hs.Slab)


def wrong_input_gradient(x, weight):
    x = x.with_local(_Mixed.apply(x.local)) if isinstance(x, hs.Slab) else x
    return x + 0 * weight


def wrong_weight_gradient(x, weight):
    return scaled(x, _Doubled.apply(weight) if isinstance(x, hs.Slab) else weight)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (wrong_output, "output"),
        (wrong_input_gradient, "gradient of input 0"),
        (wrong_weight_gradient, "gradient of weight 0"),
    ],
)
def test_what_differs_from_one_process_is_named(function, what):
    mesh = hs.init(device="cpu")
    x, weight = seeded(2, 3, 4), seeded(4)
    assert_same_as_serial(scaled, [x], [weight], mesh=mesh)
    with pytest.raises(AssertionError, match=f"^{what}: "):
        assert_same_as_serial(function, [x], [weight], mesh=mesh)
