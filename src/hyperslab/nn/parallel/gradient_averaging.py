"""Gradients of weights that every rank holds: averaged over ranks while the backward pass runs."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from hyperslab.comm.failure_report import contact
from hyperslab.comm.mesh import Mesh, mesh_of_device_mesh
from hyperslab.comm.message_spans import Awaited, recorded
from hyperslab.comm.reduce import PendingSum, SumsBeside
from hyperslab.errors import UnsupportedOp
from hyperslab.layout import AXES
from hyperslab.nn.module_snapshot import TrainedWeights
from hyperslab.nn.outputs import tensors_of
from hyperslab.nn.parallel.checks import Comparisons
from hyperslab.torch_private import backward_pass_id, foreach_copy_
from hyperslab.trace import Category


class Replica:
    """A module whose gradients are averaged over all ranks by the end of each backward pass.

    Each pass that reaches one of its weights does that, whichever methods or parts of the module
    ran, how often and in which order. Weights may be frozen, thawed or replaced at any time.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], mesh: Mesh, comparisons: Comparisons
    ) -> None:
        self._weights, self.forward = TrainedWeights(module), forward
        self._mesh, self._comparisons = mesh, comparisons
        self._is_synced = True
        self._unsynced: dict[int, tuple[int, Tensor]] = {}
        """Weights that got gradients within ``no_sync``, by their ids, with their numbers."""
        self._hooked: list[Tensor] = []
        """All trained weights, as the last forward pass found them."""
        self._trained: list[Tensor] = []
        """Those that tell this replica of their gradients."""
        self._buckets: dict[int, Bucket] = {}
        """Of the weights that are trained, by their ids."""
        self.nodes: dict[int, Any] = {}
        """What adds to the gradients of weights in compiled graphs, by their numbers."""
        self._number = len(_replicas)
        _replicas.append(weakref.ref(self))
        self.hook_weights()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            from hyperslab.nn.compile import hook_weights_of  # loads the compiler

            hook_weights_of(self._number + 0)  # + 0: a constant that Dynamo wants no guard for
            return self.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.hook_weights()
        out = self.forward(*args, **kwargs)
        if self._is_synced:
            for leaf in tensors_of(out):
                if leaf.grad_fn is not None:
                    leaf.register_hook(self._before_backward)
        return out

    @property
    def is_synced(self) -> bool:
        return self._is_synced

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_synced = self._is_synced, False
        try:
            yield
        finally:
            self._is_synced = before

    def hook_weights(self) -> None:
        """Makes the weights that the module has now tell when they get gradients.

        Not tensors that stand in for them, as in ``torch.func.functional_call``.
        """
        trained = self._weights.find()
        if trained is self._hooked:
            return
        self._hooked = trained
        for weight in trained:
            if isinstance(weight, nn.Parameter) and gradient_hook_of(weight) is None:
                GradientHook.set_on(weight, self)
        mine = [p for p in trained if (found := gradient_hook_of(p)) and found.replica() is self]
        self._trained, self._buckets = mine, buckets_of(reversed(mine), self._mesh)

    @torch.enable_grad()
    def keep_nodes(self) -> None:
        """Compiled graphs ask for them where torch makes no nodes."""
        for weight in self._trained:
            self.nodes[weight._hyperslab_number] = get_gradient_edge(weight).node  # type: ignore[attr-defined]

    def on_grad(self, weight: Tensor, number: int) -> None:
        """Called when ``weight`` got a gradient, or a function said that it gets none."""
        if weight.grad is None:
            return
        _cut_gradient_as_weight(weight)
        averaging = Averaging.of_this_pass(self._mesh)
        if not self._is_synced and not averaging.has(self):
            self._unsynced[id(weight)] = (number, weight)
            return
        averaging.join(self, self._before_end)
        self._unsynced.pop(id(weight), None)
        bucket = self._buckets.get(id(weight))
        if bucket is None or has_other_hooks(weight):  # which may change it
            averaging.at_end(weight, number)
        else:
            averaging.now(weight, number, bucket)

    def bucket_of(self, weight: Tensor) -> Bucket | None:
        """That of a weight that is trained, as the last forward pass found it."""
        return self._buckets.get(id(weight))

    def _before_backward(self, grad: Tensor) -> None:
        Averaging.of_this_pass(self._mesh).join(self, self._before_end)

    def _before_end(self, averaging: Averaging) -> None:
        self._comparisons.wait()
        for number, weight in self._unsynced.values():
            if not averaging.is_mean(weight):
                averaging.at_end(weight, number)
        self._unsynced.clear()


_replicas: list[weakref.ref[Replica]] = []


def prepare_for_graph(replica: int) -> None:
    """When a graph is made, which it is anew where other weights want gradients."""
    if found := _replicas[replica]():
        found.hook_weights()
        found.keep_nodes()


class GradientHook:
    """What a weight calls when it got a gradient; it does not keep its replica alive."""

    def __init__(self, replica: Replica, number: int) -> None:
        self.replica, self.number = weakref.ref(replica), number
        self.awaited_in: int | None = None
        """The backward pass that brings a mean over ranks, until the weight got its gradient."""

    @classmethod
    def set_on(cls, weight: nn.Parameter, replica: Replica) -> None:
        number = next(_numbers)
        weight.register_post_accumulate_grad_hook(cls(replica, number))
        _weights[number] = weight
        weight._hyperslab_number = number  # type: ignore[attr-defined]

    def __call__(self, weight: Tensor) -> None:
        if self.awaited_in == backward_pass_id():  # which looks at it when it ends
            self.awaited_in = None
        elif replica := self.replica():
            replica.on_grad(weight, self.number)


_numbers = itertools.count()
_weights: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def weight_of_number(number: int) -> nn.Parameter | None:
    """The weight whose ``_hyperslab_number`` that is: compiled graphs know it by this number."""
    return _weights.get(number)


def gradient_hook_of(x: Tensor) -> GradientHook | None:
    """By which a replica is told of gradients of ``x``."""
    hooks: Any = x._post_accumulate_grad_hooks
    for hook in hooks.values() if hooks else ():
        if type(hook) is GradientHook and hook.replica() is not None:
            return hook
    return None


def has_other_hooks(leaf: Tensor) -> bool:
    """Whether hooks show the gradient of ``leaf`` to somebody else than a replica."""
    after: Any = leaf._post_accumulate_grad_hooks or {}
    return bool(leaf._backward_hooks) or any(type(h) is not GradientHook for h in after.values())


def mesh_of(x: Tensor, mesh: Mesh) -> Mesh:
    """The mesh over which ``x`` is cut; ``mesh``, of the same ranks, where it is whole."""
    return (mesh_of_device_mesh(x.device_mesh) or mesh) if isinstance(x, DTensor) else mesh


def axes_beside_cuts(x: Tensor, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks hold the same of ``x``, and each a part of its gradient."""
    if not isinstance(x, DTensor):
        return AXES
    names, placements = x.device_mesh.mesh_dim_names or (), x.placements
    cut = [name for name, p in zip(names, placements, strict=True) if not p.is_replicate()]
    return mesh.axes_beside(cut)


def _cut_gradient_as_weight(weight: Tensor) -> None:
    """What torch computes of DTensors may cut the gradient otherwise, or leave it to be added up.

    Collective over the ranks that share the weight, if it does.
    """
    grad = weight.grad
    if not isinstance(weight, DTensor) or not isinstance(grad, DTensor):
        return
    if grad.placements != weight.placements:
        weight.grad = grad.redistribute(placements=weight.placements)


def own_part(x: Tensor) -> Tensor:
    """The part of ``x`` that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x


BUCKET_NBYTES = 25 << 20
"""Gradients of this size are sent while the backward pass goes on."""


@dataclass(eq=False)
class Bucket:
    """Leaves of one dtype and device whose gradients share a message."""

    leaves: list[Tensor] = field(default_factory=list)
    number: int = field(default_factory=itertools.count().__next__)
    """In whose order messages are received, in whichever order gradients came."""

    @property
    def is_full(self) -> bool:
        return sum(own_part(leaf).nbytes for leaf in self.leaves) >= BUCKET_NBYTES


def buckets_of(leaves: Iterable[Tensor], mesh: Mesh) -> dict[int, Bucket]:
    """By the ids of ``leaves``, which come in the order in which a backward pass reaches them."""
    found: dict[int, Bucket] = {}
    last: dict[object, Bucket] = {}
    for leaf in leaves:
        alike = leaf.dtype, leaf.device, axes_beside_cuts(leaf, mesh_of(leaf, mesh))
        if alike not in last or last[alike].is_full:
            last[alike] = Bucket()
        last[alike].leaves.append(leaf)
        found[id(leaf)] = last[alike]
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
        """The leaves, by their ids, and their numbers, in whose order the last message has them."""
        self._missing: dict[Bucket, int] = {}
        """How many of their leaves have no gradient yet."""
        self._full: dict[int, _Message] = {}
        """The messages of whole buckets, by their numbers."""
        self._means: dict[int, tuple[GradientHook, Tensor, Tensor]] = {}
        """Weights by their ids, with their hooks and the means over ranks that they are to get."""
        self._who: dict[object, Callable[[Averaging], None]] = {}
        Variable._execution_engine.queue_callback(self._finish)

    @classmethod
    def of_this_pass(cls, mesh: Mesh) -> Averaging:
        """That of the backward pass which is running, which keeps it alive."""
        number = backward_pass_id()
        found = _passes.get(number)
        if found is None:
            found = _passes[number] = cls(mesh)
        return found

    def at_end(self, leaf: Tensor, number: int) -> None:
        """Has ``leaf.grad`` averaged at the end of the pass, in order of numbers."""
        self._waiting[id(leaf)] = (number, leaf)

    def now(self, leaf: Tensor, number: int, bucket: Bucket) -> None:
        """As ``at_end``, or as soon as all of ``bucket`` have got their gradients in this pass."""
        self.at_end(leaf, number)
        self._missing[bucket] = self._missing.get(bucket, len(bucket.leaves)) - 1
        if not self._missing[bucket]:
            for each in bucket.leaves:
                del self._waiting[id(each)]
            self._full[bucket.number] = _Message(bucket.leaves, self._mesh)

    def note_means(
        self, weights: Sequence[tuple[GradientHook, Tensor]], grads: Sequence[Tensor | None]
    ) -> None:
        """Says that the pass brings ``weights`` these new gradients, which are means over ranks.

        Whether something else was added to them is looked at in one go when the pass ends.
        """
        number = backward_pass_id()
        for (hook, weight), grad in zip(weights, grads, strict=True):
            if grad is not None:
                hook.awaited_in = number
                self._means[id(weight)] = hook, weight, grad.detach()

    def join(self, who: object, before_end: Callable[[Averaging], None]) -> None:
        """Has ``before_end`` called, once, before the rest is sent."""
        self._who[who] = before_end

    def has(self, who: object) -> bool:
        return who in self._who

    def is_mean(self, leaf: Tensor) -> bool:
        """Whether the gradient is such a mean and nothing else."""
        return id(leaf) in self._means

    def _look_at_means(self) -> None:
        """Has gradients averaged that are more than the mean which the pass brought."""
        found, self._means = self._means, {}
        for key, (hook, weight, mean) in found.items():
            grad = weight.grad
            if grad is None or hook.awaited_in is not None:  # torch.autograd.grad returns it
                continue
            if grad.data_ptr() == mean.data_ptr() and not grad._version:
                self._means[key] = hook, weight, mean
            else:
                hook(weight)

    def _finish(self) -> None:
        self._look_at_means()
        for before_end in self._who.values():
            before_end(self)
        self._means.clear()
        alike: dict[object, list[Tensor]] = {}
        for _, leaf in sorted(self._waiting.values(), key=lambda entry: entry[0]):
            if leaf.grad is not None:
                axes = axes_beside_cuts(leaf, mesh_of(leaf, self._mesh))
                alike.setdefault((leaf.grad.dtype, leaf.grad.device, axes), []).append(leaf)
        full = [message for _, message in sorted(self._full.items())]
        for message in full + [_Message(leaves, self._mesh) for leaves in alike.values()]:
            message.receive()


_passes: WeakValueDictionary[int, Averaging] = WeakValueDictionary()
"""Those of the backward passes that are running, by their numbers."""


class _Message:
    """The gradients of some leaves, on their way to the other ranks and back."""

    @torch.no_grad()
    def __init__(self, leaves: Sequence[Tensor], mesh: Mesh) -> None:
        self._leaves, self._mesh = leaves, mesh_of(leaves[0], mesh)
        self._sent = [(grad := _dense(leaf, leaf.grad), grad._version) for leaf in leaves]
        self._sum: Awaited[None] | None = None
        axes = axes_beside_cuts(leaves[0], self._mesh)
        num = math.prod(map(self._mesh.grid.size, axes))
        if num == 1:
            return
        grads = [own_part(grad) for grad, _ in self._sent]
        self._mean = _in_a_row(grads, [own_part(leaf) for leaf in leaves])
        self._mean /= num  # before the sum: half overflows
        with contact("averaging gradients", mesh):
            self._sum = recorded(
                lambda: PendingSum(self._mean, self._mesh, axes),
                Category.all_reduce,
                "gradients",
                self._mean.nbytes,
                self._mean.device,
            )

    @torch.no_grad()
    def receive(self) -> None:
        if self._sum is None:
            return
        with contact("averaging gradients", self._mesh):
            self._sum.wait()
        for leaf, (grad, version) in zip(self._leaves, self._sent, strict=True):
            if leaf.grad is not grad or grad._version != version:
                raise UnsupportedOp(
                    f"the gradient of a weight of shape {tuple(leaf.shape)} was changed in a "
                    "backward pass while it was averaged over the ranks: change it in a hook of "
                    "the weight, or after the pass"
                )
        means = _apart(self._mean, [own_part(leaf) for leaf in self._leaves])
        foreach_copy_([own_part(grad) for grad, _ in self._sent], means)


class GradientMeans:
    """The means over ranks of gradients of ``weights``, taken while a backward pass is recorded.

    The messages are those that ``Averaging`` sends in an ordinary pass, in the same order.
    """

    def __init__(self, weights: Sequence[Tensor], sums: SumsBeside, mesh: Mesh) -> None:
        self._weights, self._sums, self._mesh = weights, sums, mesh
        self._buckets = _whole_buckets(weights)
        self._num_sent = 0
        self._grads: dict[int, Tensor] = {}
        """By the places of weights."""
        self._means: dict[int, Tensor] = {}

    def on_grad(self, place: int, grad: Tensor) -> None:
        """Takes the gradient of a weight; buckets leave in their order, as soon as they can."""
        self._grads[place] = _dense(self._weights[place], grad)
        while self._num_sent < len(self._buckets) and self._send(self._buckets[self._num_sent]):
            self._num_sent += 1

    def finish(self) -> list[Tensor | None]:
        """The means, for whatever is launched next; None for weights that got no gradient."""
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        alike: dict[object, list[int]] = {}
        rest = [place for place in self._grads if place not in self._means]
        for place in sorted(rest, key=lambda place: _number_of(self._weights[place])):
            grad = self._grads[place]
            alike.setdefault((grad.dtype, grad.device), []).append(place)
        for places in alike.values():
            self._send(places)
        self._sums.join()
        return [self._means.get(place) for place in range(len(self._weights))]

    @torch.no_grad()
    def _send(self, places: Sequence[int]) -> bool:
        """Takes the means of weights at ``places``, if all have got their gradients."""
        if not self._grads.keys() >= {*places}:
            return False
        leaves = [self._weights[place] for place in places]
        with self._sums.after_now():
            row = _in_a_row([self._grads[place] for place in places], leaves)
            row /= self._mesh.num_ranks
            self._sums.sum_(row)
        self._means.update(zip(places, _apart(row, leaves), strict=True))
        return True


def _whole_buckets(weights: Sequence[Tensor]) -> list[list[int]]:
    """The places in ``weights`` of the leaves of each bucket of which all are there."""
    places = {id(weight): place for place, weight in enumerate(weights)}
    buckets = {bucket.number: bucket for weight in weights if (bucket := _bucket_of(weight))}
    leaves = [bucket.leaves for _, bucket in sorted(buckets.items())]
    return [[places[id(x)] for x in each] for each in leaves if all(id(x) in places for x in each)]


def _bucket_of(weight: Tensor) -> Bucket | None:
    hook = gradient_hook_of(weight)
    replica = None if hook is None else hook.replica()
    return None if replica is None else replica.bucket_of(weight)


def _number_of(weight: Tensor) -> int:
    hook = gradient_hook_of(weight)
    assert hook is not None
    return hook.number


def _in_a_row(grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """A copy of all elements of ``grads``, each in the order in which its leaf lies in memory."""
    pairs = zip(grads, leaves, strict=True)
    return torch.cat([grad.permute(_memory_order(leaf)).reshape(-1) for grad, leaf in pairs])


def _apart(row: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``row``, made by ``_in_a_row``, that lie as ``leaves`` do."""
    found = []
    for leaf, part in zip(leaves, row.split([leaf.numel() for leaf in leaves]), strict=True):
        order = _memory_order(leaf)
        back = sorted(range(len(order)), key=order.__getitem__)
        found.append(part.view([leaf.shape[dim] for dim in order]).permute(back))
    return found


def _memory_order(leaf: Tensor) -> list[int]:
    """Its dims, those of long strides first."""
    return sorted(range(leaf.ndim), key=leaf.stride, reverse=True)


def _dense(leaf: Tensor, grad: Tensor | None) -> Tensor:
    assert grad is not None
    if grad.layout != torch.strided:
        raise UnsupportedOp(
            f"the gradient of a weight of shape {tuple(leaf.shape)} has the layout {grad.layout}, "
            "which is not averaged over ranks: make the layer with sparse=False"
        )
    return grad
