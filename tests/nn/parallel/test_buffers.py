"""Running statistics and the like that users write into buffers."""

import copy
import functools

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.testing import seeded

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
SHAPE = (2, 2, 5, 4)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("power", torch.ones(2))

    def forward(self, x):
        y = self.conv(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 2, 3)).detach()
        self.power.mul_(0.5).add_(0.5 * y.detach().square().mean((0, 2, 3)))
        self.register_buffer("largest", y.detach().amax((0, 2, 3)))
        return (y - self.mean[:, None, None]) / self.power[:, None, None]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x):
        self.last = x.detach()
        return x * 2


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{}, {"height": 2}, {"sample": 2, "width": 2}])
def test_buffers_hold_plain_tensors_that_are_whole(axes):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(3)
    plain = Centred().double()
    model = hs.parallelize(copy.deepcopy(plain), mesh)
    for seed in range(3):  # on one rank, later passes may run on plain tensors
        x = seeded(*SHAPE, seed=seed)
        ours, theirs = hs.gather(model(hs.shard(x, mesh))), plain(x)
        close(ours, theirs)
        assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
        close(model.state_dict(), plain.state_dict())
    assert "largest" in model.state_dict()


@pytest.mark.ranks(2)
def test_a_buffer_holds_no_split_tensor():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    model = hs.parallelize(Remembering(), mesh)
    with pytest.raises(
        hs.UnsupportedOp, match=r"buffer last of .*Remembering .* hyperslab\.gather"
    ):
        model(hs.shard(seeded(*SHAPE), mesh))
    assert model.last is None
