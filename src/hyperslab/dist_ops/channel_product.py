"""Products by weights that are cut over ranks, during which messages travel.

A product (a convolution, a dense layer) sums over channels and makes filters. A rank that keeps
filters multiplies the channels it has while those of the others come; one that keeps channels
first makes what belongs to others, which leaves while it makes its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.fetch import add_returned, fetch, post_fetch, post_return, reduce_scatter
from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops.cut_weight import divide
from hyperslab.kernels.conv import Convolution
from hyperslab.layout import Box, Exchange


@dataclass(frozen=True)
class Product(ABC):
    """What is multiplied, and where channels and filters lie."""

    dim: int
    """Of the input that holds channels, and of the output that holds filters."""
    weight_channels: int
    """The dim of the weight that holds channels."""
    weight_filters: int

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def weight_grad_(
        self, into: Tensor, grad: Tensor, x: Tensor, num: int, *, adds: bool = False
    ) -> None:
        """Writes the gradient of the weight, divided by ``num``, or adds it to what is there."""


@dataclass(frozen=True)
class ConvProduct(Product):
    """A convolution of one group, on pieces that have their whole extents in space."""

    convolution: Convolution

    @classmethod
    def of(cls, convolution: Convolution) -> Self:
        channels, filters = (0, 1) if convolution.transposed else (1, 0)
        return cls(1, channels, filters, convolution)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.convolution.run(x, weight, None)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        found = self.convolution.run_backward(grad, x, weight, (True, False, False))[0]
        assert found is not None
        return found

    def weight_grad_(
        self, into: Tensor, grad: Tensor, x: Tensor, num: int, *, adds: bool = False
    ) -> None:
        found = self.convolution.run_backward(grad, x, into, (False, True, False))[1]
        assert found is not None
        if adds:
            into.add_(found, alpha=1 / num)
        else:
            torch.div(found, num, out=into)


class DenseProduct(Product):
    """``x @ weight.T``."""

    @classmethod
    def of(cls, ndim: int) -> Self:
        return cls(ndim - 1, 1, 0)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def input_grad(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight.conj()

    def weight_grad_(
        self, into: Tensor, grad: Tensor, x: Tensor, num: int, *, adds: bool = False
    ) -> None:
        num_rows = math.prod(x.shape[:-1])
        filters, channels = (t.reshape(num_rows, t.shape[-1]) for t in (grad, x))
        torch.addmm(into, filters.T, channels.conj(), beta=adds, alpha=1 / num, out=into)


def dense_product(x: Tensor, weight: Tensor, num: int) -> Tensor:
    """``x @ weight.T``, where the gradient of ``weight`` is to be divided by ``num``."""
    if num == 1:
        return F.linear(x, weight)
    out: Tensor = _WholeProduct.apply(x, weight, num, DenseProduct.of(x.ndim))  # type: ignore[no-untyped-call]
    return out


class _WholeProduct(Function):
    """All at once, when no message travels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, num: int, product: Product) -> Tensor:
        ctx.num, ctx.product = num, product
        ctx.save_for_backward(x, weight)
        return product.run(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product, wants = ctx.product, ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # for a gradient of this gradient
            x, weight = x.view_as(x), weight.view_as(weight)
            return (*_grads(product.run(x, weight), grad, (x, weight), wants, ctx.num), None, None)
        grad_x = product.input_grad(grad, x, weight) if wants[0] else None
        grad_weight = torch.empty_like(weight) if wants[1] else None
        if grad_weight is not None:
            product.weight_grad_(grad_weight, grad, x, ctx.num)
        return grad_x, grad_weight, None, None


def gather_product(
    x: Tensor, weight: Tensor, num: int, exchange: Exchange, product: Product, mesh: Mesh
) -> Tensor:
    """The product of all channels, of which ``x`` has some, by this rank's filters.

    ``exchange`` brings the others, and nothing else. The gradient of ``weight`` is divided by
    ``num``. Collective over ``mesh``.
    """
    out: Tensor = _GatherProduct.apply(x, weight, num, exchange, product, mesh)  # type: ignore[no-untyped-call]
    return out


class _GatherProduct(Function):
    """Backward: gradients of received channels leave before the others are computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        num: int,
        exchange: Exchange,
        product: Product,
        mesh: Mesh,
    ) -> Tensor:
        ctx.num, ctx.exchange, ctx.product, ctx.mesh = num, exchange, product, mesh
        pending = post_fetch(x, exchange, mesh)
        out = product.run(x, _of_channels(weight, exchange.kept, ctx))
        received = pending.wait()
        for message, piece in zip(exchange.receives, received, strict=True):
            out += product.run(piece, _of_channels(weight, message.box, ctx))
        ctx.save_for_backward(x, weight, *received)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *received = ctx.saved_tensors
        exchange, product, mesh = ctx.exchange, ctx.product, ctx.mesh
        wants: tuple[bool, bool] = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # for a gradient of this gradient
            x, weight = x.view_as(x), weight.view_as(weight)
            out = product.run(fetch(x, exchange, mesh), weight)
            return (*_grads(out, grad, (x, weight), wants, ctx.num), None, None, None, None)
        boxes = [message.box for message in exchange.receives]
        pending = None
        if wants[0]:
            leaving = [
                product.input_grad(grad, piece, _of_channels(weight, box, ctx))
                for box, piece in zip(boxes, received, strict=True)
            ]
            pending = post_return(leaving, exchange, x.dtype, mesh)
        grad_x, grad_weight = None, None
        if wants[1]:
            grad_weight = torch.empty_like(weight)
            pieces = zip((exchange.kept, *boxes), (x, *received), strict=True)
            for box, piece in pieces:
                product.weight_grad_(_of_channels(grad_weight, box, ctx), grad, piece, ctx.num)
        if pending:
            grad_x = product.input_grad(grad, x, _of_channels(weight, exchange.kept, ctx))
            add_returned(grad_x, pending.wait(), exchange)
        return grad_x, grad_weight, None, None, None, None


def _of_channels(weight: Tensor, box: Box, ctx: Any) -> Tensor:
    """The part of ``weight`` for the channels in ``box``."""
    product: Product = ctx.product
    first, span = ctx.exchange.wanted.spans[product.dim].start, box.spans[product.dim]
    return weight.narrow(product.weight_channels, span.start - first, span.size)


def scatter_product(
    x: Tensor, weight: Tensor, num: int, exchange: Exchange, product: Product, mesh: Mesh
) -> Tensor:
    """This rank's part of the sum over ranks of products of the channels that each has.

    ``exchange.wanted`` is what this rank makes, ``exchange.owned`` what it gets: other filters or
    other samples. The gradient of ``weight`` is divided by ``num``. Collective over ``mesh``.
    """
    out: Tensor = _ScatterProduct.apply(x, weight, num, exchange, product, mesh)  # type: ignore[no-untyped-call]
    return out


class _ScatterProduct(Function):
    """Backward: gradients by what this rank owns are computed while those of others come."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        num: int,
        exchange: Exchange,
        product: Product,
        mesh: Mesh,
    ) -> Tensor:
        ctx.num, ctx.exchange, ctx.product, ctx.mesh = num, exchange, product, mesh
        ctx.save_for_backward(x, weight)
        leaving = [
            product.run(*_parts((x, weight), message.box, ctx)) for message in exchange.receives
        ]
        pending = post_return(leaving, exchange, x.dtype, mesh)
        out = product.run(*_parts((x, weight), exchange.kept, ctx))
        add_returned(out, pending.wait(), exchange)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        exchange, product, mesh = ctx.exchange, ctx.product, ctx.mesh
        wants: tuple[bool, bool] = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            x, weight = x.view_as(x), weight.view_as(weight)
            out = reduce_scatter(product.run(x, weight), exchange, mesh)
            return (*_grads(out, grad, (x, weight), wants, ctx.num), None, None, None, None)
        pending = post_fetch(grad, exchange, mesh)
        totals = (
            torch.empty_like(x) if wants[0] else None,
            torch.empty_like(weight) if wants[1] else None,
        )
        _add_grads(totals, grad, (x, weight), exchange.kept, ctx, is_first=True)
        for message, piece in zip(exchange.receives, pending.wait(), strict=True):
            _add_grads(totals, piece, (x, weight), message.box, ctx)
        return (*totals, None, None, None, None)


def _parts(operands: tuple[Tensor, Tensor], box: Box, ctx: Any) -> tuple[Tensor, Tensor]:
    """Of input and weight, what makes ``box`` of the output."""
    x, weight = operands
    return x[_rows(box, ctx)], _of_filters(weight, box, ctx)


def _rows(box: Box, ctx: Any) -> tuple[slice, ...]:
    return box.slices_in(ctx.exchange.wanted)[: ctx.product.dim]


def _of_filters(weight: Tensor, box: Box, ctx: Any) -> Tensor:
    product: Product = ctx.product
    first, span = ctx.exchange.wanted.spans[product.dim].start, box.spans[product.dim]
    return weight.narrow(product.weight_filters, span.start - first, span.size)


def _add_grads(
    totals: tuple[Tensor | None, Tensor | None],
    grad: Tensor,
    operands: tuple[Tensor, Tensor],
    box: Box,
    ctx: Any,
    *,
    is_first: bool = False,
) -> None:
    """Adds to the gradients of input and weight what the gradient of ``box`` says of them.

    Boxes have filters or samples of their own, and so parts of one of both gradients.
    """
    product, (grad_x, grad_weight) = ctx.product, totals
    has_own_filters = box.spans[product.dim] != ctx.exchange.wanted.spans[product.dim]
    piece, part = _parts(operands, box, ctx)
    if grad_x is not None:
        into, found = grad_x[_rows(box, ctx)], product.input_grad(grad, piece, part)
        into.add_(found) if has_own_filters and not is_first else into.copy_(found)
    if grad_weight is not None:
        into = _of_filters(grad_weight, box, ctx)
        adds = not has_own_filters and not is_first
        product.weight_grad_(into, grad, piece, ctx.num, adds=adds)


def _grads(
    out: Tensor, grad: Tensor, operands: tuple[Tensor, Tensor], wants: tuple[bool, bool], num: int
) -> list[Tensor | None]:
    wanted = [t for t, wants_it in zip(operands, wants, strict=True) if wants_it]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
    grad_x, grad_weight = (next(found) if wants_it else None for wants_it in wants)
    return [grad_x, None if grad_weight is None else divide(grad_weight, num)]
