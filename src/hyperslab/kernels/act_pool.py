"""An activation and the pool after it, in one pass over memory.

What a convolution wrote is read once, and the pooled tensor written. The backward pass reads the
gradient of that, and a bit for each number (average) or a byte for each output (maximum).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.errors import ConfigError
from hyperslab.kernels.act_pool_plan import TUNING, Cut, Pool, Rows, backward_cut, forward_cut
from hyperslab.kernels.memory import channels_last, empty_like_format, memory_format_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_KERNEL = 3
_MAX_ROW = 2**31  # numbers: inside a row, offsets are 32-bit


def is_supported(y: Tensor, slope: float, pool: Pool) -> bool:
    """Whether ``activate_and_pool`` can be called."""
    return y.is_cuda and _refusal(y, slope, pool) is None


def activate_and_pool(y: Tensor, slope: float, pool: Pool) -> Tensor:
    """The pool of ``y`` where that is positive and of ``slope * y`` elsewhere.

    Sums are in float32 (float64 for that dtype) and rounded once. The result lies in memory as
    ``y`` does: contiguous or channels last. Differentiable once; deterministic.
    """
    if refusal := _refusal(y, slope, pool):
        raise ConfigError(f"no kernel does this activation and pool in one: {refusal}")
    keeps = torch.is_grad_enabled() and y.requires_grad
    out: Tensor = _ActPool.apply(y, float(slope), pool, keeps)  # type: ignore[no-untyped-call]
    return out


def _refusal(y: Tensor, slope: float, pool: Pool) -> str | None:
    """What is asked for and cannot be done."""
    if y.dtype not in _DTYPES:
        return f"a tensor of {y.dtype}"
    if y.ndim not in (4, 5) or any(len(sizes) != y.ndim - 2 for sizes in pool[1:4]):
        return f"{pool} over a tensor of shape {tuple(y.shape)}"
    if not y.is_contiguous() and not y.is_contiguous(memory_format=channels_last(y.ndim)):
        return f"strides of {y.stride()}, neither contiguous nor channels last"
    if pool.kind not in ("avg", "max") or not all(map(_fits, *pool[1:4])):
        return f"{pool}: kernels go to 3, strides to one more, padding to half the kernel"
    if min(y.shape) == 0 or min(pool.output_shape(y)) < 1:
        return f"{pool} over a tensor of shape {tuple(y.shape)} has no output"
    if y.shape[-1] * y.shape[1] >= _MAX_ROW:
        return f"rows of {y.shape[-1]} x {y.shape[1]} numbers"
    if not math.isfinite(slope) or (pool.kind == "max" and slope < 0):
        return f"a slope of {slope} before a pool of kind {pool.kind!r}"
    return None


def _fits(kernel: int, stride: int, padding: int) -> bool:
    return 1 <= kernel <= _MAX_KERNEL and 1 <= stride <= kernel + 1 and 0 <= padding <= kernel // 2


class _ActPool(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slope: float, pool: Pool, keeps: bool) -> Tensor:
        rows = Rows.of(y, pool)
        out = empty_like_format(pool.output_shape(y), y)
        kept = _empty_kept(rows, out, slope, pool) if keeps else None
        cut = forward_cut(rows, y.itemsize, TUNING[pool.kind, "forward"])
        _launch("forward", (y, out, kept), rows, cut, slope, pool)
        if keeps:
            ctx.save_for_backward(kept)
            ctx.rows, ctx.slope, ctx.pool = rows, slope, pool
            ctx.shape, ctx.memory_format = y.shape, memory_format_of(y)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.contiguous(memory_format=ctx.memory_format)
        out = torch.empty(
            ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.memory_format
        )
        cut = backward_cut(ctx.rows, grad.itemsize, TUNING[ctx.pool.kind, "backward"])
        (kept,) = ctx.saved_tensors
        _launch("backward", (grad, kept, out), ctx.rows, cut, ctx.slope, ctx.pool)
        return out, None, None, None


def _empty_kept(rows: Rows, out: Tensor, slope: float, pool: Pool) -> Tensor | None:
    """Room for the signs of y, or for the places of maxima."""
    if pool.kind == "max":
        return torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
    if slope == 1:
        return None
    return torch.empty(rows.sign_bytes, dtype=torch.uint8, device=out.device)


def _launch(
    way: str,
    tensors: tuple[Tensor | None, ...],
    rows: Rows,
    cut: Cut,
    slope: float,
    pool: Pool,
) -> None:
    from hyperslab.kernels.gpu import average, maximum

    constants: dict[str, Any] = {
        "channels": rows.channels, "slope": slope, "kernel": rows.kernel,
        "stride": rows.stride, "padding": rows.padding, **cut.block,
    }  # fmt: skip
    if pool.kind == "avg":
        kernel = getattr(average, f"average_{way}")
        constants |= {"bits": rows.bits, "counts_padding": pool.count_include_pad}
    else:
        kernel = getattr(maximum, f"maximum_{way}")
    sizes = (*rows.extent, *rows.outputs, cut.chunks, cut.groups, cut.cols)
    with torch.cuda.device_of(tensors[0]):
        kernel[(cut.programs,)](*tensors, *sizes, **constants, **cut.options)
