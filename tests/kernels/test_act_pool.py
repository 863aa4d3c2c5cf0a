from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

pytest.importorskip("triton")

from hyperslab.errors import ConfigError
from hyperslab.kernels import act_pool_plan
from hyperslab.kernels.act_pool import activate_and_pool, is_supported
from hyperslab.kernels.act_pool_plan import Pool, Tuning
from hyperslab.kernels.memory_format import memory_format_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"  # there in Triton's interpreter
COSMOFLOW = Pool("avg", (3, 3, 3), (2, 2, 2), (1, 1, 1))


@contextmanager
def poisoned_memory():
    """New tensors are full of NaN: what torch.use_deterministic_algorithms does, slowly."""
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    if not ON_GPU:  # where a program is slow
        monkeypatch.setattr(act_pool_plan, "PROGRAMS", 1)


def tuned(monkeypatch, **changes):
    tunings = {key: Tuning()._replace(**changes) for key in act_pool_plan.TUNING}
    for key, tuning in tunings.items():
        monkeypatch.setitem(act_pool_plan.TUNING, key, tuning)


def draw(*shape, dtype=torch.float64, last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    y = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return y.to(memory_format=formats[y.ndim]) if last else y


def by_torch(y, slope, pool):
    activation = F.relu(y) if slope == 0 else F.leaky_relu(y, slope)
    ends = [n for end in reversed(pool.extra) for n in (0, end)]
    activation = F.pad(activation, ends, value=-torch.inf if pool.mode == "max" else 0.0)
    function = getattr(F, f"{pool.mode}_pool{y.ndim - 2}d")
    counts = {"count_include_pad": pool.count_include_pad} if pool.mode == "avg" else {}
    return function(activation, pool.kernel, pool.stride, pool.padding, **counts)


def both(y, slope, pool):
    """Outputs and gradients, ours and those of torch in float64."""
    mine, theirs = y.clone().requires_grad_(), y.cpu().double().requires_grad_()
    reference = by_torch(theirs, slope, pool)
    coefficients = draw(*reference.shape).to(y.dtype)
    with poisoned_memory():
        out = activate_and_pool(mine, slope, pool)
        out.backward(coefficients)
    reference.backward(coefficients.cpu().double())
    assert out.dtype == mine.grad.dtype == y.dtype
    assert memory_format_of(out) == memory_format_of(mine.grad) == memory_format_of(y)
    return (out.detach().cpu(), mine.grad.cpu()), (reference.detach(), theirs.grad)


def check(y, slope, pool, **tolerance):
    ours, reference = both(y, slope, pool)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **tolerance)


@pytest.mark.parametrize(("mode", "last"), [("avg", True), ("max", False)])
def test_windows_that_overlap_in_three_dims_give_what_plain_functions_do(mode, last):
    check(draw(1, 9 if last else 1, 3, 4, 5, last=last), 0.01, COSMOFLOW._replace(mode=mode))


@pytest.mark.parametrize(("mode", "last"), [("avg", False), ("max", True)])
def test_windows_may_differ_from_dim_to_dim(mode, last):
    pool = Pool(mode, (2, 1, 3), (1, 2, 2), (1, 0, 1), count_include_pad=False)
    check(draw(1, 2 if last else 1, 2, 3, 5, last=last), 0.0, pool)


@st.composite
def cases(draw_from):
    kernel = draw_from(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = tuple(draw_from(st.integers(1, k + 1)) for k in kernel)
    padding = tuple(draw_from(st.integers(0, k // 2)) for k in kernel)
    extent = tuple(
        draw_from(st.integers(max(1, k - 2 * p), 5)) for k, p in zip(kernel, padding, strict=True)
    )
    pool = Pool(draw_from(st.sampled_from(["avg", "max"])), kernel, stride, padding,
                draw_from(st.booleans()))  # fmt: skip
    shape = (draw_from(st.integers(1, 2)), draw_from(st.sampled_from([1, 3, 9])), *extent)
    return shape, pool, draw_from(st.sampled_from([0.0, 0.2, 1.0, 3.0])), draw_from(st.booleans())


@pytest.mark.parametrize(("mode", "last"), [("avg", True), ("max", False)])
def test_windows_may_reach_beyond_the_padding_at_the_end(mode, last):
    pool = Pool(mode, (3, 2), (2, 2), (0, 1), extra=(2, 1))
    check(draw(1, 9 if last else 1, 4, 4, last=last), 0.1, pool)


@settings(max_examples=200 if ON_GPU else 5, deadline=None)
@given(case=cases())
def test_any_window_over_any_image_gives_what_plain_functions_do(case):
    shape, pool, slope, last = case
    check(draw(*shape, last=last), slope, pool)


@pytest.mark.parametrize(("mode", "last"), [("avg", True), ("avg", False), ("max", True)])
def test_the_work_may_be_cut_anywhere(monkeypatch, mode, last):
    tuned(monkeypatch, row_bytes=512, planes=1)
    check(draw(1, 9 if last else 1, 5, 9, last=last), 0.1, Pool(mode, (3, 3), (2, 2), (0, 0)))


def test_a_slope_before_an_average_may_be_negative():
    check(draw(1, 1, 2, 9), -0.5, Pool("avg", (2, 2), (2, 2), (0, 0)))


def test_sums_are_rounded_once():
    pool = Pool("avg", (3, 3), (2, 2), (1, 1))
    check(draw(1, 8, 4, 5, dtype=torch.bfloat16, last=True), 0.01, pool, rtol=2**-7, atol=1e-5)


def test_the_first_of_equal_maxima_has_the_gradient_and_nan_wins():
    y = draw(1, 1, 4, 8)
    y[..., 2:] = 2.0
    y[..., 1, 3], y[..., 2, 4], y[..., 3, :2] = torch.nan, torch.nan, -torch.inf
    y[..., 2, :2] = -torch.inf
    pool = Pool("max", (2, 3), (2, 1), (0, 1))
    ours, reference = both(y, 0.5, pool)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_infinities_that_relu_takes_away_leave_no_nan():
    y = draw(1, 1, 2, 8)
    y[..., ::2] = -torch.inf
    check(y, 0.0, Pool("avg", (2, 2), (2, 2), (0, 0)))


def test_only_a_bit_or_a_byte_is_kept_for_the_backward_pass():
    y, kept = draw(1, 16, 2, 4, last=True).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.nbytes) or x, lambda x: x
    ):
        activate_and_pool(y, 0.1, Pool("avg", (2, 2), (2, 2), (0, 0)))
        activate_and_pool(y, 0.1, Pool("max", (2, 2), (2, 2), (0, 0)))
        activate_and_pool(y, 1.0, Pool("avg", (2, 2), (2, 2), (0, 0)))
    assert kept == [16 * 8 // 8, 16 * 2]


def test_a_second_derivative_is_refused():
    y = draw(1, 1, 2, 8).requires_grad_()
    out = activate_and_pool(y, 0.1, Pool("avg", (2, 2), (2, 2), (0, 0)))
    (grad,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": (4, 2)}, "kernels go to 3"),
        ({"stride": (4, 2)}, "strides to one more"),
        ({"padding": (2, 0)}, "padding to half the kernel"),
        ({"kernel": (2, 2, 2)}, r"over a tensor of shape \(1, 2, 4, 6\)"),
        ({"kernel": (3, 3), "y": (1, 2, 2, 2)}, "has no output"),
        ({"y": (1, 2, 0, 2)}, "has no output"),
        ({"slope": -1.0}, "a slope of -1.0 before a pool of mode 'max'"),
        ({"slope": float("inf")}, "a slope of inf"),
        ({"dtype": torch.int32}, "a tensor of torch.int32"),
    ],
)
def test_what_no_kernel_does_is_refused(change, words):
    y = torch.zeros(change.pop("y", (1, 2, 4, 6)), dtype=change.pop("dtype", torch.float32))
    slope = change.pop("slope", 0.0)
    pool = Pool("max", (2, 2), (2, 2), (0, 0))._replace(**change)
    with pytest.raises(ConfigError, match=words):
        activate_and_pool(y.to(DEVICE), slope, pool)
    assert not is_supported(y.to(DEVICE), slope, pool)


def test_tensors_with_gaps_are_refused():
    with pytest.raises(ConfigError, match="neither contiguous nor channels last"):
        activate_and_pool(draw(1, 2, 4, 6)[..., ::2], 0.0, Pool("max", (2, 2), (2, 2), (0, 0)))


def test_only_tensors_on_a_gpu_are_supported():
    assert is_supported(draw(1, 2, 4, 4, 4), 0.01, COSMOFLOW) == ON_GPU


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("shape", [(1, 16, 129, 66, 131), (3, 20, 35, 63, 64), (2, 256, 9, 7, 5)])
def test_volumes_of_odd_sizes(shape, mode, last, dtype):
    y = torch.randn(shape, device=DEVICE).to(dtype)  # fresh numbers, each time
    y = y.to(memory_format=torch.channels_last_3d) if last else y
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}[dtype]
    check(y, 0.01, COSMOFLOW._replace(mode=mode), rtol=2 * rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("width", [131, 259, 515])
def test_volumes_as_wide_as_a_block_and_a_little_more(width, mode):
    pool = COSMOFLOW._replace(mode=mode)
    check(draw(1, 2, 9, 10, width, dtype=torch.float32), 0.01, pool, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (3, 3, 0)])
def test_images_as_wide_as_a_block_and_a_little_more(kernel, stride, padding, mode):
    pool = Pool(mode, (kernel,) * 2, (stride,) * 2, (padding,) * 2)
    for width in (129, 130, 132, 255, 259):
        check(draw(1, 2, 10, width, dtype=torch.float32), 0.01, pool, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_images_of_few_channels_side_by_side(mode):
    pool = Pool(mode, (3, 3), (2, 2), (1, 1))
    for width in (65, 66, 127, 129, 131):
        y = draw(1, 3, 10, width, dtype=torch.float32, last=True)
        check(y, 0.01, pool, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_more_than_two_to_the_31_numbers(last):
    y = torch.randn(1, 16, 8, 512, 512, device=DEVICE, dtype=torch.bfloat16)
    y = y.repeat(1, 1, 65, 1, 1)
    y = y.to(memory_format=torch.channels_last_3d) if last else y
    out = activate_and_pool(y.requires_grad_(), 0.01, COSMOFLOW)
    out.backward(torch.randn_like(out[:, :, :4]).repeat(1, 1, 65, 1, 1))
    # Windows and gradients repeat every 8 planes, but at the ends.
    torch.testing.assert_close(out[:, :, 8:12], out[:, :, -8:-4])
    torch.testing.assert_close(y.grad[:, :, 8:16], y.grad[:, :, -16:-8])
    part = y[:, :, :16].detach().to(memory_format=torch.preserve_format)
    torch.testing.assert_close(
        out[:, :, :7].double(),
        by_torch(part.double(), 0.01, COSMOFLOW)[:, :, :7],
        rtol=2**-7,
        atol=1e-3,
    )
