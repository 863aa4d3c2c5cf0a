"""Gradients of leaves, averaged over the ranks by the end of a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import UnsupportedOp

BUCKET_NBYTES = 25 << 20
"""Gradients of this size are sent while the backward pass goes on."""


@dataclass(eq=False)
class Bucket:
    """Leaves of one dtype and device whose gradients share a message."""

    leaves: list[Tensor] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return sum(leaf.nbytes for leaf in self.leaves) >= BUCKET_NBYTES


def buckets_of(leaves: Iterable[Tensor]) -> dict[int, Bucket]:
    """By the ids of ``leaves``, which come in the order in which a backward pass reaches them."""
    found: dict[int, Bucket] = {}
    last: dict[object, Bucket] = {}
    for leaf in leaves:
        kind = leaf.dtype, leaf.device
        if kind not in last or last[kind].is_full:
            last[kind] = Bucket()
        last[kind].leaves.append(leaf)
        found[id(leaf)] = last[kind]
    return found


class Averaging:
    """What one backward pass averages over the ranks. Get it from ``of_this_pass``.

    Averages what has been added up in ``grad`` so far: what was averaged before is equal on all
    ranks, and stays. Ranks run the same graph, in the opposite order of its making, and so send the
    same messages in the same order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._waiting: dict[int, tuple[int, Tensor]] = {}
        """The leaves, by their ids, and their places in the last message."""
        self._missing: dict[Bucket, int] = {}
        """How many of their leaves have no gradient yet."""
        self._messages: list[_Message] = []
        self._who: dict[object, Callable[[Averaging], None]] = {}
        Variable._execution_engine.queue_callback(self._finish)

    @classmethod
    def of_this_pass(cls, mesh: Mesh) -> Averaging:
        """That of the backward pass which is running, which keeps it alive."""
        number = torch._C._current_graph_task_id()
        found = _passes.get(number)
        if found is None:
            found = _passes[number] = cls(mesh)
        return found

    def at_end(self, leaf: Tensor, place: int) -> None:
        """Has ``leaf.grad`` averaged at the end of the pass; leaves are sent in order of places."""
        self._waiting[id(leaf)] = (place, leaf)

    def now(self, leaf: Tensor, place: int, bucket: Bucket) -> None:
        """As ``at_end``, or as soon as all of ``bucket`` have got their gradients in this pass."""
        self.at_end(leaf, place)
        self._missing[bucket] = self._missing.get(bucket, len(bucket.leaves)) - 1
        if not self._missing[bucket]:
            for each in bucket.leaves:
                del self._waiting[id(each)]
            self._messages.append(_Message(bucket.leaves, self._mesh))

    def join(self, who: object, before_end: Callable[[Averaging], None]) -> None:
        """Has ``before_end`` called, once, before the rest is sent."""
        self._who[who] = before_end

    def has(self, who: object) -> bool:
        return who in self._who

    def _finish(self) -> None:
        for before_end in self._who.values():
            before_end(self)
        alike: dict[object, list[Tensor]] = {}
        for _, leaf in sorted(self._waiting.values(), key=lambda entry: entry[0]):
            if leaf.grad is not None:
                alike.setdefault((leaf.grad.dtype, leaf.grad.device), []).append(leaf)
        self._messages += [_Message(leaves, self._mesh) for leaves in alike.values()]
        for message in self._messages:
            message.receive()


_passes: WeakValueDictionary[int, Averaging] = WeakValueDictionary()
"""Those of the backward passes that are running, by their numbers."""


class _Message:
    """The gradients of some leaves, on their way to the other ranks and back."""

    @torch.no_grad()
    def __init__(self, leaves: Sequence[Tensor], mesh: Mesh) -> None:
        self._leaves, self._mesh = leaves, mesh
        grads = [_dense(leaf) for leaf in leaves]
        # Divided before they are summed, as half overflows.
        self._mean = torch.cat([grad.flatten() for grad in grads]) / mesh.num_ranks
        self._sent = [(grad, grad._version) for grad in grads]
        with contact("averaging gradients", mesh):
            self._work: Any = dist.all_reduce(self._mean, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        with contact("averaging gradients", self._mesh):
            self._work.wait()
        means = self._mean.split([grad.numel() for grad, _ in self._sent])
        for leaf, (grad, version), mean in zip(self._leaves, self._sent, means, strict=True):
            if leaf.grad is not grad or grad._version != version:
                raise UnsupportedOp(
                    f"the gradient of a weight of shape {tuple(leaf.shape)} was changed in a "
                    "backward pass while it was averaged over the ranks: change it in a hook of "
                    "the weight, or after the pass"
                )
            grad.copy_(mean.view_as(grad))


def _dense(leaf: Tensor) -> Tensor:
    grad = leaf.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise UnsupportedOp(
            f"the gradient of a weight of shape {tuple(leaf.shape)} has the layout {grad.layout}, "
            "which is not averaged over ranks: make the layer with sparse=False"
        )
    return grad
