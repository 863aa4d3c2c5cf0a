"""Dropout whose masks are those of one process, whatever the mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place

X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)
UNEVEN = Place({"sample": 2, "depth": 2}, {"depth": [0, 1, 11]})

CASES = {
    "elements": (lambda x: F.dropout(x, 0.3), X5),
    "many elements": (lambda x: F.dropout(x, 0.3), (3, 45, 11, 9, 10)),
    "elements by torch": (lambda x: torch.dropout(x, 0.3, True), X4),
    "elements in place": (lambda x: F.dropout(x + 0, 0.3, inplace=True), X5),
    "channels of volumes": (lambda x: F.dropout3d(x, 0.3), X5),
    "channels of images": (lambda x: F.dropout2d(x, p=0.3, training=True), X4),
    "channels of rows": (lambda x: F.dropout1d(x, 0.3), X3),
    "module": (nn.Dropout(0.3), X5),
    "module of channels": (nn.Dropout3d(0.3, inplace=True), X5),
    "saturated elements": (lambda x: F.alpha_dropout(x, 0.3, training=True), X5),
    "saturated in place": (lambda x: F.alpha_dropout(x + 0, 0.3, True, inplace=True), X4),
    "saturated channels": (nn.FeatureAlphaDropout(0.3), X4),
    "channels by torch": (lambda x: torch.feature_dropout(x, 0.3, True), X5),
    "vectors": (lambda x: F.dropout(x.flatten(1), 0.3), X5),
    "one after the other": (lambda x: F.dropout(F.dropout(x, 0.3), 0.3), X5),
    "after a pool": (lambda x: F.dropout(F.max_pool3d(x, 3, 2, 1), 0.3), X5),
}


def dropped(place, name):
    """What is left, and the gradient, of ones."""
    function, shape = CASES[name]
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    slab = hs.shard(x, place.mesh(), cuts=place.cuts_of(len(shape)))
    torch.manual_seed(4)
    out = function(slab * 1)
    out.sum().backward()
    return hs.gather(out).detach(), x.grad, int(torch.randint(1000, ()))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_mask_does_not_depend_on_the_mesh(run, place, name):
    ((left, grad, following),) = run(Place({}), dropped, name)
    for ours in run(place, dropped, name):
        torch.testing.assert_close(ours[0], left)
        torch.testing.assert_close(ours[1], grad, rtol=1e-12, atol=1e-12)
        assert ours[2] == following  # all ranks go on with the same random numbers


def check_mask(place):
    mesh = place.mesh()
    x = hs.shard(torch.ones(4, 8, 11, 12, 13), mesh)
    first, second = (hs.gather(F.dropout(x, 0.25)) for _ in range(2))
    for mask in (first, second):
        assert set(mask.unique().tolist()) == {0, torch.tensor(1 / 0.75).item()}
        assert 0.24 < float((mask == 0).float().mean()) < 0.26
        for dim in range(5):  # neighbours are independent
            kept = (mask > 0).float()
            shift = kept.narrow(dim, 1, kept.shape[dim] - 1)
            other = kept.narrow(dim, 0, kept.shape[dim] - 1)
            assert abs(float((shift * other).mean()) - 0.75**2) < 0.02
    assert abs(float(((first > 0) & (second > 0)).float().mean()) - 0.75**2) < 0.02
    torch.manual_seed(3)
    again = hs.gather(F.dropout(x, 0.25))
    torch.manual_seed(3)
    assert torch.equal(hs.gather(F.dropout(x, 0.25)), again)


def test_a_mask_is_random(run):
    run(UNEVEN, check_mask)


def check_channels(place):
    x = hs.shard(torch.ones(8, 16, 5, 4, 6), place.mesh())
    out = hs.gather(F.dropout3d(x, 0.5))
    whole = out.flatten(2)
    assert torch.equal(whole.amin(2), whole.amax(2))
    dropped = whole[..., 0] == 0
    assert 0.3 < float(dropped.float().mean()) < 0.7
    assert not torch.equal(dropped.any(1), dropped.all(1)), "channels, not samples"


def test_channels_are_dropped_as_a_whole(run):
    run(Place({"sample": 2, "depth": 2}), check_channels)


def check_edges(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x
    assert nn.Dropout(0.5).eval()(x) is x
    assert float(F.dropout(x, 1.0).abs().sum()) == 0
    y = x * 1
    assert F.dropout(y, 1.0, inplace=True) is y
    assert float(y.abs().sum()) == 0
    assert F.dropout(x.bfloat16(), 0.5).dtype == torch.bfloat16


def test_nothing_or_everything_is_dropped(run, place):
    run(place, check_edges)


def check_checkpoint(place):
    """Recomputed, a mask is drawn again as it was."""
    x = torch.ones(X5, dtype=torch.float64, requires_grad=True)
    slab = hs.shard(x, place.mesh(), cuts=place.cuts_of(5))
    out = checkpoint(lambda x: F.dropout(x, 0.5) * x, slab, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * hs.gather(out).detach())


def test_activation_checkpointing_draws_the_same_mask(run, place):
    run(place, check_checkpoint)


REFUSED = {
    "probability": (
        lambda x: F.dropout3d(x, 1.5),
        (hs.ConfigError, ValueError),
        "between 0 and 1, (got|but got) 1.5",
    ),
    "unbatched input": (
        lambda x: F.dropout3d(x.mean(0)),
        hs.UnsupportedOp,
        "torch.nn.functional.dropout3d .*it has 4 dims, and batched input has 5",
    ),
    "other noise": (
        lambda x: torch.randint_like(x, 5),
        hs.UnsupportedOp,
        "torch.randint_like cannot run",
    ),
    "other noise on whole tensors": (
        lambda x: torch.randint_like(x.mean((0, 2)), 5),
        hs.UnsupportedOp,
        "torch.randint_like .*it draws random numbers, which differ between ranks",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(UNEVEN, check_refused, name)


@pytest.mark.ranks(2)
def test_alpha_dropout_keeps_mean_and_spread_of_what_selu_gives():
    mesh = hs.init(depth=2, device="cpu")
    x = F.selu(torch.randn(4, 8, 12, 12, 12, generator=torch.Generator().manual_seed(0)))
    for function in (F.alpha_dropout, F.feature_alpha_dropout):
        out = hs.gather(function(hs.shard(x, mesh), 0.3, training=True))
        torch.testing.assert_close(out.mean(), x.mean(), atol=0.3, rtol=0)
        torch.testing.assert_close(out.std(), x.std(), atol=0.2, rtol=0)
        plain = function(x[:1, :1], 0.3, training=True).min()
        torch.testing.assert_close(out.min(), torch.minimum(plain, out.min()))
        assert hs.gather(function(hs.shard(x, mesh), 0.3, training=False)).equal(x)
    lost = hs.gather(F.alpha_dropout(hs.shard(x, mesh), 0.3, training=True)).mode().values.unique()
    assert F.alpha_dropout(x, 0.3, training=True).mode().values.unique().isclose(lost[0]).any()


def test_gradients_are_scaled_in_the_dtype_of_the_input():
    x = torch.ones(1, 1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    F.dropout(hs.shard(x, hs.init(device="cpu")) * 1, 0.1).sum().backward()
    assert x.grad.max() == 1 / 0.9


@pytest.mark.parametrize("p", [0.2, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_stays_is_scaled_as_by_a_number(p, dtype):
    mesh = hs.init(device="cpu")
    with torch.inference_mode():  # whatever is kept of such a pass serves others
        F.dropout(hs.shard(torch.ones(4, 5, dtype=dtype), mesh), p)
    x = seeded(7, 211).to(dtype).requires_grad_()
    out = F.dropout(hs.shard(x, mesh), p).local
    kept = (out != 0) | (x == 0)
    assert torch.equal(out, x * (1 / (1 - p)) * kept)
    assert kept.float().mean() == pytest.approx(1 - p, abs=0.1)
    out.backward(seeded(7, 211, seed=1).to(dtype))
    assert torch.equal(x.grad, seeded(7, 211, seed=1).to(dtype) * kept * (1 / (1 - p)))
