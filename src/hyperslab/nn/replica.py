"""Gradients averaged by DDP, in whatever order a user runs forward and backward passes."""

# No "from __future__ import annotations": DDP reads those of its hook as they are.

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.compiler import is_dynamo_compiling
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.library import custom_op
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from hyperslab.comm.failure import contact
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.reduce import reduce_sum_
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES
from hyperslab.nn.comparisons import Comparisons
from hyperslab.nn.outputs import map_tensors, tensors_of


@torch.no_grad()
def average_(grads: Sequence[Tensor], mesh: Mesh) -> None:
    """Makes gradients of one dtype the means over all ranks, in one message.

    Collective over the mesh.
    """
    parts = (
        torch.cat([grad.flatten() for grad in grads]) / mesh.num_ranks
    )  # as a half's sum overflows
    means = reduce_sum_(parts, mesh, AXES).split([grad.numel() for grad in grads])
    for grad, mean in zip(grads, means, strict=True):
        grad.copy_(mean.view_as(grad))


def averaging_mesh(x: Tensor) -> Mesh | None:
    """The mesh over which a replica averages the gradient of ``x``, or of what it is a view of."""
    source = x if x.is_leaf else x._base
    hooks: Any = None if source is None else source._post_accumulate_grad_hooks
    for hook in hooks.values() if hooks else ():
        if type(hook) is _Watcher and hook.replica() is not None:
            return hook.mesh
    return None


class Replica:
    """A module whose gradients are averaged over all ranks at the end of a backward pass.

    By itself DDP averages in the first backward pass after a forward pass and in no other: a second
    one through the same graph, or through the graph of an earlier forward pass, leaves each rank
    with a gradient of its own and says nothing. Here every backward pass that reaches an output of
    the module, or gives one of its parameters a gradient, averages what has been added up so far.
    That is exact, because what was averaged before is equal on all ranks. Parameters may also be
    frozen, thawed or replaced at any time.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        mesh: Mesh,
        comparisons: Comparisons,
    ) -> None:
        self._body = _Body(module, forward)
        self._mesh = mesh
        self._comparisons = comparisons
        self._ddp: DistributedDataParallel | None = None
        self._trained: list[nn.Parameter] = []
        """The parameters whose gradients DDP averages."""
        self._sync = True
        self._pass: int | None = None
        """The backward pass that reached an output last."""
        self._averaged = False
        """Whether DDP has averaged all gradients since it was last told to."""
        self._travelling: list[Future[Tensor]] = []
        """Gradients on their way to and from the other ranks."""
        self._got_grads: set[int] = set()
        """The parameters, by their ids, that got a gradient in that pass."""
        self._watched: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameters that the module has or had, in the order in which they came."""
        self._averaged_before = False
        """Whether DDP had nothing left to do when that pass began."""
        self._by_hand = False
        """Whether gradients are averaged after the backward pass, as DDP wants one of all."""
        self._warned_of_hooks = False
        self._number = len(_replicas)
        _replicas.append(weakref.ref(self))
        self._watch_parameters([*self._body.parameters()])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._run_in_graph(*args, **kwargs)
        if not torch.is_grad_enabled() or not self._adopt_parameters():
            return self._body(*args, **kwargs)
        if self._ddp is None:
            out = self._body(*args, **kwargs)
        else:
            with nullcontext() if self._sync else self._ddp.no_sync():
                out = self._ddp(*args, **kwargs)
        if self._sync and self._averages:
            self._averaged = False
            for leaf in tensors_of(out):
                if leaf.grad_fn is not None:
                    leaf.register_hook(self.before_backward)
        return out

    def _run_in_graph(self, *args: Any, **kwargs: Any) -> Any:
        """What is told to DDP around a forward pass is told by operators of the graph."""
        out = self._body.run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        if not tensors_of(out):
            raise ConfigError(
                f"there is no tensor to be found in the {type(out).__name__} that the module "
                "returns: return Slabs or tensors in tuples, lists, dicts or dataclasses"
            )
        return map_tensors(lambda leaf: _leave(leaf, self._number), out)

    def after_forward(self) -> None:
        """Makes DDP expect a backward pass, without its own ``forward``."""
        if self._adopt_parameters() and self._ddp is not None and self._sync:
            self._expect_backward(self._ddp)

    def _expect_backward(self, ddp: DistributedDataParallel) -> None:
        ddp.reducer._rebuild_buckets()  # it must see each parameter in one pass before it does
        ddp.reducer.prepare_for_backward([])
        self._averaged = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Sends gradients to the other ranks; buckets go in order."""
        with contact("averaging gradients", self._mesh):
            average = allreduce_hook(None, bucket)  # type: ignore[arg-type]
        self._averaged = bucket.is_last()
        self._travelling.append(average)
        return average

    @property
    def _averages(self) -> bool:
        return self._by_hand or self._ddp is not None

    def _watch_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes parameters tell when they get a gradient in a pass that no output was told of.

        Such are passes from what other methods or parts of the module return, and those of
        gradient penalties.
        """
        for parameter in parameters:
            if parameter.requires_grad and averaging_mesh(parameter) is None:
                self._watched[parameter] = True
                parameter.register_post_accumulate_grad_hook(_Watcher(self, self._mesh))
            if not self._warned_of_hooks and _is_hooked(parameter):
                self._warn_of_hooks()

    def _warn_of_hooks(self) -> None:
        self._warned_of_hooks = True
        if self._mesh.rank == 0:
            named = self._body.module.named_parameters()
            hooked = ", ".join(name for name, parameter in named if _is_hooked(parameter))
            warnings.warn(
                f"hooks of weights ({hooked}) see gradients before they are averaged, on each "
                f"of {self._mesh.num_ranks} ranks its own: one that does more than multiply by a "
                "constant, as to clip them or to step an optimizer, gives other numbers than one "
                "process. Change gradients after the backward pass",
                stacklevel=2,
            )

    def on_grad(self, parameter: Tensor) -> None:
        """Called when ``parameter`` got a gradient."""
        if not self._sync:
            return
        if torch._C._current_graph_task_id() != self._pass:
            self._begin_pass()
        self._got_grads.add(id(parameter))

    def _adopt_parameters(self) -> bool:
        """Makes DDP know the parameters that want gradients now.

        Not where tensors stand in for some of them, as in ``torch.func.functional_call``: DDP would
        wait for gradients of these. ``nn.outsiders`` averages those of the stand-ins.
        """
        parameters = [*self._body.parameters()]
        if not all(isinstance(parameter, nn.Parameter) for parameter in parameters):
            return False
        self._watch_parameters(parameters)
        if self._by_hand:
            return True
        now = [p for p in parameters if p.requires_grad]
        if len(now) == len(self._trained) and all(map(_is, now, self._trained)):
            return True
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()
        self._ddp, self._trained = None, now
        if now:
            # Ranks start with equal weights and buffers, and Parallel keeps the buffers equal.
            self._ddp = DistributedDataParallel(self._body, init_sync=False)
            self._ddp.broadcast_buffers = False
            # Weak: DDP keeps the hook's state where the garbage collector cannot see it.
            self._ddp.register_comm_hook(weakref.ref(self), _average)
        return True

    def before_backward(self, grad: Tensor) -> None:
        if not self._averages or torch._C._current_graph_task_id() == self._pass:
            return
        if self._averaged and self._ddp is not None:
            self._expect_backward(self._ddp)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._pass = torch._C._current_graph_task_id()
        self._got_grads.clear()
        self._averaged_before = self._averaged
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        """Averages what DDP did not.

        DDP wants a gradient of every parameter in a pass that a forward pass was made for. It has
        else averaged none or a part of them, which it would only tell in the next forward pass. A
        pass to inputs alone, by ``torch.autograd.grad``, gives no parameter one and is well.
        """
        travelling, self._travelling = self._travelling, []
        with contact("averaging gradients", self._mesh):
            for average in travelling:
                average.wait()
        self._comparisons.settle()
        if self._ddp is not None and not self._averaged:
            try:
                self._ddp.reducer._rebuild_buckets()  # raises if DDP has begun and not finished
            except RuntimeError:
                self._leave_ddp(self._ddp)
            else:
                self._ddp.reducer.prepare_for_backward([])
        by_ddp = self._averaged and not self._averaged_before
        if self._got_grads and not by_ddp:
            self._average_by_hand()

    def _leave_ddp(self, ddp: DistributedDataParallel) -> None:
        ddp._remove_autograd_hooks()
        self._ddp, self._by_hand = None, True
        if self._mesh.rank == 0:
            named = self._body.module.named_parameters()
            unused = [name for name, p in named if p.requires_grad and p.grad is None]
            warnings.warn(
                f"a backward pass gave no gradient to {', '.join(unused) or 'some parameters'}: "
                "from now on gradients are averaged over the ranks after the backward pass, not "
                "during it. Freeze parameters that are not used with requires_grad_(False), and "
                "take one backward pass of the sum of several losses, to have that hidden",
                stacklevel=2,
            )

    def _average_by_hand(self) -> None:
        """Collective over all ranks, which run the same graph and so have the same gradients."""
        gone = [p for p in self._watched if id(p) in self._got_grads]  # such as functional_call's
        concerned = {id(p): p for p in (*self._body.parameters(), *gone)}
        grads = [p.grad for p in concerned.values() if p.grad is not None]
        kinds = {grad.dtype: [g for g in grads if g.dtype == grad.dtype] for grad in grads}
        for same in kinds.values():
            average_(same, self._mesh)


def _average(replica: weakref.ref[Replica], bucket: GradBucket) -> Future[Tensor]:
    found = replica()
    assert found is not None
    return found.average(bucket)


def _is(a: object, b: object) -> bool:
    return a is b


def _is_hooked(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is shown to somebody else than a replica."""
    after: Any = parameter._post_accumulate_grad_hooks or {}
    return bool(parameter._backward_hooks) or any(type(h) is not _Watcher for h in after.values())


class _Watcher:
    """What a parameter calls, which does not keep its replica alive."""

    def __init__(self, replica: Replica, mesh: Mesh) -> None:
        self.replica, self.mesh = weakref.ref(replica), mesh

    def __call__(self, parameter: Tensor) -> None:
        if replica := self.replica():
            replica.on_grad(parameter)


class _Body(nn.Module):
    """The module as DDP sees it, with the ``forward`` that it had before it was parallel."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


_replicas: list[weakref.ref[Replica]] = []


@custom_op("hyperslab::leave", mutates_args=())
def _leave(x: Tensor, replica: int) -> Tensor:
    """An output of the module, as the graph of its forward pass ends."""
    if found := _replicas[replica]():
        found.after_forward()
    return x.clone()


@custom_op("hyperslab::come_back", mutates_args=())
def _come_back(grad: Tensor, replica: int) -> Tensor:
    """The gradient of an output, as the graph of the backward pass begins."""
    if found := _replicas[replica]():
        found.before_backward(grad)
    return grad.clone()


@_leave.register_fake
@_come_back.register_fake
def _(x: Tensor, replica: int) -> Tensor:
    return torch.empty_like(x)


def _keep_number(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.replica = inputs[1]


_leave.register_autograd(
    lambda ctx, grad: (_come_back(grad, ctx.replica), None), setup_context=_keep_number
)
