"""Every network, unchanged, gives on two ranks what it gives in one process."""

import copy

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.models import build
from hyperslab.testing import seeded, whole

SMALL = {
    "cosmoflow": ({"size": 16, "in_channels": 2, "base_channels": 2}, (2, 2, 16, 16, 16)),
    "cosmoflow-norm": (
        {"size": 16, "in_channels": 1, "base_channels": 2, "batch_norm": True},
        (2, 1, 16, 16, 16),
    ),
    "hepcnn": ({"channels": 4}, (2, 3, 37, 32)),
    "tiramisu": (
        {"in_channels": 2, "growth": 2, "blocks": [1, 2, 2], "base_channels": 3},
        (2, 2, 19, 14),
    ),
    "mesh-1k": ({"in_channels": 2, "base_channels": 2}, (2, 2, 64, 64)),
    "mesh-2k": ({"in_channels": 2, "base_channels": 2, "outputs": 4}, (2, 2, 128, 64)),
    "resnet50": ({"classes": 3, "base_channels": 2, "blocks": [1, 1, 1, 1]}, (2, 3, 48, 33)),
    "unet3d": ({"classes": 3, "base_channels": 2, "levels": 3}, (2, 1, 11, 8, 9)),
    "unet3d-instance": ({"base_channels": 2, "levels": 2, "norm": "instance"}, (2, 1, 8, 6, 7)),
    "autoencoder": ({"inputs": 96, "hidden": [7, 5]}, (2, 3, 8, 4)),
}
"""Options and input shapes; after a hyphen, what is tried."""


@pytest.mark.every(3)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["sample", "channel", "height"])
@pytest.mark.parametrize("case", SMALL)
def test_a_network_trains_as_in_one_process(case, axis):
    torch.manual_seed(3)
    axes = {"depth": 2} if axis == "height" and len(SMALL[case][1]) == 5 else {axis: 2}
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(3)
    options, shape = SMALL[case]
    name = case if case.startswith("mesh") else case.partition("-")[0]
    serial = build(name, options).double()
    for layer in serial.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0  # masks are not those that plain torch draws
    ours = hs.parallelize(copy.deepcopy(serial), mesh)
    x = seeded(*shape)
    expected, out = serial(x), ours(hs.shard(x, mesh))
    assert tuple(out.shape) == tuple(expected.shape)
    torch.testing.assert_close(hs.gather(out), expected, rtol=1e-9, atol=1e-9)
    target = seeded(*expected.shape, seed=1)
    F.mse_loss(expected, target).backward()
    F.mse_loss(out, target).backward()
    for (key, mine), theirs in zip(ours.named_parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.grad),
            theirs.grad,
            rtol=1e-8,
            atol=1e-9,
            msg=lambda text, key=key: f"{key}: {text}",
        )
