import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import CosmoFlow, describe

PUBLISHED_GFLOP = {128: 55.55, 256: 443.8, 512: 3550}
"""Of the convolutions, forward and backward."""


def described(size, **options):
    with torch.device("meta"):
        model = CosmoFlow(size, **options)
    return describe(model, (model.in_channels, size, size, size))


@pytest.mark.parametrize("size", PUBLISHED_GFLOP)
def test_parameters_and_flops_are_those_of_the_published_table(size):
    found = described(size)
    assert found.num_parameters == 9_437_636
    assert 3 * found.conv_flops / 1e9 == pytest.approx(PUBLISHED_GFLOP[size], rel=5e-4)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 1024, 2048])
def test_every_power_of_two_has_the_same_weights(size):
    assert described(size).num_parameters == 9_437_636
    assert described(size).output_shape == (4,)


def test_pools_follow_the_first_convolutions():
    with torch.device("meta"):
        counts = {
            size: [len(block.pool) for block in CosmoFlow(size).features]
            for size in (32, 128, 256, 512, 1024)
        }
    assert counts == {
        32: [1, 1, 1, 0, 0, 0, 0],
        128: [1, 1, 1, 1, 1, 0, 0],
        256: [1, 1, 1, 1, 1, 1, 0],
        512: [1, 1, 1, 1, 1, 1, 1],
        1024: [1, 1, 1, 1, 1, 1, 2],
    }


def test_options_change_channels_outputs_and_width():
    found = described(32, in_channels=1, outputs=2, base_channels=4)
    convs = 27 * (1 * 4 + 4 * 8 + 8 * 16 + 16 * 32 + 32 * 64 + 64 * 64 + 64 * 64)
    dense = (512 * 512 + 512) + (512 * 64 + 64) + (64 * 2 + 2)
    assert found.num_parameters == convs + dense
    assert found.output_shape == (2,)


def test_batch_norm_is_an_option():
    channels = 16 + 32 + 64 + 128 + 3 * 256
    assert described(32, batch_norm=True).num_parameters == 9_437_636 + 2 * channels


def test_weights_are_glorots_and_biases_a_tenth():
    torch.manual_seed(0)
    model = CosmoFlow(8, base_channels=4)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert (weight == 0.1).all(), name
        else:
            bound = (6 / (weight.shape[0] + weight.shape[1]) / weight[0, 0].numel()) ** 0.5
            assert 0.8 * bound < weight.abs().max() <= bound, name


def test_the_seed_decides_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([w.flatten() for w in CosmoFlow(8, base_channels=2).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_convolutions_let_a_hundredth_of_what_is_below_0_pass():
    block = CosmoFlow(8, in_channels=1, base_channels=1).features[-1]
    x = torch.randn(1, 16, 2, 2, 2)
    out = block.conv(x)
    torch.testing.assert_close(block(x), torch.where(out < 0, out / 100, out))


def test_cosmoflow_learns():
    torch.manual_seed(0)
    model = CosmoFlow(8, in_channels=1, outputs=1, base_channels=4, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.rand(8, 1, 8, 8, 8)
    target = x.mean(dim=(2, 3, 4)) * 10
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(torch.nn.functional.mse_loss(model(x), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 100


@pytest.mark.parametrize(
    ("size", "nearest"), [(100, 128), (4, 8), (0, 8), (-2, 8), (500, 512), (1000, 1024)]
)
def test_other_sizes_are_refused_with_the_nearest_that_works(size, nearest):
    with pytest.raises(ConfigError, match=f"power of two from 8 on, such as {nearest}, got {size}"):
        CosmoFlow(size)


def test_samples_of_another_size_are_refused():
    model = CosmoFlow(16, base_channels=1)
    with pytest.raises(ConfigError, match="made for cubes of 16x16x16 and is given 8x16x16"):
        model(torch.zeros(1, 4, 8, 16, 16))
    with pytest.raises(
        ConfigError, match="4 channels and is given 1x16x16x16: set in_channels = 1"
    ):
        model(torch.zeros(1, 1, 16, 16, 16))
    with pytest.raises(ConfigError, match=r"dims \(N, C, D, H, W\), got the shape 4x16x16x16"):
        model(torch.zeros(4, 16, 16, 16))
