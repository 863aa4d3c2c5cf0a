"""Stacks of pairs: what a stage runs, weights that decoders share, heads, any mesh."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.models import (
    ConvAutoencoder,
    DenseAutoencoder,
    EncoderHead,
    StackedAutoencoder,
    build,
    tie,
)
from hyperslab.testing import seeded, whole

SMALL = {
    "conv": ("autoencoder-conv", {"in_channels": 2, "channels": [4, 6], "dims": 2}, (4, 2, 12, 8)),
    "conv-3d": ("autoencoder-conv", {"in_channels": 1, "channels": [4, 2]}, (2, 1, 8, 8, 4)),
    "dense": ("autoencoder", {"inputs": 96, "hidden": [12, 8]}, (4, 3, 8, 4)),
}
MESHES = {
    "sample": ({"sample": 2}, {}),
    "space": ({"height": 2}, {}),
    "channel": ({"channel": 2}, {}),
    "blocks": ({"channel": 2, "height": 2}, {"*": {"split": "blocks"}}),
    "sample-channel": ({"channel": 2, "sample": 2}, {}),
}


def made(case, **options):
    torch.manual_seed(0)
    name, given, shape = SMALL[case]
    return build(name, {**given, **options}).double(), seeded(*shape)


@pytest.mark.parametrize("case", SMALL)
def test_stages_run_one_after_the_other_are_the_whole(case):
    stack, x = made(case)
    code = stack(x, stages=(0, 1), want="code")
    deeper = stack(code, stages=(1, 2), want="code")
    torch.testing.assert_close(deeper, stack(x, want="code"))
    out, *codes = stack(x, want="both")
    torch.testing.assert_close(out, stack(x))
    torch.testing.assert_close(codes, [code, deeper])
    assert stack(code, stages=(1, 2)).shape == code.shape


def test_a_stage_runs_no_other_pair():
    stack, x = made("conv")
    ran = []
    for name, part in stack.named_modules():
        part.register_forward_hook(lambda *_, name=name: ran.append(name))
    code = stack(x, stages=(0, 1), want="code")
    assert not any(name.startswith("decoder") for name in ran)
    ran.clear()
    stack(code, stages=(1, 2))
    assert {"encoder.1", "decoder.0"} <= {*ran}
    assert not any(name.startswith(("encoder.0", "decoder.1")) for name in ran)


def test_noise_is_for_training_and_sets_numbers_to_0():
    stack = StackedAutoencoder([(nn.Identity(), nn.Identity())])
    x = torch.ones(50, 400)
    out = stack(x, noise=0.3)
    assert set(out.unique().tolist()) == {0.0, 1.0}
    assert 0.28 < 1 - out.mean() < 0.32
    assert torch.equal(stack.eval()(x, noise=0.3), x)


@pytest.mark.parametrize("case", SMALL)
def test_tied_decoders_use_the_weights_of_their_encoders(case):
    stack, x = made(case, tied=True)
    free, _ = made(case)
    matrices = [p for p in stack.parameters() if p.ndim > 1]
    assert len(matrices) == 2
    assert sum(p.numel() for p in free.parameters() if p.ndim > 1) == 2 * sum(
        p.numel() for p in matrices
    )
    state = dict(free.state_dict())
    for name, theirs in stack.state_dict().items():
        is_turned = case == "dense" and name.startswith("decoder") and theirs.ndim > 1
        state[name] = theirs.t() if is_turned else theirs
    free.load_state_dict(state)
    torch.testing.assert_close(stack(x), free(x))


def test_weights_that_cannot_be_tied_are_refused():
    with pytest.raises(ConfigError, match="has 1 layers with weights and the decoder 2"):
        tie(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="cannot be those of Conv2d"):
        tie(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 1, 4))
    with pytest.raises(ConfigError, match="cannot be those of Linear"):
        tie(nn.Linear(4, 3), nn.Linear(2, 4))


def test_a_bare_layer_can_be_a_decoder_with_tied_weights():
    stack = StackedAutoencoder([(nn.Linear(4, 3), nn.Linear(3, 4))], tied=True)
    assert [tuple(p.shape) for p in stack.parameters()] == [(3, 4), (3,), (4,)]
    assert stack(torch.ones(2, 4)).shape == (2, 4)


def test_options_and_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="one pair"):
        StackedAutoencoder([])
    with pytest.raises(ConfigError, match="kernel = 3 and stride = 2: choose kernel = 4"):
        ConvAutoencoder(kernel=3)
    with pytest.raises(ConfigError, match="dims must be 1, 2 or 3, got 4"):
        ConvAutoencoder(dims=4)
    with pytest.raises(ConfigError, match="activation must be one of relu"):
        DenseAutoencoder(8, [4], activation="step")
    with pytest.raises(ConfigError, match="multiples of 8, got 12x8x8"):
        ConvAutoencoder()(torch.zeros(1, 4, 12, 8, 8))
    odd = StackedAutoencoder([(nn.Conv1d(1, 2, 3, 2), nn.ConvTranspose1d(2, 1, 3, 2))])
    with pytest.raises(ConfigError, match="stage 0 gives samples of 1x7 and its encoder is given"):
        odd(torch.zeros(2, 1, 8))


@pytest.mark.parametrize("case", SMALL)
def test_a_head_makes_numbers_of_the_code(case):
    stack, x = made(case)
    model = EncoderHead(stack, x.shape[1:], 3, hidden=[5], cells=1)
    assert model(x).shape == (len(x), 3)
    assert all(p.requires_grad for p in model.parameters())
    frozen = EncoderHead(stack, x.shape[1:], 3, frozen=True)
    assert {n.partition(".")[0] for n, p in frozen.named_parameters() if p.requires_grad} == {
        "head"
    }


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_a_head_begins_at_zero_when_it_is_made_and_when_weights_are_drawn(hidden):
    stack, x = made("conv")
    model = EncoderHead(stack, x.shape[1:], 3, hidden=hidden, standardize=True)
    assert not model(x).any()
    model.reset_parameters()
    assert not model(x).any()
    assert all(p.any() for name, p in model.encoder.named_parameters() if "weight" in name)


@pytest.mark.parametrize("cells", [1, 2])
def test_a_head_sees_the_mean_and_the_deviation_of_each_channel_in_each_cell(cells):
    stack, x = made("conv", activation="elu")
    model = EncoderHead(stack, x.shape[1:], 3, cells=cells, pool="moments")
    code = stack(x[..., :8, :], want="code")  # 2x2 numbers
    parts = code.unflatten(-1, (cells, -1)).unflatten(-3, (cells, -1)).transpose(-2, -3)
    mean, deviation = parts.mean((-1, -2)), parts.std((-1, -2), correction=0)
    expected = torch.cat([mean, deviation.clamp(min=1e-3)], 1).flatten(1)
    found = model.head[:2](code)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert found.shape[1] == model.head[-1].in_features


def test_deviations_of_a_code_that_is_the_same_everywhere_have_finite_gradients():
    stack, x = made("conv")
    model = EncoderHead(stack, x.shape[1:], 3, pool="moments")
    code = torch.ones(2, 6, 3, 2, dtype=torch.float64, requires_grad=True)
    model.head[:2](code).sum().backward()
    assert code.grad.isfinite().all()


def test_a_frozen_encoder_keeps_its_running_statistics():
    stack, x = made("conv", batch_norm=True)
    model = EncoderHead(stack, x.shape[1:], 3, frozen=True).train()
    before = copy.deepcopy(stack.encoder.state_dict())
    model(x)
    assert all(torch.equal(before[key], now) for key, now in stack.encoder.state_dict().items())
    assert model.head.training


def test_samples_of_another_shape_have_no_code():
    stack, _ = made("dense")
    with pytest.raises(ConfigError, match="cannot take samples of 3x8x8"):
        EncoderHead(stack, (3, 8, 8), 2)


@pytest.mark.every(4)
@pytest.mark.ranks
@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "free"])
@pytest.mark.parametrize(("axes", "plan"), MESHES.values(), ids=MESHES)
def test_every_stage_has_the_gradients_of_one_process(axes, plan, tied, case):
    serial, x = made(case, tied=tied)
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    ours = hs.parallelize(copy.deepcopy(serial), mesh, plan=plan)
    slab = hs.shard(x, mesh)
    for stages in [(0, 1), (1, 2), (0, 2)]:
        expected, *codes = serial(x, stages=stages, want="both")
        out, *found = ours(slab, stages=stages, want="both")
        target = seeded(*expected.shape, seed=1)
        for one, other in zip(found, codes, strict=True):
            torch.testing.assert_close(hs.gather(one), other, rtol=1e-10, atol=1e-10)
        (F.mse_loss(expected, target) + sum(code.abs().mean() for code in codes)).backward()
        (F.mse_loss(out, target) + sum(code.abs().mean() for code in found)).backward()
        for (name, mine), theirs in zip(ours.named_parameters(), serial.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(
                    whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-10, msg=name
                )
        serial.zero_grad(), ours.zero_grad()
        if stages == (0, 1):
            x, slab = codes[0].detach(), found[0].detach()
        else:
            x = seeded(*SMALL[case][2])
            slab = hs.shard(x, mesh)
