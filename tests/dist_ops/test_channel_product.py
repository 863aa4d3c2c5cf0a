"""Products by cut weights during which messages travel."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.dist_ops import channel_product, choices
from hyperslab.testing import seeded, whole

CASES = {
    "filters": (lambda: nn.Conv2d(6, 8, 3, padding=1), (2, 6, 5, 4)),
    "filters, without bias": (lambda: nn.Conv3d(3, 9, 3, bias=False), (2, 3, 7, 5, 6)),
    "channels": (lambda: nn.Conv2d(8, 3, 3, stride=2, padding=1), (2, 8, 6, 5)),
    "transposed, filters": (lambda: nn.ConvTranspose2d(6, 8, 2, 2), (2, 6, 5, 4)),
    "transposed, channels": (lambda: nn.ConvTranspose1d(9, 3, 1), (2, 9, 5)),
    "dense, filters": (lambda: nn.Linear(6, 9), (4, 6)),
    "dense, channels": (lambda: nn.Linear(9, 6), (4, 9)),
}


@contextmanager
def hidden_messages():
    """Small pieces too are computed in parts; the list tells which products were."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "MIN_INTERIOR_NUMEL", 1)
        for name in ("_GatherProduct", "_ScatterProduct"):
            cls = getattr(channel_product, name)
            patch.setattr(cls, "apply", partial(_spy, calls, name, cls.apply))
        yield calls


def _spy(calls, name, apply, *args):
    calls.append(name)
    return apply(*args)


def twins(name, mesh):
    """A layer in one process and over ranks, with the same weights, and an input."""
    make, shape = CASES[name]
    torch.manual_seed(2)
    serial, ours = make().double(), hs.parallelize(nn.Sequential(make().double()), mesh)
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
            mine.copy_(distribute_tensor(theirs.detach(), mine.device_mesh, mine.placements))
    return serial, ours, seeded(*shape)


@pytest.mark.ranks
@pytest.mark.every(2)
@pytest.mark.parametrize("axes", [{"channel": 2}, {"channel": 3}, {"sample": 2, "channel": 2}])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(name, axes):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    serial, ours, x = twins(name, mesh)
    first, given = (x.clone().requires_grad_() for _ in range(2))
    expected = serial(first)
    coefficients = seeded(*expected.shape, seed=3)
    (expected * coefficients).sum().backward()
    with hidden_messages() as calls:
        out = ours(hs.shard(given, mesh))
        (out * coefficients).sum().backward()
    close = {"rtol": 1e-10, "atol": 1e-11}
    torch.testing.assert_close(hs.gather(out), expected, **close)
    torch.testing.assert_close(given.grad, first.grad, **close)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, **close)
    assert calls == ["_ScatterProduct" if name.endswith("channels") else "_GatherProduct"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["filters", "channels", "dense, channels"])
def test_a_product_under_an_activation_checkpoint_is_computed_again(name):
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    serial, ours, x = twins(name, mesh)
    serial(x).square().sum().backward()
    with hidden_messages() as calls:
        out = checkpoint(ours, hs.shard(x, mesh), use_reentrant=False)
        out.square().sum().backward()
    assert len(calls) == 2
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-11)


class NewMemory(TorchDispatchMode):
    """Within it, the functions that give at least ``numel`` elements of memory of their own."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.functions = numel, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = [x.data_ptr() for x in (*args, *(kwargs or {}).values()) if is_plain(x)]
        if is_plain(out) and out.numel() >= self.numel and out.data_ptr() not in known:
            self.functions.append(str(function))
        return out


def is_plain(x):
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("sizes", [(96, 144), (144, 96)])
def test_nothing_as_large_as_a_cut_weight_is_made_but_its_gradient(sizes, hidden):
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    ours = hs.parallelize(nn.Sequential(nn.Linear(*sizes)), mesh)
    with hidden_messages() if hidden else nullcontext():
        loss = ours(hs.shard(seeded(4, sizes[0]).float(), mesh)).square().mean()
        with NewMemory(96 * 144 // 2) as made:
            loss.backward()
    assert made.functions == ["aten.empty_like.default"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("sizes", [(6, 9), (9, 6)])
def test_gradients_of_complex_layers_are_those_of_one_process(sizes, hidden):
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    torch.manual_seed(2)
    serial = nn.Linear(*sizes, dtype=torch.complex128)
    torch.manual_seed(2)
    ours = hs.parallelize(nn.Sequential(nn.Linear(*sizes, dtype=torch.complex128)), mesh)
    x = torch.complex(seeded(4, sizes[0]), seeded(4, sizes[0], seed=1))
    first, given = (x.clone().requires_grad_() for _ in range(2))
    serial(first).abs().square().sum().backward()
    with hidden_messages() if hidden else nullcontext():
        ours(hs.shard(given, mesh)).abs().square().sum().backward()
    torch.testing.assert_close(given.grad, first.grad)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad)
