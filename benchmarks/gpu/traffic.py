"""What a training step must compute and move, counted on tensors that take no memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperslab.models.flops import describe

HEADS = ("convolution", "mm", "norm")
"""Operators, by a part of their name, that a fused pass begins with.

What follows them element by element, or window by window, can be computed while their output is
still on the chip. A norm needs all of it first.
"""


@dataclass(frozen=True)
class Work:
    """That of one step, forward and backward."""

    flops: int
    """Three times those of convolutions and dense layers in the forward pass, as is usual."""
    nbytes: int
    """Every operator reads its inputs and writes its outputs."""
    fused_nbytes: int
    """Only what passes between fused groups moves; the backward pass computes the rest again."""
    largest_numel: int
    """Elements of the largest tensor."""


def count_step(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    loss_of: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Work:
    """The work of a step of the module on a batch of ``shape``, with activations of ``dtype``."""
    with torch.device("meta"):
        model = make().to(dtype)
        x = torch.empty(shape, dtype=dtype)
        with _Recorder() as forward:
            loss = loss_of(model(x))
        with _Recorder() as backward:
            loss.backward()
        parameters = {_key(p): p.nbytes for p in model.parameters()}
        flops = describe(model, shape[1:]).forward_flops * shape[0] * 3
    nbytes = sum(op.nbytes for op in (*forward.ops, *backward.ops))
    largest = max(n for op in forward.ops for n in op.writes.values()) // dtype.itemsize
    return Work(flops, nbytes, _fused_nbytes(forward.ops, parameters, _key(x)), largest)


@dataclass
class _Op:
    name: str
    reads: dict[int, int]
    """Bytes by storage."""
    writes: dict[int, int]

    @property
    def nbytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


class _Recorder(TorchDispatchMode):
    """Remembers the operators that move data; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._alive: list[object] = []  # so that no two tensors get the same key

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        reads, writes = _sizes(tree_leaves((args, kwargs))), _sizes(tree_leaves(out))
        is_view = writes.keys() <= reads.keys() and not func._schema.is_mutable
        if not is_view:
            self.ops.append(_Op(func._schema.name, reads, writes))
        self._alive.append((args, kwargs, out))
        return out


def _sizes(leaves: Iterable[object]) -> dict[int, int]:
    return {_key(x): x.nbytes for x in leaves if isinstance(x, Tensor)}


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@dataclass
class _Group:
    """Operators that one kernel could compute."""

    reads: dict[int, int] = field(default_factory=dict)
    """From outside the group."""
    made: dict[int, int] = field(default_factory=dict)

    def add(self, op: _Op) -> None:
        self.reads |= {key: n for key, n in op.reads.items() if key not in self.made}
        self.made |= op.writes


def _fused_nbytes(ops: list[_Op], parameters: dict[int, int], first: int) -> int:
    """Forward, a group reads its inputs and weights and writes what others read.

    Backward, it reads the same again and the gradients of what it wrote, and writes those of its
    inputs and weights. The network's input wants none.
    """
    groups: list[_Group] = []
    maker: dict[int, _Group] = {}
    for op in ops:
        begins = any(head in op.name for head in HEADS)
        group = None if begins else next((maker[key] for key in op.reads if key in maker), None)
        if group is None:
            group = _Group()
            groups.append(group)
        group.add(op)
        maker |= dict.fromkeys(op.writes, group)
    total = 0
    read = {key for group in groups for key in group.reads}
    for group in groups:
        outputs = sum(n for key, n in group.made.items() if key in read)
        weights = sum(n for key, n in group.reads.items() if key in parameters)
        inputs = sum(group.reads.values()) - weights
        wanted = inputs - group.reads.get(first, 0)
        total += 2 * (inputs + weights + outputs) + wanted + weights
    return total
