"""Convolutions of one process's tensors: by fused kernels where these are faster, else by PyTorch,
in one call or, where that is too large, tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.kernels import few_channels, fused, tiles, torch_conv
from hyperslab.kernels.act_pool import activation_grad
from hyperslab.kernels.few_channels_operands import Packed, pack
from hyperslab.kernels.tiled_conv import Conv
from hyperslab.layout import Window

Wants = tuple[bool, bool, bool]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Those of input, weight and bias."""


class Convolution(NamedTuple):
    """What ``torch.convolution`` takes besides tensors, in its order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def output_shape(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        numbers = x.shape[2:], weight.shape[2:], *self[:3], self.output_padding
        if self.transposed:
            sizes = [
                (n - 1) * s - 2 * p + d * (k - 1) + end + 1
                for n, k, s, p, d, end in zip(*numbers, strict=True)
            ]
            return (x.shape[0], weight.shape[1] * self.groups, *sizes)
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d, _ in zip(*numbers, strict=True)
        ]
        return (x.shape[0], weight.shape[0], *sizes)

    def fits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether it is one call's work. Complex numbers are left to torch."""
        if not self.transposed and _is_small(x, weight, self.padding):
            return True
        numel = max(x.numel(), math.prod(self.output_shape(x, weight)))
        return numel <= tiles.MAX_NUMEL or x.is_complex()

    def is_fused(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether fused kernels convolve ``x`` in ``dtype``."""
        return self._has_kernels(x, weight, dtype) and few_channels.is_faster(weight, dtype)

    def _is_weight_grad_fused(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        has_kernels = self._has_kernels(x, weight, dtype)
        return has_kernels and few_channels.is_weight_grad_faster(weight, dtype)

    def is_replaced(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether other kernels than torch's compute a call in ``dtype``, or its backward pass."""
        return torch_conv.is_avoided(x, weight, dtype) or self._will_fuse(x, weight, dtype)

    def _will_fuse(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether a fused kernel will compute the gradient of ``weight`` in ``dtype``."""
        is_wanted = weight.requires_grad and torch.is_grad_enabled()
        return is_wanted and self._is_weight_grad_fused(x, weight, dtype)

    def _has_kernels(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        return (
            fused.pays(x)
            and not self.transposed
            and not _is_exact(dtype)
            and few_channels.has_short_planes(x, weight)
            and few_channels.is_supported(weight, dtype, self.stride + self.dilation, self.groups)
        )

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.is_complex():
            return self._run_complex(x, weight, bias)
        if self.is_fused(x, weight, weight.dtype):
            return conv_few_channels(x, weight, bias, self.padding)
        if self.fits(x, weight) and not self.is_replaced(x, weight, weight.dtype):
            return torch.convolution(x, weight, bias, *self)
        return _by_parts(x, weight, bias, self)

    def _run_complex(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By the function of a number of dims: ``torch.convolution`` knows real numbers only."""
        stride, padding, dilation, transposed, output_padding, groups = self
        name = f"conv{'_transpose' if transposed else ''}{x.ndim - 2}d"
        numbers = (output_padding, groups, dilation) if transposed else (dilation, groups)
        out: Tensor = getattr(torch, name)(x, weight, bias, stride, padding, *numbers)
        return out

    def run_backward(self, grad: Tensor, x: Tensor, weight: Tensor, wants: Wants) -> Grads:
        """The gradients, as far as they are wanted."""
        wants_x, wants_weight, wants_bias = wants
        fuses_x = wants_x and self._is_input_grad_fused(grad, weight)
        fuses_weight = wants_weight and self._is_weight_grad_fused(x, weight, weight.dtype)
        left = (wants_x and not fuses_x, wants_weight and not fuses_weight)
        grad_x, grad_weight, grad_bias = self._run_backward(
            grad, x, weight, (*left, wants_bias and not fuses_weight)
        )
        if fuses_x:
            grad_x = few_channels.input_grad(grad, weight, self.padding)
        if fuses_weight:
            grad_weight, grad_bias = few_channels.weight_grads(
                pack(x, weight, self.padding), grad, weight, want_bias=wants_bias
            )
        return grad_x, grad_weight, grad_bias

    def _is_input_grad_fused(self, grad: Tensor, weight: Tensor) -> bool:
        fitting = all(pad < k for pad, k in zip(self.padding, weight.shape[2:], strict=True))
        return fitting and self.is_fused(grad, weight.transpose(0, 1), weight.dtype)

    def _run_backward(self, grad: Tensor, x: Tensor, weight: Tensor, wants: Wants) -> Grads:
        if not any(wants):
            return None, None, None
        if self.fits(x, weight):
            return self.run_backward_at_once(grad, x, weight, wants)
        wants_x, wants_weight, wants_bias = wants
        return (
            self._tiled_input_grad(grad, x, weight) if wants_x else None,
            self._tiled_weight_grad(grad, x, weight) if wants_weight else None,
            _bias_grad(grad) if wants_bias else None,
        )

    def run_backward_at_once(self, grad: Tensor, x: Tensor, weight: Tensor, wants: Wants) -> Grads:
        """The gradients by one call, whatever the size; they can be differentiated."""
        num_filters = weight.shape[1] * self.groups if self.transposed else weight.shape[0]
        return torch_conv.convolution_backward(grad, x, weight, [num_filters], *self, wants)

    def run_without_autograd(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output by cuDNN, of which autograd records nothing."""
        if self.fits(x, weight):
            return torch_conv.convolution(x, weight, bias, *self)
        conv, sizes = self._conv(weight), self.output_shape(x, weight)[2:]
        run = conv.input_grad if self.transposed else conv.output
        return run(x, weight, bias, sizes)

    def _tiled_input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        conv = self._conv(weight)
        run = conv.output if self.transposed else conv.input_grad
        return run(grad, weight, None, x.shape[2:])

    def _tiled_weight_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ends = (grad, x) if self.transposed else (x, grad)
        return self._conv(weight).weight_grad(*ends, weight)

    def _conv(self, weight: Tensor) -> Conv:
        """The same convolution; of a transposed one, the convolution whose adjoint it is."""
        return Conv(tuple(map(Window, weight.shape[2:], *self[:3])), self.groups)


def _is_small(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> bool:
    """Whether a convolution is one call's work by a bound that costs a comparison.

    Padding makes a dim at most ``1 + 2 * padding`` times as long.
    """
    growth: int = (1 + 2 * max(padding)) ** len(padding)
    return x.numel() * weight.shape[0] * growth <= tiles.MAX_NUMEL


def _is_exact(dtype: torch.dtype) -> bool:
    """Whether products are wanted as exact as float32 has them: fused kernels take TF32."""
    if dtype != torch.float32:
        return False
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return bool(precision != "tf32")


def _bias_grad(grad: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.sum((0, *range(2, grad.ndim)), dtype=wide).to(grad.dtype)


class _ByParts(Function):
    """A convolution that is cut into tiles, or whose gradients are those of other kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.convolution = convolution
        return convolution.run_without_autograd(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        convolution: Convolution = ctx.convolution
        again = torch.is_grad_enabled()  # for a gradient of this gradient
        run = convolution.run_backward_at_once if again else convolution.run_backward
        x, weight = ctx.saved_tensors
        return (*run(grad, x, weight, ctx.needs_input_grad[:3]), None)


_by_parts: Callable[..., Tensor] = _ByParts.apply


def conv_few_channels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    padding: tuple[int, ...] = (0, 0, 0),
    *,
    slope: float = 1.0,
) -> Tensor:
    """The convolution of ``x``, which may have another dtype than ``weight``, by fused kernels.

    Outputs below zero are multiplied by ``slope``, which is not negative.
    """
    out: Tensor = _FewChannels.apply(x, weight, bias, padding, slope)  # type: ignore[no-untyped-call]
    return out


class _FewChannels(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, ...],
        slope: float,
    ) -> Tensor:
        out, packed = few_channels.convolve(x, weight, bias, padding, slope)
        ctx.padding, ctx.slope = padding, slope
        ctx.geometry = packed.geometry
        # Inputs of later layers are packed again: that costs less than keeping them twice.
        kept = packed.memory if packed.geometry.has_room and not x.requires_grad else None
        ctx.save_for_backward(x, weight, kept, out if slope != 1 else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, kept, out = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[:3]
        ones = (1,) * len(ctx.padding)
        convolution = Settings(ones, ones, 1).padded(ctx.padding)
        if torch.is_grad_enabled():  # for a gradient of this gradient
            grad = grad if out is None else activation_grad(grad, out.detach(), ctx.slope)
            wide = x.to(weight.dtype)
            grads = convolution.run_backward_at_once(grad, wide, weight, (wants_x, *wants))
            return (*grads, None, None)
        if kept is not None:
            grad_weight, grad_bias = few_channels.weight_grads(
                Packed(kept, ctx.geometry), grad, weight, out, ctx.slope, want_bias=wants[1]
            )
            return None, grad_weight, grad_bias, None, None
        grad = grad if out is None else activation_grad(grad, out, ctx.slope)
        grad_x, *others = convolution.run_backward(
            grad.to(weight.dtype), x.to(weight.dtype), weight, (wants_x, *wants)
        )
        return (None if grad_x is None else grad_x.to(x.dtype), *others, None, None)


class Settings(NamedTuple):
    """What a convolution needs besides tensors and padding."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def padded(self, padding: tuple[int, ...]) -> Convolution:
        zeros = (0,) * len(padding)
        return Convolution(self.stride, padding, self.dilation, False, zeros, self.groups)

    def fits(self, x: Tensor, weight: Tensor, padding: str | tuple[int, ...]) -> bool:
        """Whether it is one call's work. "same" and "valid" padding make no dim longer."""
        if isinstance(padding, str):
            numel = x.shape[0] * math.prod(x.shape[2:]) * max(x.shape[1], weight.shape[0])
            return numel <= tiles.MAX_NUMEL or x.is_complex()
        return _is_small(x, weight, padding) or self.padded(padding).fits(x, weight)

    def is_replaced(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether other kernels than torch's compute a call in ``dtype``, or its backward pass."""
        return self.padded(self.stride).is_replaced(x, weight, dtype)  # with whatever padding

    def output_shape(self, x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> tuple[int, ...]:
        return self.padded(padding).output_shape(x, weight)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]
    ) -> Tensor:
        return self.padded(padding).run(x, weight, bias)

    def run_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, ...], *, wants: Wants
    ) -> Grads:
        """The gradients, as far as they are wanted."""
        return self.padded(padding).run_backward(grad, x, weight, wants)
