"""Tiles at the size that asks for them: more than 2^31 elements."""

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.errors import LayoutError
from hyperslab.kernels import tiles
from hyperslab.kernels.conv import Convolution
from hyperslab.kernels.interpolate import interpolate
from hyperslab.kernels.norm import standardize_by
from hyperslab.kernels.pool import avg_pool, max_pool

pytestmark = pytest.mark.gpu
GIB = 2**30
FORMATS = [torch.contiguous_format, torch.channels_last_3d]
CONV = Convolution((1, 1, 1), (1, 1, 1), (1, 1, 1), False, (0, 0, 0), 1)


def random(*shape, memory_format=torch.contiguous_format, dtype=torch.bfloat16):
    x = torch.empty(shape, device="cuda", dtype=dtype, memory_format=memory_format)
    return x.normal_(generator=torch.Generator("cuda").manual_seed(0))


def close(ours, exact):
    rounding = 0.02 if ours.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.float(), exact.float(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_the_first_convolution_of_cosmoflow(memory_format):
    x = random(1, 4, 512, 512, 512, memory_format=memory_format).requires_grad_()
    weight = (random(16, 4, 3, 3, 3) / 10).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    out = CONV.run(x, weight, None)
    assert out.numel() == 2**31
    # Besides x, 1 GiB, and the output, 4 GiB, a tile of both and what cuDNN works in.
    assert torch.cuda.max_memory_allocated() < 9 * GIB
    grad = random(*out.shape, memory_format=memory_format)
    grad_x, grad_weight = torch.autograd.grad(out, [x, weight], grad)
    expected = torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, 512, 64):
        rows = x[:, :, max(0, start - 1) : start + 65].detach()
        padded = F.pad(rows, (0,) * 4 + (int(start == 0), int(start == 448)))
        slab, leaf = slice(start, start + 64), weight.detach().requires_grad_()
        made = F.conv3d(padded, leaf, padding=(0, 1, 1))
        close(out[:, :, slab], made)
        expected += torch.autograd.grad(made, leaf, grad[:, :, slab])[0]
    torch.testing.assert_close(grad_weight.float(), expected, rtol=0.02, atol=200)
    close(grad_x[:, :, 1:63], F.conv_transpose3d(grad[:, :, :64], weight, padding=1)[:, :, 1:63])
    close(grad_x[:, :, 449:], F.conv_transpose3d(grad[:, :, 448:], weight, padding=1)[:, :, 1:])


OPERATORS = {
    "average": (lambda x: avg_pool(x, 3, 2, 1), lambda x: F.avg_pool3d(x, 3, 2, 1)),
    "maximum": (lambda x: max_pool(x, 3, 2, 1), lambda x: F.max_pool3d(x, 3, 2, 1)),
    "resize": (
        lambda x: interpolate(x, None, 0.5, "trilinear"),
        lambda x: F.interpolate(x, None, 0.5, "trilinear"),
    ),
    "norm": (
        lambda x: standardize_by(x, *torch.ones(2, x.shape[1], device="cuda"), 0.5),
        lambda x: (x - 1) / 1.5**0.5,
    ),
}


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_single_channels(name, memory_format):
    ours, plain = OPERATORS[name]
    exact = {"dtype": torch.float32}  # sums of gradients in bf16 depend on their order
    x = random(1, 17, 512, 512, 512, memory_format=memory_format, **exact).requires_grad_()
    assert x.numel() > 2**31
    out = ours(x)
    grad = random(*out.shape, **exact)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    for channel in (0, 8, 16):
        one = x[:, channel : channel + 1].detach().contiguous().requires_grad_()
        made = plain(one)
        close(out[:, channel : channel + 1], made)
        part = grad[:, channel : channel + 1].contiguous()
        close(grad_x[:, channel : channel + 1], torch.autograd.grad(made, one, part)[0])


@pytest.mark.ranks(1)
def test_a_channel_that_no_kernel_can_resize_is_refused():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(tiles, "MAX_NUMEL", 100)
        x = hs.shard(torch.zeros(1, 2, 8, 8, 8), hs.init(device="cuda"))
        with pytest.raises(
            LayoutError, match="512 elements before or after, and a GPU counts no more"
        ):
            F.interpolate(x, size=(2, 2, 2))
