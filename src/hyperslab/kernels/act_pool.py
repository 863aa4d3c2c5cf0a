"""An activation and the pool after it, in one pass over memory.

What a convolution wrote is read once, and the pooled tensor written. The backward pass reads the
gradient of that, and a bit for each number (average) or a byte for each output (maximum).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hyperslab.errors import ConfigError
from hyperslab.kernels.act_pool_plan import (
    TUNING,
    Pool,
    Rows,
    Tuning,
    backward_cut,
    forward_cut,
    rows_of,
)
from hyperslab.kernels.fused import Launch
from hyperslab.kernels.memory_format import RowsBeside, empty_with_rows, memory_format_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_KERNEL = 3
_MAX_ROW = 2**31  # numbers: inside a row, offsets are 32-bit


def is_supported(y: Tensor, slope: float, pool: Pool) -> bool:
    """Whether ``activate_and_pool`` can be called."""
    return y.is_cuda and _refusal(y, slope, pool) is None


def activate_and_pool(y: Tensor, slope: float, pool: Pool, rows: RowsBeside = (0, 0)) -> Tensor:
    """The pool of ``y`` where that is positive and of ``slope * y`` elsewhere.

    Sums are in float32 (float64 for that dtype) and rounded once. The result lies in memory as
    ``y`` does: contiguous or channels last, and then with ``rows`` of memory beside it if it is one
    sample. Differentiable once; deterministic.
    """
    if refusal := _refusal(y, slope, pool):
        raise ConfigError(f"no kernel does this activation and pool in one: {refusal}")
    keeps = torch.is_grad_enabled() and y.requires_grad
    out: Tensor = _ActPool.apply(y, float(slope), pool, keeps, rows)  # type: ignore[no-untyped-call]
    return out


def activate(y: Tensor, slope: float, *, in_place: bool = False) -> Tensor:
    """``y`` where that is positive and ``slope * y`` elsewhere, as torch computes it."""
    if slope == 1:
        return y
    if slope == 0:
        return F.relu(y, inplace=in_place)
    return F.leaky_relu(y, slope, inplace=in_place)


def activation_grad(grad: Tensor, activated: Tensor, slope: float) -> Tensor:
    """The gradient of what was ``activated`` with a slope that is not negative."""
    if slope == 1:
        return grad
    if slope == 0:
        return torch.ops.aten.threshold_backward(grad, activated, 0.0)  # type: ignore[no-any-return]
    backward = torch.ops.aten.leaky_relu_backward
    return backward(grad, activated, slope, self_is_result=True)  # type: ignore[no-any-return]


def _refusal(y: Tensor, slope: float, pool: Pool) -> str | None:
    """What is asked for and cannot be done."""
    is_image = y.ndim in (4, 5)
    if is_image and not y.is_contiguous() and memory_format_of(y) is torch.contiguous_format:
        return f"strides of {y.stride()}, neither contiguous nor channels last"
    return _refused(y.dtype, y.shape, slope, pool)


@lru_cache(maxsize=1024)
def _refused(dtype: torch.dtype, shape: torch.Size, slope: float, pool: Pool) -> str | None:
    if dtype not in _DTYPES:
        return f"a tensor of {dtype}"
    if len(shape) not in (4, 5) or any(len(sizes) != len(shape) - 2 for sizes in pool[1:4]):
        return f"{pool} over a tensor of shape {tuple(shape)}"
    if pool.mode not in ("avg", "max") or not all(map(_fits, *pool[1:4])):
        return f"{pool}: kernels go to 3, strides to one more, padding to half the kernel"
    if min(shape) == 0 or min(pool.output_shape(shape)) < 1:
        return f"{pool} over a tensor of shape {tuple(shape)} has no output"
    if shape[-1] * shape[1] >= _MAX_ROW:
        return f"rows of {shape[-1]} x {shape[1]} numbers"
    if not math.isfinite(slope) or (pool.mode == "max" and slope < 0):
        return f"a slope of {slope} before a pool of mode {pool.mode!r}"
    return None


def _fits(kernel: int, stride: int, padding: int) -> bool:
    return 1 <= kernel <= _MAX_KERNEL and 1 <= stride <= kernel + 1 and 0 <= padding <= kernel // 2


class Call(NamedTuple):
    """An activation and a pool of tensors of one shape, forward and backward, without autograd."""

    shape: torch.Size
    memory_format: torch.memory_format
    slope: float
    pool: Pool

    @classmethod
    def on(cls, y: Tensor, slope: float, pool: Pool) -> Call:
        return cls(y.shape, memory_format_of(y), slope, pool)

    def run(
        self, y: Tensor, *, keeps: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The pooled tensor and, if it ``keeps`` it, what the backward pass needs.

        It is ``out``, if that is given.
        """
        pool, last = self.pool, self.memory_format
        if out is None:
            shape = pool.output_shape(self.shape)
            out = torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=last)
        rows = rows_of(self.shape, last, pool)
        kept = _empty_kept(rows, out, self.slope, pool) if keeps else None
        tuning = TUNING[pool.mode, "forward"]
        _launch("forward", rows, tuning, self.slope, pool, y.dtype, y.device)(y, out, kept)
        return out, kept

    def run_backward(self, grad: Tensor, kept: Tensor | None) -> Tensor:
        """The gradient of y, which nobody else holds."""
        pool, last = self.pool, self.memory_format
        grad = grad.clone() if grad._is_zerotensor() else grad  # which has no memory
        grad = grad.contiguous(memory_format=last)
        out = torch.empty(self.shape, dtype=grad.dtype, device=grad.device, memory_format=last)
        rows = rows_of(self.shape, last, pool)
        key = rows, TUNING[pool.mode, "backward"], self.slope, pool, grad.dtype, grad.device
        _launch("backward", *key)(grad, kept, out)
        return out


class _ActPool(Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, slope: float, pool: Pool, keeps: bool, rows: RowsBeside
    ) -> Tensor:
        call = ctx.call = Call.on(y, slope, pool)
        out = None
        if any(rows) and y.shape[0] == 1 and call.memory_format is not torch.contiguous_format:
            out = empty_with_rows(pool.output_shape(y.shape), rows, y.dtype, y.device)
        out, kept = call.run(y, keeps=keeps, out=out)
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (kept,) = ctx.saved_tensors
        home: Tensor = ctx.call.run_backward(grad, kept)
        return home, None, None, None, None


def _empty_kept(rows: Rows, out: Tensor, slope: float, pool: Pool) -> Tensor | None:
    """Room for the signs of y, or for the places of maxima."""
    if pool.mode == "max":
        return torch.empty(out.numel(), dtype=torch.uint8, device=out.device)
    if slope == 1:
        return None
    return torch.empty(rows.sign_bytes, dtype=torch.uint8, device=out.device)


@lru_cache(maxsize=1024)
def _launch(
    way: Literal["forward", "backward"],
    rows: Rows,
    tuning: Tuning,
    slope: float,
    pool: Pool,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    from hyperslab.kernels.gpu import average, maximum

    cut = (forward_cut if way == "forward" else backward_cut)(rows, dtype.itemsize, tuning)
    constants: dict[str, Any] = {
        "channels": rows.channels, "slope": slope, "kernel": rows.kernel,
        "stride": rows.stride, "padding": rows.padding, **cut.block,
    }  # fmt: skip
    if pool.mode == "avg":
        kernel = getattr(average, f"average_{way}")
        constants |= {"bits": rows.bits, "counts_padding": pool.count_include_pad}
    else:
        kernel = getattr(maximum, f"maximum_{way}")
    sizes = (*rows.extent, *rows.outputs, cut.chunks, cut.groups, cut.cols)
    return Launch(kernel, (cut.programs,), device, sizes, constants, cut.options)
