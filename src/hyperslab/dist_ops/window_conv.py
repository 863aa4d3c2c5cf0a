"""A convolution in one call on a piece and the halo beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.fetch import fetch, post_fetch, return_home
from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops.halo_conv import differentiable_grads
from hyperslab.kernels import faces
from hyperslab.kernels.conv import Settings
from hyperslab.kernels.face_plans import LARGE
from hyperslab.kernels.memory_format import RowsBeside, has_rows, window_around
from hyperslab.layout import Box, Exchange
from hyperslab.torch_private import has_saved_tensor_hooks, is_traced

MOST_BOXES = 4096
_ROWS: dict[tuple[int, Box], RowsBeside] = {}
"""How many rows convolutions have read beside pieces, by the mesh's number and the piece's box."""


def rows_beside(box: Box, mesh: Mesh) -> RowsBeside:
    """How many rows of memory should lie beside a piece of that box, for the convolution after it.

    That is learned in the first pass.
    """
    return _ROWS.get((mesh.number, box), (0, 0))


def copies_piece(x: Tensor, exchange: Exchange, mesh: Mesh) -> bool:
    """Whether ``window_conv`` will copy pieces like ``x``, beside which it has no room.

    In the first pass it does, and asks for room.
    """
    rows = _rows(x, exchange)
    if rows is None:
        return True
    return not has_rows(x, rows) and (mesh.number, exchange.owned) in _ROWS


def window_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    exchange: Exchange,
    padding: tuple[int, ...],
    settings: Settings,
    mesh: Mesh,
) -> Tensor:
    """The convolution of the box ``exchange.wanted``, of which ``x`` is this rank's piece.

    Where ``x`` has rows of memory beside it, the halo is received there; else both are copied.
    Collective over ``mesh``. Differentiable, as often as one likes.
    """
    rows = _rows(x, exchange)
    window = None if rows is None else window_around(x, rows)
    if window is not None:
        out: Tensor = _WindowConv.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, window, exchange, padding, settings, mesh
        )
        return out
    if rows is not None:
        _ask_for(rows, exchange.owned, mesh)
    return settings.run(fetch(x, exchange, mesh), weight, bias, padding)


def _ask_for(rows: RowsBeside, box: Box, mesh: Mesh) -> None:
    if len(_ROWS) >= MOST_BOXES:
        _ROWS.clear()
    before = rows_beside(box, mesh)
    _ROWS[mesh.number, box] = max(before[0], rows[0]), max(before[1], rows[1])


def _rows(x: Tensor, exchange: Exchange) -> RowsBeside | None:
    """How many rows of the wanted box lie beside ``x``, if they can be received there.

    A checkpoint must save the same when it computes again, and by then rows may have been learned.
    """
    if x.numel() < LARGE or is_traced() or has_saved_tensor_hooks():
        return None
    owned, wanted = exchange.owned.spans, exchange.wanted.spans
    others = [dim for dim in range(len(owned)) if dim != 2 and owned[dim] != wanted[dim]]
    if others or not exchange.keeps_all or owned[0].size != 1:
        return None
    return owned[2].start - wanted[2].start, wanted[2].stop - owned[2].stop


class _WindowConv(Function):
    """The piece is saved besides the window, which costs nothing: they share their memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor,
        exchange: Exchange,
        padding: tuple[int, ...],
        settings: Settings,
        mesh: Mesh,
    ) -> Tensor:
        received = post_fetch(x, exchange, mesh).wait()
        faces.complete_(window, x, received, exchange.assembled)
        ctx.save_for_backward(x, weight, window)
        ctx.exchange, ctx.padding, ctx.settings, ctx.mesh = exchange, padding, settings, mesh
        return settings.run(window, weight, bias, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 5
        if torch.is_grad_enabled():
            return (*differentiable_grads(ctx, grad, ctx.exchange, ctx.padding), *nothing)
        _, weight, window = ctx.saved_tensors  # the first is as it was, or this raises
        grad_window, *others = ctx.settings.run_backward(
            grad, window, weight, ctx.padding, wants=ctx.needs_input_grad[:3]
        )
        home = None
        if grad_window is not None:
            home = return_home(grad_window, ctx.exchange, ctx.mesh, may_write=True)
        return (home, *others, *nothing)
