"""The one collective: every rank names the box it needs, and gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.graph import recompute_first, save_marker
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.message_spans import Awaited, recorded
from hyperslab.comm.messages import Posted, plain_memory, post_messages, post_on_device, traffic
from hyperslab.kernels import faces
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.layout import Assembly, Exchange, Message
from hyperslab.torch_private import is_traced
from hyperslab.trace import Category, active

_FETCHING = "fetching its part of a split tensor"
_RETURNING = "returning the gradient of a split tensor"
_SHORT = {_FETCHING: "boxes", _RETURNING: "gradients of boxes"}
"""In a trace."""


def fetch(x: Tensor, exchange: Exchange, mesh: Mesh, *, fill: float = 0.0) -> Tensor:
    """The box ``exchange.wanted`` of the tensor of which ``x`` is this rank's piece.

    What lies outside the tensor is ``fill``. Where nothing moves, ``x`` itself or a view of it. The
    box is on the device of ``x``, which need not be that of ``mesh``.

    Collective over ``mesh``. Differentiable: the backward pass sends each box's gradient home,
    where the boxes are added.
    """
    if x.device != mesh.device:  # as x.cpu() is
        return fetch(x.to(mesh.device), exchange, mesh, fill=fill).to(x.device)
    if exchange.idle and exchange.kept == exchange.wanted:
        return x if exchange.keeps_all else x[exchange.kept_from]
    out: Tensor = _Fetch.apply(x, exchange, mesh, fill)  # type: ignore[no-untyped-call]
    return out


class _Fetch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, mesh: Mesh, fill: float) -> Tensor:
        ctx.exchange, ctx.mesh = exchange, mesh
        save_marker(ctx, x)
        received = post_fetch(x, exchange, mesh).wait()
        if exchange.stays:
            return x.view_as(x)
        return _assembled(x, received, exchange, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        recompute_first(ctx)
        if torch.is_grad_enabled():  # for a gradient of this gradient
            home = _Return.apply(grad, ctx.exchange, ctx.mesh)  # type: ignore[no-untyped-call]
            return home, None, None, None
        return return_home(grad, ctx.exchange, ctx.mesh), None, None, None


def reduce_scatter(x: Tensor, exchange: Exchange, mesh: Mesh) -> Tensor:
    """The adjoint of ``fetch``: what all ranks made of this rank's box ``exchange.owned``, added.

    ``x`` is what this rank made, the box ``exchange.wanted``, which lies inside the tensor.

    Collective over ``mesh``. Differentiable: the backward pass fetches.
    """
    if exchange.idle and exchange.stays:
        return x
    out: Tensor = _ReduceScatter.apply(x, exchange, mesh)  # type: ignore[no-untyped-call]
    return out


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, mesh: Mesh) -> Tensor:
        ctx.exchange, ctx.mesh = exchange, mesh
        save_marker(ctx, x)
        home = return_home(x, exchange, mesh)
        is_view = exchange.keeps_all and not exchange.sends
        return home.clone() if is_view else home  # autograd lets nobody write into such a view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        return fetch(grad, ctx.exchange, ctx.mesh), None, None


class _Return(Function):
    """The adjoint of a fetch, whose own adjoint is the fetch."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, exchange: Exchange, mesh: Mesh) -> Tensor:
        ctx.exchange, ctx.mesh = exchange, mesh
        return return_home(grad, exchange, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return fetch(grad, ctx.exchange, ctx.mesh), None, None


def return_home(grad: Tensor, exchange: Exchange, mesh: Mesh, *, may_write: bool = False) -> Tensor:
    """The gradient of this rank's piece, from those of what all ranks fetched.

    Collective over ``mesh``. Nothing is copied where it ``may_write`` into ``grad``.
    """
    grad = plain_memory(grad)
    sends, receives = exchange.receives, exchange.sends
    pending = _post_boxes(grad, exchange.returned, sends, receives, mesh, _RETURNING)
    if exchange.keeps_all:
        home = grad[exchange.kept_to]
        home = home.clone() if exchange.sends and not may_write else home
    else:
        home = grad.new_zeros(exchange.owned.shape)
        home[exchange.kept_from] = grad[exchange.kept_to]
    add_returned(home, pending.wait(), exchange)
    return home


def _assembled(x: Tensor, received: list[Tensor], exchange: Exchange, fill: float) -> Tensor:
    """The wanted box, made of what lies outside the tensor, what is here and what was received."""
    is_contiguous = memory_format_of(x) is torch.contiguous_format
    if exchange.row and is_contiguous and not faces.has_kernel(x):
        # One call for what lies in a row, as a halo along one dim does: small halos are frequent.
        parts = [x.new_full([s.stop - s.start for s in w], fill) for w in exchange.outside]
        parts += [x[exchange.kept_from]] if exchange.kept else []
        parts += received
        return torch.cat([parts[number] for number in exchange.row.order], exchange.row.dim)
    return faces.assemble(x, received, exchange.assembled, fill=fill)[0]


Boxes = Awaited[list[Tensor]]
"""Messages that were posted; waiting for them gives what was received."""


def post_fetch(x: Tensor, exchange: Exchange, mesh: Mesh) -> Boxes:
    """Sends what others want of ``x`` and asks for what this rank wants, without waiting."""
    x = plain_memory(x)
    return _post_boxes(x, exchange.sent, exchange.sends, exchange.receives, mesh, _FETCHING)


def _post_boxes(
    x: Tensor,
    boxes: Assembly,
    sends: Sequence[Message],
    receives: Sequence[Message],
    mesh: Mesh,
    doing: str,
) -> Boxes:
    """``post_messages`` of ``boxes`` of ``x``."""
    return _recorded(
        lambda: _posted_boxes(x, boxes, sends, receives, mesh, doing),
        sends,
        receives,
        x.dtype,
        mesh,
        doing,
    )


def _recorded(
    post: Callable[[], Posted],
    sends: Sequence[Message],
    receives: Sequence[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    doing: str,
) -> Boxes:
    """What ``post`` brings; a trace has the bytes that are received."""
    if active.recorder is None or not (sends or receives) or is_traced():
        return post()
    nbytes = sum(message.box.numel for message in receives) * dtype.itemsize
    return recorded(post, Category.halo, _SHORT[doing], nbytes, mesh.device)


def _posted_boxes(
    x: Tensor,
    boxes: Assembly,
    sends: Sequence[Message],
    receives: Sequence[Message],
    mesh: Mesh,
    doing: str,
) -> Posted:
    if mesh.transport is None or is_traced() or not (sends or receives):
        pieces = faces.pack(x, boxes) if x.is_cuda else [x[piece.of] for piece in boxes.pieces]
        return post_messages(pieces, sends, receives, x.dtype, mesh, doing)
    if traffic.is_counted:
        traffic.add_boxes(sends, x.dtype.itemsize)
    return post_on_device(
        lambda transport, limit: transport.post_boxes(x, boxes, sends, receives, limit), mesh, doing
    )


def post_pieces(
    pieces: Sequence[Tensor], exchange: Exchange, dtype: torch.dtype, mesh: Mesh
) -> Boxes:
    """``post_fetch`` of a tensor of which only ``pieces``, which others want, need exist."""
    return _post_pieces(pieces, exchange.sends, exchange.receives, dtype, mesh, _FETCHING)


def post_return(
    pieces: Sequence[Tensor], exchange: Exchange, dtype: torch.dtype, mesh: Mesh
) -> Boxes:
    """The adjoint of ``post_fetch``: sends gradients of received boxes home, without waiting."""
    return _post_pieces(pieces, exchange.receives, exchange.sends, dtype, mesh, _RETURNING)


def _post_pieces(
    pieces: Sequence[Tensor],
    sends: Sequence[Message],
    receives: Sequence[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    doing: str,
) -> Boxes:
    return _recorded(
        lambda: post_messages(pieces, sends, receives, dtype, mesh, doing),
        sends,
        receives,
        dtype,
        mesh,
        doing,
    )


def add_returned(home: Tensor, returned: Sequence[Tensor], exchange: Exchange) -> None:
    """Adds the gradients that came home to ``home``, the gradient of this rank's piece."""
    faces.add_(home, returned, exchange.sent)
