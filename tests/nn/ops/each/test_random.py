"""Noise that is the same on any mesh."""

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place

SHAPE = (3, 4, 11, 9, 10)
CASES = {
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like, short": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
    "randn_like": lambda x: torch.randn_like(x) * x,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) + torch.bernoulli(x, 0.2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, 0.5, hard=True, dim=2) * x,
    "reparametrized": lambda x: x + torch.randn_like(x.mean((2, 3, 4), keepdim=True)) * x.exp(),
}


def drawn(place, name):
    x = seeded(*SHAPE).requires_grad_()
    slab = hs.shard(x, place.mesh(), cuts=place.cuts_of(5))
    torch.manual_seed(4)
    out = CASES[name](slab)
    if out.requires_grad:
        out.sum().backward()
    return hs.gather(out).detach(), x.grad, int(torch.randint(1000, ()))


@pytest.mark.parametrize("name", CASES)
def test_noise_does_not_depend_on_the_mesh(run, place, name):
    ((alone, grad, following),) = run(Place({}), drawn, name)
    for ours in run(place, drawn, name):
        torch.testing.assert_close(ours[0], alone)
        torch.testing.assert_close(ours[1], grad, rtol=1e-12, atol=1e-12)
        assert ours[2] == following


MOMENTS = {
    "uniform": (torch.rand_like, 0.5, 12**-0.5),
    "normal": (torch.randn_like, 0.0, 1.0),
    "coins": (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21**0.5),
    "waits": (lambda x: torch.empty_like(x).exponential_(2), 0.5, 0.5),
    "shifted": (lambda x: torch.empty_like(x).normal_(3, 2), 3.0, 2.0),
    "stretched": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MOMENTS)
def test_noise_has_the_moments_of_its_distribution_and_no_pattern(name):
    function, mean, std = MOMENTS[name]
    mesh = hs.init(depth=2, device="cpu")
    x = hs.shard(torch.zeros(4, 8, 16, 16, 16, dtype=torch.float64), mesh)
    first, second = (hs.gather(function(x)) for _ in range(2))
    torch.testing.assert_close(float(first.mean()), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(float(first.std()), std, atol=0.02, rtol=0)
    pairs = [(first.roll(1, dim), first) for dim in range(5)] + [(first, second)]
    for one, other in pairs:
        both = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_uniform_numbers_never_reach_one(dtype):
    mesh = hs.init(depth=2, device="cpu")
    x = torch.rand_like(hs.shard(torch.zeros(64, 4, 16, 16, 16, dtype=dtype), mesh))
    assert (x.dtype, float(x.min()) >= 0, float(x.max()) < 1) == (dtype, True, True)


@pytest.mark.ranks(2)
def test_a_generator_of_ones_own_and_integers_are_refused():
    mesh = hs.init(depth=2, device="cpu")
    x = hs.shard(seeded(*SHAPE), mesh)
    with pytest.raises(hs.UnsupportedOp, match="a generator of its own"):
        torch.empty_like(x).normal_(generator=torch.Generator())
    with pytest.raises(hs.UnsupportedOp, match="not floating point"):
        torch.empty_like(x, dtype=torch.int64).bernoulli_(0.5)
    with pytest.raises(hs.UnsupportedOp, match="its probability is a tensor"):
        torch.empty_like(x).bernoulli_(x)
