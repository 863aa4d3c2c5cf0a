"""Convolution, activation and pool in one: the numbers are those of three plain functions."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hyperslab.kernels import conv_pool, faces
from hyperslab.kernels.act_pool_plan import Pool
from hyperslab.kernels.conv_pool import Tuning, conv_and_pool, is_supported
from hyperslab.kernels.few_channels_operands import Halo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
if DEVICE == "cuda":
    ROUNDING[torch.float32] = 2e-3  # TF32
ONES, TWOS, CUBE = (1, 1, 1), (2, 2, 2), (3, 3, 3)


GROUPS = 64 if DEVICE == "cuda" else 4


SHIPPED = conv_pool.FORWARD, conv_pool.BACKWARD


def tune(monkeypatch, **changes):
    tuning = Tuning(groups=GROUPS, planes=1)._replace(**changes)
    monkeypatch.setattr(conv_pool, "FORWARD", {"avg": tuning, "max": tuning})


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """More outputs than a block holds along each dim, and more blocks than programs."""
    tune(monkeypatch, rows=1)
    monkeypatch.setattr(conv_pool, "BACKWARD", Tuning(groups=GROUPS, rows=1))
    monkeypatch.setattr(conv_pool, "PROGRAMS", 1)


def error(got, reference):
    return float((got.detach().double() - reference).norm() / reference.norm())


class Case(NamedTuple):
    shape: tuple[int, ...]
    filters: int
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    pool: Pool
    slope: float = 0.1
    bias: bool = True


CASES = {
    "overlapping averages": Case((1, 4, 3, 3, 11), 16, CUBE, ONES, Pool("avg", CUBE, TWOS, ONES)),
    "overlapping maxima": Case((1, 4, 3, 3, 11), 16, CUBE, ONES, Pool("max", CUBE, TWOS, ONES)),
    "padding that does not count": Case(
        (2, 3, 3, 3, 4), 4, CUBE, ONES, Pool("avg", CUBE, TWOS, ONES, False), slope=0.0, bias=False
    ),
    "outputs that no window holds, more filters than a block": Case(
        (1, 2, 3, 5, 7), 40, (3, 1, 3), (1, 0, 1), Pool("max", TWOS, TWOS, (0, 0, 0)), slope=0.0
    ),
    "images, a wide kernel, two pairs in a group": Case(
        (1, 3, 5, 19), 5, (5, 5), (2, 0), Pool("avg", (3, 2), (2, 2), (1, 0))
    ),
    "no activation, depths that are not pooled": Case(
        (1, 1, 3, 4, 9), 4, (5, 1, 1), (2, 0, 0), Pool("avg", (1, 2, 3), (1, 2, 2), (0, 0, 1)), 1.0
    ),
    "padding at the end alone, averages": Case(
        (1, 2, 5, 4, 7), 5, CUBE, ONES, Pool("avg", CUBE, TWOS, (0, 0, 1), True, (1, 1, 0))
    ),
    "less padding at the end, maxima": Case(
        (1, 2, 6, 7, 5), 4, CUBE, (0, 1, 1), Pool("max", CUBE, TWOS, (1, 0, 1), True, (-1, 0, 0))
    ),
    "images, no padding along the height": Case(
        (2, 3, 8, 9), 5, (3, 3), (1, 1), Pool("avg", (2, 3), (1, 2), (0, 1)), 0.0
    ),
    "a window at every depth": Case(
        (1, 4, 2, 3, 5), 4, (1, 3, 3), (0, 1, 1), Pool("max", (2, 3, 2), (1, 2, 2), (1, 1, 0))
    ),
}


def plain(x, weight, bias, case):
    kind, num_dims = case.pool.mode, x.ndim - 2
    y = getattr(F, f"conv{num_dims}d")(x, weight, bias, padding=case.padding)
    y = F.leaky_relu(y, case.slope)
    pads = case.pool.padding
    if case.pool.extra:
        ends = zip(pads, case.pool.extra, strict=True)
        lowest = -torch.inf if kind == "max" else 0.0
        y = F.pad(y, [n for pad, more in [*ends][::-1] for n in (pad, pad + more)], value=lowest)
        pads = (0,) * num_dims
    more = {"count_include_pad": case.pool.count_include_pad} if kind == "avg" else {}
    run = getattr(F, f"{kind}_pool{num_dims}d")
    return run(y, *case.pool[1:3], pads, **more)


def check(case, dtype):
    generator = torch.Generator().manual_seed(sum(case.shape) + case.filters)

    def draw(*sizes):
        numbers = torch.randn(sizes, generator=generator)
        return numbers.bfloat16().to(DEVICE, dtype)  # TF32 has them exactly: no sign changes

    x, weight = draw(*case.shape), draw(case.filters, case.shape[1], *case.kernel)
    assert is_supported(x.shape, weight, case.padding, case.slope, case.pool)
    operands = [weight, draw(case.filters)] if case.bias else [weight]
    mine = [t.clone().requires_grad_() for t in operands]
    theirs = [t.double().requires_grad_() for t in operands]
    out = conv_and_pool(x, *[*mine, None][:2], case.padding, case.slope, case.pool)
    reference = plain(x.double(), *[*theirs, None][:2], case)
    coefficients = draw(*reference.shape)
    out.backward(coefficients)
    reference.backward(coefficients.double())
    assert out.shape == reference.shape
    assert out.dtype == dtype
    assert error(out, reference.detach()) < ROUNDING[dtype]
    for got, right in zip(mine, theirs, strict=True):
        assert error(got.grad, right.grad) < ROUNDING[dtype]


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_outputs_and_gradients_are_those_of_plain_functions(case):
    check(case, torch.float32)


def test_planes_may_be_convolved_two_at_once(monkeypatch):
    tune(monkeypatch, rows=2, at_once=2)
    case = CASES["overlapping averages"]._replace(shape=(1, 2, 3, 3, 5))
    check(case._replace(pool=Pool("max", CUBE, TWOS, ONES)), torch.float16)


def test_of_equal_maxima_the_first_gets_the_gradient():
    """Inputs and weights of one: many outputs are equal."""
    x, pool = torch.ones(1, 1, 6, 8, device=DEVICE), Pool("max", (3, 3), (2, 2), (1, 1))
    weight = torch.ones(1, 1, 3, 3, device=DEVICE)
    mine, theirs = weight.clone().requires_grad_(), weight.double().requires_grad_()
    case = Case((1, 1, 6, 8), 1, (3, 3), (2, 2), pool)
    out = conv_and_pool(x, mine, None, case.padding, case.slope, pool)
    reference = plain(x.double(), theirs, None, case)
    coefficients = torch.arange(1.0, out.numel() + 1, device=DEVICE).view_as(out)
    out.backward(coefficients)
    reference.backward(coefficients.double())
    assert torch.equal(out.double(), reference)
    assert torch.equal(mine.grad.double(), theirs.grad)


def test_fusing_with_a_pool_pays_where_a_convolution_would_write_much():
    weight = torch.zeros(16, 4, *CUBE)
    assert conv_pool.pays((1, 4, 256, 256, 128), weight, ONES)
    assert not conv_pool.pays((1, 4, 256, 256, 128), weight, (0, 0, 0))


def test_a_single_voxel_is_pooled_without_a_gradient():
    x, weight = torch.ones(1, 2, 1, 1, 1, device=DEVICE), torch.ones(1, 2, *CUBE, device=DEVICE)
    out = conv_and_pool(x, weight, None, ONES, 0.0, Pool("avg", CUBE, TWOS, ONES))
    assert out.item() == pytest.approx(2 / 27)
    assert not out.requires_grad


def test_what_there_is_no_kernel_for_is_said():
    def has_kernel(pool=(3, 2, 1), shape=(1, 4, 8, 8, 8), weight=(16, 4, 3, 3, 3), **changes):
        slope, counts = changes.get("slope", 0.0), changes.get("counts", True)
        sizes = [n if isinstance(n, tuple) else (n,) * (len(shape) - 2) for n in pool]
        wanted = Pool("avg", *sizes, counts)
        return is_supported(shape, torch.zeros(weight), (1,) * (len(shape) - 2), slope, wanted)

    assert has_kernel()
    assert has_kernel((2, 2, 0))
    assert not has_kernel((3, 2, 0))
    assert not has_kernel((3, 3, 0))
    assert not has_kernel((2, 2, 0), (1, 4, 8, 8, 1))  # no window fits
    assert not has_kernel(weight=(16, 16, 5, 5, 5))  # too many weights for a program
    assert not has_kernel(slope=-0.5)
    assert has_kernel((3, 2, (0, 1, 1)))
    assert not has_kernel((3, 2, (0, 1, 1)), counts=False)


@pytest.mark.every(2)
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_halo_is_read_where_it_was_received(by_torch, monkeypatch):
    """The window is a piece in the middle, boxes on two sides of it, and zeros on a third."""
    monkeypatch.setattr(faces, "has_kernel", lambda x: not by_torch)
    pool = Pool("avg", CUBE, TWOS, (0, 1, 1), True, (0, -1, 0))
    case = Case((1, 2, 8, 7, 4), 3, CUBE, (0, 0, 1), pool)
    generator = torch.Generator().manual_seed(3)
    window = torch.randn(case.shape, generator=generator).to(DEVICE)
    window[:, :, :, :1] = 0
    weight = torch.randn(3, 2, *CUBE, generator=generator).to(DEVICE).requires_grad_()
    places = tuple(
        (slice(0, 1), slice(0, 2), rows, slice(1, 7), slice(0, 4))
        for rows in (slice(0, 2), slice(7, 8))
    )
    halo = Halo(((2, 1), (1, 0), (0, 0)), places, [window[at].contiguous() for at in places])
    piece = window[:, :, 2:7, 1:].double()
    got = conv_and_pool(piece, weight, None, case.padding, case.slope, pool, halo)
    got.sum().backward()
    grad, weight.grad = weight.grad, None
    right = conv_and_pool(window, weight, None, case.padding, case.slope, pool)
    right.sum().backward()
    assert torch.equal(got, right)
    assert torch.equal(grad, weight.grad)
    reference = plain(window.double(), weight.double(), None, case)
    assert error(got, reference.detach()) < ROUNDING[torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_blocks_of_full_size_on_a_gpu(dtype, kind, monkeypatch):
    monkeypatch.setattr(conv_pool, "FORWARD", SHIPPED[0])
    monkeypatch.setattr(conv_pool, "BACKWARD", SHIPPED[1])
    check(Case((1, 4, 37, 45, 131), 16, CUBE, ONES, Pool(kind, CUBE, TWOS, ONES), 0.01), dtype)
