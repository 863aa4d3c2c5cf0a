"""Sums and stacks over ranks, and their adjoints."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hyperslab.comm.device_transport import DeviceTransport
from hyperslab.comm.failure_report import contact
from hyperslab.comm.graph import TensorSpec, as_operator, recompute_first, save_marker
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.messages import post_on_device, run_on_device, traffic
from hyperslab.layout import AXES, Assembly, Box, Message, cut_out
from hyperslab.torch_private import apply_function, foreach_copy_, is_traced
from hyperslab.trace import Category, active

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that gloo or NCCL do not know, and those in which they are summed and sent instead."""
ONE_STEP_NBYTES = 1 << 20
"""What a rank sends to all others together, at most, where the device transport sums."""
_REDUCING = "summing over ranks"


def reduce_sum(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The sum of ``x`` over the ranks along ``axes``, equal on all of them.

    Collective over ``axes``. Differentiable: the gradient is summed over the same ranks, because
    each rank's sum feeds a loss of its own.
    """
    axes = tuple(axis for axis in axes if mesh.grid.size(axis) > 1)
    return apply_function(_Sum, x, mesh, axes) if axes else x


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        save_marker(ctx, x)
        return reduce_sum_(x.clone(memory_format=torch.contiguous_format), mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        if torch.is_grad_enabled():
            return reduce_sum(grad, ctx.mesh, ctx.axes), None, None
        own = grad.clone(memory_format=torch.contiguous_format)
        return reduce_sum_(own, ctx.mesh, ctx.axes), None, None


def reduce_sum_(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Sums the contiguous ``x`` in place over the ranks along ``axes``; not differentiable."""
    axes = [axis for axis in axes if mesh.grid.size(axis) > 1]
    if not axes:
        return x
    if traffic.is_counted:
        traffic.add_sum(x.nbytes, math.prod(map(mesh.grid.size, axes)))
    if is_traced():
        spec = TensorSpec(x.shape, x.dtype, x.device)
        return as_operator(lambda xs: [reduce_sum_(xs[0].clone(), mesh, axes)], [x], [spec])[0]
    if active.recorder is None:
        return _summed_(x, mesh, axes)
    with active.around(Category.all_reduce, f"sum over {'/'.join(axes)}", x.nbytes, exposed=True):
        return _summed_(x, mesh, axes)


def _summed_(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    if x.dtype not in _WIDER and _is_on_device(x, mesh):
        return _sum_on_device_(x, mesh, axes)
    total = x.to(_WIDER.get(x.dtype, x.dtype))
    with contact(f"summing over {'/'.join(axes)}", mesh):
        if (ranks := _ranks_by_socket(x, mesh, axes)) is not None:
            _SumBySockets(x, ranks, mesh, f"sum over {axes}").wait()
            return x
        dist.all_reduce(total, group=mesh.group_over(axes))
    return x if total is x else x.copy_(total)


class PendingSum:
    """A sum over the ranks along ``axes``, in place of a contiguous tensor.

    Collective over all ranks. Such sums keep an order among themselves and with no other messages.
    By the device transport a sum is made as late as in ``wait``.
    """

    def __init__(self, x: Tensor, mesh: Mesh, axes: Collection[str] = AXES) -> None:
        self._x, self._mesh, self._axes = x, mesh, axes
        self._work: dist.Work | _SumBySockets | None = None
        if (ranks := _ranks_by_socket(x, mesh, axes)) is not None:
            self._work = _SumBySockets(x, ranks, mesh, "pending sum")
        elif not (x.is_floating_point() and _is_on_device(x, mesh)):
            group = None if axes is AXES else mesh.group_over(axes)
            self._work = dist.all_reduce(x, group=group, async_op=True)

    def wait(self) -> None:
        """Has whatever is launched next find the sum."""
        if self._work is not None:
            self._work.wait()
        else:
            _sum_on_device_(self._x, self._mesh, self._axes, beside=True)


class SumsBeside:
    """Sums as those of ``PendingSum``, by the device transport and beside what else is computed.

    On a GPU they run on a stream of their own. Collective over all ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        on_gpu = mesh.device.type == "cuda"
        self._stream = torch.cuda.Stream(mesh.device) if on_gpu else None

    def after_now(self) -> AbstractContextManager[Any]:
        """A context for work on that stream, which waits for what was launched until now."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._mesh.device))
        return torch.cuda.stream(self._stream)

    def sum_(self, x: Tensor) -> None:
        """Sums the contiguous ``x`` in place, for who is on that stream."""
        _sum_on_device_(x, self._mesh, AXES, beside=True)

    def join(self) -> None:
        """Has the current stream wait for what was done there."""
        if self._stream is not None:
            torch.cuda.current_stream(self._mesh.device).wait_stream(self._stream)


class _SumBySockets:
    """A small sum between ranks of one node, in place: each sends its part to all others.

    It is equal on all ranks, bit by bit. Sums that ranks may begin in another order have other
    ``purpose``s.
    """

    def __init__(self, x: Tensor, ranks: tuple[int, ...], mesh: Mesh, purpose: str) -> None:
        assert mesh.sockets is not None
        tag = (crc32(purpose.encode()) << 24) + x.nbytes  # those of boxes are less than 1 << 25
        self._x = x
        self._parts = mesh.sockets.share(x, mesh.rank, ranks, tag, mesh.timeout.total_seconds())

    def wait(self) -> None:
        self._x.copy_(torch.stack(self._parts.wait()).sum(0))


def _ranks_by_socket(x: Tensor, mesh: Mesh, axes: Collection[str]) -> tuple[int, ...] | None:
    """The ranks along ``axes``, where sockets carry messages such as ``x`` between all of them."""
    if mesh.sockets is None or mesh.transport is not None or not x.is_floating_point():
        return None
    ranks = _ranks(mesh, axes)
    near = all(rank == mesh.rank or mesh.sockets.carries(rank, x) for rank in ranks)
    return ranks if near else None


def gather_stacked(x: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """The tensors ``x`` of all ranks along ``axes``, stacked in the order of the ranks.

    Collective over ``axes``; all must bring the same shape. Differentiable: what all ranks' losses
    say of a rank's entry is summed and goes to that rank.
    """
    axes = tuple(axis for axis in axes if mesh.grid.size(axis) > 1)
    return _Stack.apply(x, mesh, axes) if axes else x.unsqueeze(0)  # type: ignore[no-untyped-call]


class _Stack(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        save_marker(ctx, x)
        return _stacked(x, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        recompute_first(ctx)
        place = ctx.mesh.group_over(ctx.axes).rank()
        return reduce_sum(grad, ctx.mesh, ctx.axes)[place], None, None


def _stacked(x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    group = mesh.group_over(axes)
    if is_traced():
        spec = TensorSpec((group.size(), *x.shape), x.dtype, x.device)
        return as_operator(lambda xs: [_stacked(xs[0], mesh, axes)], [x], [spec])[0]
    if _is_on_device(x, mesh):
        return torch.stack(_from_all(x.contiguous(), _ranks(mesh, axes), mesh))
    doing = f"gathering over {'/'.join(axes)}"
    with active.around(Category.all_reduce, doing, x.nbytes, exposed=True), contact(doing, mesh):
        mine = x.to(_WIDER.get(x.dtype, x.dtype)).contiguous()
        out = mine.new_empty((group.size(), *x.shape))
        dist.all_gather(list(out), mine, group=group)
    return out.to(x.dtype)


def _is_on_device(x: Tensor, mesh: Mesh) -> bool:
    """Whether ``x`` is where the device transport finds it."""
    return mesh.transport is not None and x.device == mesh.device and x.numel() > 0


def _sum_on_device_(
    x: Tensor, mesh: Mesh, axes: Collection[str], *, beside: bool = False
) -> Tensor:
    """Sums the contiguous ``x`` in place: equal on all ranks, bit by bit."""
    ranks = _ranks(mesh, axes)
    if x.nbytes * (len(ranks) - 1) <= ONE_STEP_NBYTES:
        return _sum_in_one_step_(x, ranks, mesh, beside=beside)
    # Each rank sums a part and sends the sum to all.
    parts = list(x.view(-1).tensor_split(len(ranks)))
    place = ranks.index(mesh.rank)
    others = [part for i, part in enumerate(parts) if i != place]
    messages, mine = _flat_messages([part.numel() for part in parts], ranks, mesh.rank)
    received = _post(others, messages, mine, x.dtype, mesh, beside=beside)
    total = _total([*received[:place], parts[place], *received[place:]])
    sums = _post([total] * len(others), mine, messages, x.dtype, mesh, beside=beside)
    foreach_copy_(others, sums)
    parts[place].copy_(total)
    return x


def _sum_in_one_step_(x: Tensor, ranks: tuple[int, ...], mesh: Mesh, *, beside: bool) -> Tensor:
    """Every rank sends the whole to all."""
    messages, boxes = _to_all(tuple(x.shape), ranks, mesh.rank)
    place = ranks.index(mesh.rank)

    def add(transport: DeviceTransport, limit: int) -> bool:
        if can := transport.can_sum(x):
            transport.sum_(x, boxes, messages, place, limit)
        return can

    if not run_on_device(add, mesh, _REDUCING, beside=beside):
        x.copy_(_total(_from_all(x, ranks, mesh, beside=beside)))
    return x


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0, dtype=parts[0].dtype)


def _from_all(
    x: Tensor, ranks: tuple[int, ...], mesh: Mesh, *, beside: bool = False
) -> list[Tensor]:
    """The contiguous ``x`` of each of ``ranks``."""
    messages, boxes = _to_all(tuple(x.shape), ranks, mesh.rank)
    received = post_on_device(
        lambda transport, limit: transport.post_boxes(x, boxes, messages, messages, limit),
        mesh,
        _REDUCING,
        beside=beside,
    ).wait()
    place = ranks.index(mesh.rank)
    return [*received[:place], x, *received[place:]]


def _post(
    pieces: list[Tensor],
    sends: list[Message],
    receives: list[Message],
    dtype: torch.dtype,
    mesh: Mesh,
    *,
    beside: bool,
) -> list[Tensor]:
    return post_on_device(
        lambda transport, limit: transport.post_pieces(pieces, sends, receives, dtype, limit),
        mesh,
        _REDUCING,
        beside=beside,
    ).wait()


def _ranks(mesh: Mesh, axes: Collection[str]) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.group_over(axes)))


@lru_cache(maxsize=4096)
def _to_all(
    shape: tuple[int, ...], ranks: tuple[int, ...], rank: int
) -> tuple[list[Message], Assembly]:
    """What ``rank`` sends to each other one of ``ranks``, and gets from it."""
    messages = [_message(peer, shape) for peer in ranks if peer != rank]
    where = messages[0].where
    return messages, cut_out((where,) * len(messages), (shape,) * len(messages))


def _flat_messages(
    sizes: Sequence[int], ranks: tuple[int, ...], rank: int
) -> tuple[list[Message], list[Message]]:
    """Those with each other rank's part, to it, and those with the part of ``rank``, from each."""
    mine = sizes[ranks.index(rank)]
    pairs = [(peer, size) for peer, size in zip(ranks, sizes, strict=True) if peer != rank]
    theirs = [_message(peer, (size,)) for peer, size in pairs]
    return theirs, [_message(peer, (mine,)) for peer, _ in pairs]


def _message(peer: int, shape: tuple[int, ...]) -> Message:
    whole = Box.whole(shape)
    return Message(peer, whole, whole.slices_in(whole), crc32(repr(shape).encode()) >> 8)
