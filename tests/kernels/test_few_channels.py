from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hyperslab.kernels import few_channels, fused
from hyperslab.kernels.conv import Settings, conv_few_channels
from hyperslab.kernels.few_channels import is_supported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
if DEVICE == "cuda":
    ROUNDING[torch.float32] = 1e-3  # TF32


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """New tensors are full of NaN; on GPUs not, where that changes what cuDNN does."""
    torch._C._set_deterministic_algorithms(DEVICE == "cpu")
    yield
    torch._C._set_deterministic_algorithms(False)


def error(got, reference):
    return float((got.detach().double() - reference).norm() / reference.norm())


class Case(NamedTuple):
    shape: tuple[int, ...]
    filters: int
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    slope: float = 1.0
    bias: bool = True
    last: bool = False
    """Whether inputs and weights are channels last."""


CUBE = (3, 3, 3)
CASES = {
    "cosmoflow's first layer": Case((1, 4, 3, 5, 7), 16, CUBE, (1, 1, 1), bias=False),
    "channels that are no power of two, last in memory": Case(
        (2, 3, 2, 4, 9), 8, CUBE, (1, 1, 1), slope=0.01, last=True
    ),
    "one channel, another kernel along each dim, no padding along two": Case(
        (1, 1, 3, 5, 11), 16, (5, 3, 1), (2, 0, 0), slope=0.0
    ),
    "images, wide kernels, more filters than a block holds": Case(
        (1, 16, 5, 13), 20, (5, 5), (2, 2)
    ),
    "wide along the width, more padding than a half": Case(
        (1, 5, 2, 3, 6), 40, (3, 1, 5), (2, 0, 4), slope=0.1
    ),
    "channels that can be read as they are": Case(
        (2, 8, 3, 4, 5), 16, CUBE, (1, 2, 0), last=True, bias=False
    ),
    "a single voxel": Case((1, 2, 1, 1, 1), 1, CUBE, (1, 1, 1)),
}


def check(case, dtype):
    generator = torch.Generator().manual_seed(sum(case.shape) + case.filters)

    def draw(*sizes):
        return torch.randn(sizes, generator=generator).to(DEVICE, dtype)

    x, weight = draw(*case.shape), draw(case.filters, case.shape[1], *case.kernel)
    if case.last:
        last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        x, weight = x.to(memory_format=last), weight.to(memory_format=last)
    operands = [weight, draw(case.filters)] if case.bias else [weight]
    mine = [t.clone().requires_grad_() for t in operands]
    theirs = [t.double().requires_grad_() for t in operands]
    bias = mine[1] if case.bias else None
    out = conv_few_channels(x, mine[0], bias, case.padding, slope=case.slope)
    conv = F.conv3d if x.ndim == 5 else F.conv2d
    exact = x.double().requires_grad_()
    linear = conv(exact, *theirs, padding=case.padding)
    reference = F.leaky_relu(linear, case.slope)
    coefficients = draw(*reference.shape)
    out.backward(coefficients)
    # Next to zero, rounding may have changed a sign, and the gradient is that of the other branch.
    slopes = torch.where(out.detach() > 0, 1.0, case.slope)
    linear.backward(coefficients.double() * slopes.double())
    assert out.shape == reference.shape
    assert out.dtype == dtype
    assert error(out, reference.detach()) < ROUNDING[dtype]
    for got, right in zip(mine, theirs, strict=True):
        assert error(got.grad, right.grad) < ROUNDING[dtype]
        assert got.grad.stride() == got.stride()  # or autograd would copy it
    if case.filters <= 32 and all(p < k for p, k in zip(case.padding, case.kernel, strict=True)):
        grad_x = few_channels.input_grad(coefficients * slopes, mine[0], case.padding)
        assert error(grad_x, exact.grad) < ROUNDING[dtype]


@pytest.mark.every(7)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_a_plain_convolution(case):
    check(case, torch.float32)


def test_short_dtypes_are_convolved_as_by_a_plain_convolution():
    check(CASES["a single voxel"], torch.float16)


def test_blocks_of_rows_and_columns_meet(monkeypatch):
    """More outputs than a block holds along each dim, and more blocks than programs."""
    monkeypatch.setitem(few_channels.FORWARD, 64, few_channels.Tuning(groups=16, rows=2))
    monkeypatch.setitem(few_channels.BACKWARD, 64, few_channels.Tuning(groups=16, rows=3))
    check(Case((2, 4, 1, 6, 35), 16, CUBE, (1, 1, 1), slope=0.2), torch.float32)


def test_saved_tensors_may_be_stored_elsewhere():
    """As contiguous copies, as offloading to the host makes them."""
    x = torch.randn(1, 3, 2, 4, 5).to(DEVICE)
    weight = torch.randn(4, 3, 3, 3, 3).to(DEVICE).requires_grad_()
    grads = []
    for hooks in (
        (lambda t: t, lambda t: t),
        (lambda t: t.clone(memory_format=torch.contiguous_format),) * 2,
    ):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = conv_few_channels(x, weight, None, (1, 1, 1), slope=0.1)
        coefficients = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        grads.append(torch.autograd.grad(out, weight, coefficients)[0])
    assert torch.equal(*grads)


def test_inputs_of_another_dtype_are_cast_on_the_way():
    x, weight = torch.randn(1, 4, 3, 4, 5), torch.randn(16, 4, 3, 3, 3)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    out = conv_few_channels(x.double(), weight, None, (1, 1, 1))
    assert torch.equal(out, conv_few_channels(x, weight, None, (1, 1, 1)))


def check_layer(shape, filters, dtype, num_fused):
    """A layer whose output is cuDNN's, and whose weight's gradient is ours ``num_fused`` times."""
    generator = torch.Generator().manual_seed(filters)
    x, weight, bias = (
        torch.randn(sizes, generator=generator).to(DEVICE, dtype).requires_grad_()
        for sizes in (shape, (filters, shape[1], *CUBE), (filters,))
    )
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    ones = (1, 1, 1)
    reference = F.conv3d(*exact, padding=1)
    coefficients = torch.randn(reference.shape, generator=generator).to(DEVICE, dtype)
    calls, fuse = [], few_channels.weight_grads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "pays", lambda x: True)
        patch.setattr(
            few_channels, "weight_grads", lambda *a, **k: calls.append(1) or fuse(*a, **k)
        )
        out = Settings(ones, ones, 1).run(x, weight, bias, ones)
        out.backward(coefficients)
    reference.backward(coefficients.double())
    assert len(calls) == num_fused
    assert error(out, reference.detach()) < ROUNDING[dtype]
    for got, right in zip((x, weight, bias), exact, strict=True):
        assert error(got.grad, right.grad) < ROUNDING[dtype]


@pytest.mark.slow
def test_gradients_of_weights_may_be_fused_where_outputs_are_not():
    check_layer((2, 32, 3, 4, 5), 34, torch.float16, num_fused=1)
    check_layer((1, 33, 3, 4, 5), 34, torch.float16, num_fused=0)


@pytest.mark.gpu
def test_gradients_of_weights_are_fused_on_a_gpu():
    check_layer((1, 32, 40, 65, 63), 64, torch.bfloat16, num_fused=1)
    check_layer((2, 24, 33, 64, 70), 32, torch.bfloat16, num_fused=1)


def test_what_there_is_no_kernel_for_is_said():
    def has_kernel(kernel=(16, 4, *CUBE), dtype=torch.float32, step=1, groups=1):
        return is_supported(torch.zeros(kernel), dtype, (1, 1, step), groups)

    assert has_kernel()
    assert not has_kernel(step=2)
    assert not has_kernel((16, 2, *CUBE), groups=2)
    assert not has_kernel((16, 4, 2, 3, 3))
    assert not has_kernel((16, 33, 1, 1, 1))
    assert not has_kernel(dtype=torch.float64)
    assert not has_kernel((16, 16, 5, 5, 5))  # its weights are too many for a program


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 4, 67, 129, 255), (3, 1, 33, 64, 130), (2, 16, 31, 65, 64)])
def test_large_odd_sizes_on_a_gpu(shape, dtype):
    check(Case(shape, 16, CUBE, (1, 1, 1), slope=0.01), dtype)
    check(Case(shape, 48, (5, 5, 5) if shape[1] == 1 else (1, 5, 3), (2, 2, 2)), dtype)


@pytest.mark.gpu
def test_tensors_may_begin_anywhere_in_memory():
    weight = torch.randn(16, 8, *CUBE, device=DEVICE)
    room = torch.randn(8 * 9 * 9 * 9 + 4, device=DEVICE)
    for skipped in (0, 1, 0, 3, 1, 4):
        x = room[skipped:][: 8 * 9**3].view(1, 9, 9, 9, 8).movedim(-1, 1)
        reference = F.conv3d(x.double(), weight.double(), padding=1)
        out = conv_few_channels(x, weight, None, (1, 1, 1))
        assert error(out, reference) < ROUNDING[torch.float32]
