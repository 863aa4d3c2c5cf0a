"""Weights that every rank holds whole, whose gradients are averaged."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling

from hyperslab.comm.mesh import Mesh
from hyperslab.nn.averaging import Averaging, Bucket, buckets_of
from hyperslab.nn.comparisons import Comparisons
from hyperslab.nn.outputs import tensors_of


class Replica:
    """A module whose gradients are averaged over all ranks by the end of each backward pass.

    Each pass that reaches one of its weights does that, whichever methods or parts of the module
    ran, how often and in which order. Weights may be frozen, thawed or replaced at any time.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        mesh: Mesh,
        comparisons: Comparisons,
    ) -> None:
        self._module, self._forward = module, forward
        self._mesh, self._comparisons = mesh, comparisons
        self._is_synced = True
        self._owed: dict[int, tuple[int, Tensor]] = {}
        """Weights that got gradients within ``no_sync``, by their ids, with their places."""
        self._trained: list[Tensor] = []
        self._buckets: dict[int, Bucket] = {}
        """Of the weights that are trained, by their ids."""
        self.nodes: dict[int, Any] = {}
        """What adds to the gradients of weights in compiled graphs, by their places."""
        self._number = len(_replicas)
        _replicas.append(weakref.ref(self))
        self.watch_weights()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            from hyperslab.nn.compiled import watch_weights_of  # loads the compiler

            watch_weights_of(self._number + 0)  # + 0: a constant that Dynamo wants no guard for
            return self._forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        self.watch_weights()
        out = self._forward(*args, **kwargs)
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

    def watch_weights(self) -> None:
        """Makes the weights that the module has now tell when they get gradients.

        Not tensors that stand in for them, as in ``torch.func.functional_call``.
        """
        trained: list[Tensor] = [p for p in self._module.parameters() if p.requires_grad]
        if len(trained) == len(self._trained) and all(map(_is, trained, self._trained)):
            return
        for weight in trained:
            if isinstance(weight, nn.Parameter) and watcher_of(weight) is None:
                Watcher.set_on(weight, self)
        mine = [p for p in trained if (found := watcher_of(p)) and found.replica() is self]
        self._trained, self._buckets = mine, buckets_of(reversed(mine))

    @torch.enable_grad()
    def keep_nodes(self) -> None:
        """Compiled graphs ask for them where torch makes no nodes."""
        for weight in self._trained:
            self.nodes[weight._hyperslab_place] = get_gradient_edge(weight).node  # type: ignore[attr-defined]

    def on_grad(self, weight: Tensor, place: int) -> None:
        """Called when ``weight`` got a gradient."""
        averaging = Averaging.of_this_pass(self._mesh)
        if not self._is_synced and not averaging.has(self):
            self._owed[id(weight)] = (place, weight)
            return
        averaging.join(self, self._before_end)
        self._owed.pop(id(weight), None)
        bucket = self._buckets.get(id(weight))
        if bucket is None or is_seen(weight):  # by somebody who may change it
            averaging.at_end(weight, place)
        else:
            averaging.now(weight, place, bucket)

    def _before_backward(self, grad: Tensor) -> None:
        Averaging.of_this_pass(self._mesh).join(self, self._before_end)

    def _before_end(self, averaging: Averaging) -> None:
        self._comparisons.settle()
        for place, weight in self._owed.values():
            averaging.at_end(weight, place)
        self._owed.clear()


_replicas: list[weakref.ref[Replica]] = []


def prepare_for_graph(replica: int) -> None:
    """When a graph is made, which it is anew where other weights want gradients."""
    if found := _replicas[replica]():
        found.watch_weights()
        found.keep_nodes()


def _is(a: object, b: object) -> bool:
    return a is b


class Watcher:
    """What a weight calls when it got a gradient; it does not keep its replica alive."""

    def __init__(self, replica: Replica, place: int) -> None:
        self.replica, self._place = weakref.ref(replica), place

    @classmethod
    def set_on(cls, weight: nn.Parameter, replica: Replica) -> None:
        place = next(_places)
        weight.register_post_accumulate_grad_hook(cls(replica, place))
        _weights[place] = weight
        weight._hyperslab_place = place  # type: ignore[attr-defined]

    def __call__(self, weight: Tensor) -> None:
        if replica := self.replica():
            replica.on_grad(weight, self._place)


_places = itertools.count()
_weights: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def weight_at(place: int) -> nn.Parameter | None:
    """The weight whose ``_hyperslab_place`` that is: compiled graphs know it by this number."""
    return _weights.get(place)


def watcher_of(x: Tensor) -> Watcher | None:
    """By which a replica is told of gradients of ``x``."""
    hooks: Any = x._post_accumulate_grad_hooks
    for hook in hooks.values() if hooks else ():
        if type(hook) is Watcher and hook.replica() is not None:
            return hook
    return None


def is_seen(leaf: Tensor) -> bool:
    """Whether hooks show the gradient of ``leaf`` to somebody else than a replica."""
    after: Any = leaf._post_accumulate_grad_hooks or {}
    return bool(leaf._backward_hooks) or any(type(h) is not Watcher for h in after.values())
