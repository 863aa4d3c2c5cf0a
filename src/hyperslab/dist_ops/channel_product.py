"""Products by weights that are cut over ranks, during which messages travel.

A product (a convolution, a dense layer) sums over channels and makes filters. A rank that keeps
filters multiplies the channels it has while those of the others come; one that keeps channels
first makes what belongs to others, which leaves while it makes its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.fetch import add_returned, fetch, post_fetch, post_return, reduce_scatter
from hyperslab.comm.mesh import Mesh
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
    def run_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of input and weight, as far as they are wanted."""


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

    def run_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.convolution.run_backward(grad, x, weight, (*wants, False))[:2]


class DenseProduct(Product):
    """``x @ weight.T``."""

    @classmethod
    def of(cls, ndim: int) -> Self:
        return cls(ndim - 1, 1, 0)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def run_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, wants: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        wants_x, wants_weight = wants
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if wants_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
        )


def gather_product(
    x: Tensor, weight: Tensor, exchange: Exchange, product: Product, mesh: Mesh
) -> Tensor:
    """The product of all channels, of which ``x`` has some, by this rank's filters.

    ``exchange`` brings the others, and nothing else. Collective over ``mesh``.
    """
    out: Tensor = _GatherProduct.apply(x, weight, exchange, product, mesh)  # type: ignore[no-untyped-call]
    return out


class _GatherProduct(Function):
    """Backward: gradients of received channels leave before the others are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, product: Product, mesh: Mesh
    ) -> Tensor:
        ctx.exchange, ctx.product, ctx.mesh = exchange, product, mesh
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
            return (*_grads(out, grad, (x, weight), wants), None, None, None)
        boxes = [message.box for message in exchange.receives]
        weights = [_of_channels(weight, box, ctx) for box in boxes]
        found = [
            product.run_backward(grad, piece, part, (wants[0], False))[0]
            for piece, part in zip(received, weights, strict=True)
        ]
        pieces = [each for each in found if each is not None]
        pending = post_return(pieces, exchange, x.dtype, mesh) if wants[0] else None
        own = _of_channels(weight, exchange.kept, ctx)
        grad_x, own_grad = product.run_backward(grad, x, own, wants)
        grad_weight = None
        if own_grad is not None:
            grad_weight = torch.empty_like(weight)
            _of_channels(grad_weight, exchange.kept, ctx).copy_(own_grad)
            for box, piece, part in zip(boxes, received, weights, strict=True):
                more = product.run_backward(grad, piece, part, (False, True))[1]
                _of_channels(grad_weight, box, ctx).copy_(more)
        if pending and grad_x is not None:
            add_returned(grad_x, pending.wait(), exchange)
        return grad_x, grad_weight, None, None, None


def _of_channels(weight: Tensor, box: Box, ctx: Any) -> Tensor:
    """The part of ``weight`` for the channels in ``box``."""
    product: Product = ctx.product
    first, span = ctx.exchange.wanted.spans[product.dim].start, box.spans[product.dim]
    return weight.narrow(product.weight_channels, span.start - first, span.size)


def scatter_product(
    x: Tensor, weight: Tensor, exchange: Exchange, product: Product, mesh: Mesh
) -> Tensor:
    """This rank's part of the sum over ranks of products of the channels that each has.

    ``exchange.wanted`` is what this rank makes, ``exchange.owned`` what it gets: other filters or
    other samples. Collective over ``mesh``.
    """
    out: Tensor = _ScatterProduct.apply(x, weight, exchange, product, mesh)  # type: ignore[no-untyped-call]
    return out


class _ScatterProduct(Function):
    """Backward: gradients by what this rank owns are computed while those of others come."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, exchange: Exchange, product: Product, mesh: Mesh
    ) -> Tensor:
        ctx.exchange, ctx.product, ctx.mesh = exchange, product, mesh
        ctx.save_for_backward(x, weight)
        leaving = [
            product.run(*_operands(x, weight, message.box, ctx)) for message in exchange.receives
        ]
        pending = post_return(leaving, exchange, x.dtype, mesh)
        out = product.run(*_operands(x, weight, exchange.kept, ctx))
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
            return (*_grads(out, grad, (x, weight), wants), None, None, None)
        pending = post_fetch(grad, exchange, mesh)
        totals = [
            torch.zeros_like(t) if w else None for t, w in zip((x, weight), wants, strict=True)
        ]
        _add_grads(totals, grad, exchange.kept, x, weight, ctx)
        for message, piece in zip(exchange.receives, pending.wait(), strict=True):
            _add_grads(totals, piece, message.box, x, weight, ctx)
        return (*totals, None, None, None)


def _operands(x: Tensor, weight: Tensor, box: Box, ctx: Any) -> tuple[Tensor, Tensor]:
    """The parts of input and weight that make ``box`` of the output."""
    product: Product = ctx.product
    where = box.slices_in(ctx.exchange.wanted)
    filters = where[product.dim]
    num = filters.stop - filters.start
    return x[where[: product.dim]], weight.narrow(product.weight_filters, filters.start, num)


def _add_grads(
    totals: Sequence[Tensor | None], grad: Tensor, box: Box, x: Tensor, weight: Tensor, ctx: Any
) -> None:
    """Adds to the gradients of input and weight what the gradient of ``box`` says of them."""
    wants = totals[0] is not None, totals[1] is not None
    grads = ctx.product.run_backward(grad, *_operands(x, weight, box, ctx), wants)
    into = [t if total is None else total for t, total in zip((x, weight), totals, strict=True)]
    parts = _operands(into[0], into[1], box, ctx)
    for part, more in zip(parts, grads, strict=True):
        if more is not None:
            part += more


def _grads(
    out: Tensor, grad: Tensor, operands: tuple[Tensor, Tensor], wants: tuple[bool, bool]
) -> list[Tensor | None]:
    wanted = [t for t, wants_it in zip(operands, wants, strict=True) if wants_it]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True) if wanted else ())
    return [next(found) if wants_it else None for wants_it in wants]
