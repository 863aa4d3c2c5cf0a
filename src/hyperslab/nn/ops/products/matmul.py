"""Products of tensors that are summed over the dims they share: matmul and its kin.

Such a product is described by names for the dims of its operands and of its result, as in einsum.
A dim may be split, in all operands alike: if it is one of the result, that is split so; over one
that is summed, the ranks add up what they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, Split, integers
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import OPS, Call, define, unsupported
from hyperslab.nn.ops.reduce.reductions import widened
from hyperslab.nn.placement import recut
from hyperslab.nn.slab import Slab, check_one_grid

Names = tuple[str, ...]
"""The names of a tensor's dims."""


class ProductPlan(NamedTuple):
    """How operands with named dims go together."""

    targets: tuple[Layout, ...]
    """The layout in which each operand takes part."""
    output: Layout
    axes: tuple[str, ...]
    """The axes over which the results of the ranks are to be added."""


def contract(
    function: Callable[..., Any],
    operands: Sequence[Slab | Tensor],
    names: tuple[Names, ...],
    output: Names,
    run: Callable[..., Tensor],
    bias: Slab | Tensor | None = None,
) -> Slab | Tensor:
    """The product that ``run`` makes of pieces of the operands; ``names`` are those of their dims.

    What is not named in ``output`` is summed over. ``bias``, if there is one, is the last argument
    of ``run``, or is added to what was summed over ranks: its dims are the last of the output.

    Collective over the axes that split what is summed over.
    """
    if bias is not None:
        operands = (*operands, bias)
        names = (*names, output[len(output) - bias.ndim :])
    like, plan = plan_product(function, operands, names, output)
    pieces = [bring(t, target, like) for t, target in zip(operands, plan.targets, strict=True)]
    if plan.axes:
        added = pieces.pop() if bias is not None else None
        part = run(*pieces)
        local = reduce_sum(widened(part), like.mesh, plan.axes).to(part.dtype)
        local = local if added is None else local + added.to(local.dtype)
    else:
        local = run(*pieces)
    return like.with_local(local, plan.output) if local.ndim else local


def bring(t: Slab | Tensor, target: Layout, like: Slab) -> Tensor:
    """This rank's piece of ``t`` under ``target``; a plain tensor is whole on every rank."""
    if isinstance(t, Slab):
        return recut(t, target).local
    if not any(target.splits):
        return t
    return recut(like.with_local(t, Layout.unsplit(t.shape)), target).local


def plan_product(
    function: Callable[..., Any],
    operands: Sequence[Slab | Tensor],
    names: tuple[Names, ...],
    output: Names,
    *,
    gathers: bool = False,
) -> tuple[Slab, ProductPlan]:
    """One of the Slabs among the operands, and how they go together.

    Unless ``gathers``, refused if a dim of an operand would have to be gathered over an axis that
    splits nothing else of it. Otherwise it is, where the first operand is split in another way.
    """
    slabs = [t for t in operands if isinstance(t, Slab)]
    check_one_grid(slab.mesh.grid for slab in slabs)
    layouts = tuple(t.layout if isinstance(t, Slab) else Layout.unsplit(t.shape) for t in operands)
    plan = _plan(layouts, names, output, gathers)
    if isinstance(plan, str):
        split = max(slabs, key=lambda slab: len(slab.layout.split_dims))
        raise unsupported(function, split, plan)
    return slabs[0], plan


@lru_cache(maxsize=4096)
def _plan(
    layouts: tuple[Layout, ...], names: tuple[Names, ...], output: Names, gathers: bool
) -> ProductPlan | str:
    """The plan, or why there is none."""
    if any(len(set(mine)) < len(mine) for mine in names):
        return "it takes a diagonal"
    extents = _extents(layouts, names)
    splits = _splits(layouts, names, extents)
    targets = tuple(
        Layout(
            layout.shape,
            tuple(
                splits.get(name) if extent == extents[name] else None
                for name, extent in zip(mine, layout.shape, strict=True)
            ),
        )
        for layout, mine in zip(layouts, names, strict=True)
    )
    for layout, target in zip(layouts, () if gathers else targets, strict=False):
        for dim, split in enumerate(layout.splits):
            if split and layout.shape[dim] > 1 and split.axis not in target.axes:
                return (
                    f"dim {dim} of an operand of shape {layout.shape} would have to be gathered "
                    f"over {split.axis}"
                )
    result = Layout(
        tuple(extents[name] for name in output), tuple(splits.get(name) for name in output)
    )
    axes = tuple(split.axis for name, split in splits.items() if name not in output)
    return ProductPlan(targets, result, axes)


def _extents(layouts: tuple[Layout, ...], names: tuple[Names, ...]) -> dict[str, int]:
    """The extent of every named dim; what has an extent of 1 is stretched to that of others."""
    extents: dict[str, int] = {}
    for layout, mine in zip(layouts, names, strict=True):
        for name, extent in zip(mine, layout.shape, strict=True):
            known = extents.get(name, 1)
            if known != 1 and extent not in (1, known):
                shapes = " and ".join(str(layout.shape) for layout in layouts)
                raise LayoutError(f"operands of shapes {shapes} do not fit each other")
            extents[name] = extent if known == 1 else known
    return extents


def _splits(
    layouts: tuple[Layout, ...], names: tuple[Names, ...], extents: dict[str, int]
) -> dict[str, Split]:
    """How each named dim is split: as in the first operand that splits it, if the axis is free."""
    splits: dict[str, Split] = {}
    for layout, mine in zip(layouts, names, strict=True):
        for name, extent, split in zip(mine, layout.shape, layout.splits, strict=True):
            taken = {chosen.axis for chosen in splits.values()}
            if split and name not in splits and extent == extents[name] and split.axis not in taken:
                splits[name] = split
    return splits


def product_flops(left: int = 0) -> Callable[[Call], int]:
    """Counts a product along the last dim of the operand ``left``: two for each of its elements."""

    def count(call: Call) -> int:
        (out,) = call.outputs()
        return int(2 * out.numel() * call.operands[left].shape[-1])

    return count


def _tensordot_flops(call: Call) -> int:
    (out,) = call.outputs()
    # Every extent stands in two of the three tensors.
    return 2 * math.isqrt(math.prod(t.numel() for t in (*call.operands[:2], out)))


def _einsum_flops(call: Call) -> int:
    shapes = tuple(Layout.unsplit(t.shape) for t in call.operands)
    names, _ = parse_equation(call.options["equation"], tuple(t.ndim for t in call.operands))
    return 2 * math.prod(_extents(shapes, names).values())


@lru_cache(maxsize=256)
def _matmul_names(ndim: int, other: int) -> tuple[tuple[Names, Names], Names]:
    """Vectors have the shared dim alone; what stands before matrices broadcasts."""
    batch = tuple(f"batch {n}" for n in range(max(ndim, other) - 2))[::-1]
    first = (*batch[len(batch) - max(ndim - 2, 0) :], *(("row",) if ndim > 1 else ()), "shared")
    second = (*batch[len(batch) - max(other - 2, 0) :], "shared", *(("column",) * (other > 1)))
    rows_columns = (*(("row",) * (ndim > 1)), *(("column",) * (other > 1)))
    return (first, second), (*batch, *rows_columns)


def _product(
    function: Callable[..., Any], input: Slab | Tensor, other: Slab | Tensor
) -> Slab | Tensor:
    if not input.ndim or not other.ndim:
        raise LayoutError("a matrix product wants operands of at least 1 dim")
    names, output = _matmul_names(input.ndim, other.ndim)
    return contract(function, (input, other), names, output, function)


def _make_matmul(function: Callable[..., Any], *dims: int) -> None:
    """A product as ``matmul``'s, of operands of ``dims`` dims each, or of any."""

    @define("product", function, flops=product_flops())
    def matmul(
        input: Slab | Tensor,
        other: Slab | Tensor | None = None,
        **named: Slab | Tensor,
    ) -> Slab | Tensor:
        second = other if other is not None else named[next(iter(named))]
        if dims and (input.ndim, second.ndim) != dims:
            raise LayoutError(
                f"{function.__name__} wants operands of {dims[0]} and {dims[1]} dims, got shapes "
                f"{tuple(input.shape)} and {tuple(second.shape)}"
            )
        return _product(function, input, second)


@define("product", Tensor.__rmatmul__, flops=product_flops(1))
def rmatmul(self: Slab, other: Slab | Tensor) -> Slab | Tensor:
    """``other @ self``."""
    return _product(torch.matmul, other, self)


def _make_added(name: str, product: str, *, over_batch: bool = False) -> None:
    """``beta * input + alpha * product``, and in place."""
    function, multiply = getattr(torch, name), getattr(torch, product)

    def flops(call: Call) -> int:
        return OPS[multiply].parse(call.operands[1:]).flops

    @define("product", function, getattr(Tensor, name), flops=flops)
    def added(
        input: Slab | Tensor,
        first: Slab | Tensor,
        second: Slab | Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> Any:
        slab = next(t for t in (input, first, second) if isinstance(t, Slab))
        if not slab.is_floating_point() and not slab.is_complex():
            raise unsupported(function, slab, "its numbers are not floating point")
        if isinstance(first, Slab) or isinstance(second, Slab):
            made = dispatch(multiply, (first, second), {})
        else:
            made = multiply(first, second)
        made = made.sum(0) if over_batch else made
        made = made if alpha == 1 else made * alpha
        if beta == 0:
            return made
        term: Any = input
        total = made + (term if beta == 1 else term * beta)
        return total.to(made.dtype) if torch.is_autocast_enabled(made.device.type) else total

    @define("product", getattr(Tensor, f"{name}_"), flops=flops)
    def add_in_place(self: Slab | Tensor, *args: Any, **kwargs: Any) -> Any:
        made = added(self, *args, **kwargs)
        if tuple(made.shape) != tuple(self.shape):
            why = "it would change the shape of what it is written into"
            raise unsupported(function, made, why)
        return dispatch(Tensor.copy_, (self, made), {})


@define("product", torch.outer, Tensor.outer, torch.ger, Tensor.ger)
def outer(input: Slab | Tensor, vec2: Slab | Tensor) -> Slab | Tensor:
    """The product of every element of ``input`` with every one of ``vec2``."""
    names = (("row",), ("column",))
    return contract(torch.outer, (input, vec2), names, ("row", "column"), torch.outer)


@define("product", torch.inner, Tensor.inner, flops=_tensordot_flops)
def inner(input: Slab | Tensor, other: Slab | Tensor) -> Any:
    """The products along the last dim of both, for all the others."""
    if not input.ndim or not other.ndim:
        return dispatch(torch.mul, (input, other), {})
    return tensordot(input, other, ([-1], [-1]))


@define("product", torch.tensordot, flops=_tensordot_flops)
def tensordot(
    a: Slab | Tensor,
    b: Slab | Tensor,
    dims: Any = 2,
) -> Slab | Tensor:
    """The sum of products over ``dims`` of both: the last of ``a`` and first of ``b``, or lists."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    mine, theirs = (
        [dim % max(t.ndim, 1) for dim in integers(given)]
        for t, given in zip((a, b), dims, strict=True)
    )
    if len(mine) != len(theirs):
        raise LayoutError(f"tensordot over {mine} of one tensor and {theirs} of the other")
    first = [f"a{dim}" for dim in range(a.ndim)]
    second = [f"b{dim}" for dim in range(b.ndim)]
    for one, other in zip(mine, theirs, strict=True):
        second[other] = first[one]
    kept = [name for name in (*first, *second) if name not in (first[one] for one in mine)]
    names = (tuple(first), tuple(second))
    return contract(
        torch.tensordot, (a, b), names, tuple(kept), lambda x, y: torch.tensordot(x, y, dims)
    )


@define("product", torch.einsum, flops=_einsum_flops)
def einsum(equation: str, *operands: Any) -> Slab | Tensor:
    """The product that ``equation`` names."""
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = tuple(operands[0])
    names, output = parse_equation(equation, tuple(t.ndim for t in operands))
    return contract(
        torch.einsum, operands, names, output, lambda *pieces: torch.einsum(equation, *pieces)
    )


@lru_cache(maxsize=256)
def parse_equation(equation: str, ndims: tuple[int, ...]) -> tuple[tuple[Names, ...], Names]:
    """The names of the dims of every operand, which have ``ndims`` dims, and of the result.

    >>> parse_equation("...ij,jk", (3, 2))
    ((('...0', 'i', 'j'), ('j', 'k')), ('...0', 'i', 'k'))
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != len(ndims):
        raise LayoutError(f"einsum of {equation!r} wants {len(terms)} operands, got {len(ndims)}")
    names = tuple(_spelled(term, ndim, equation) for term, ndim in zip(terms, ndims, strict=True))
    longest = max((name for mine in names for name in mine if name[:3] == "..."), default="")
    dots = tuple(f"...{n}" for n in range(int(longest[3:]), -1, -1)) if longest else ()
    if arrow:
        before, found, after = result.partition("...")
        return names, (*before, *(dots if found else ()), *after)
    letters = given.replace("...", "").replace(",", "")
    once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
    return names, (*dots, *once)


def _spelled(term: str, ndim: int, equation: str) -> Names:
    """One operand's dims; those that ``...`` stands for are counted from the right."""
    before, dots, after = term.partition("...")
    num = ndim - len(before) - len(after)
    if num < 0 or (num and not dots):
        raise LayoutError(f"einsum of {equation!r}: {term!r} does not name {ndim} dims")
    return (*before, *(f"...{n}" for n in range(num - 1, -1, -1)), *after)


@define("product", F.bilinear)
def bilinear(
    input1: Slab | Tensor,
    input2: Slab | Tensor,
    weight: Slab | Tensor,
    bias: Slab | Tensor | None = None,
) -> Any:
    """``input1 @ weight @ input2 + bias`` along the last dims, one for each weight matrix."""
    batch = tuple(f"batch {n}" for n in range(input1.ndim - 1))
    names = ((*batch, "in1"), (*batch, "in2"), ("out", "in1", "in2"))
    operands = (input1, input2, weight)
    return contract(F.bilinear, operands, names, (*batch, "out"), _bilinear, bias)


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Torch's own, which does not take empty pieces."""
    if x.numel() and y.numel():
        return F.bilinear(x, y, weight, bias)
    made = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return made if bias is None else made + bias


for _function in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul):
    _make_matmul(_function)
for _name, _dims in {
    "mm": (2, 2),
    "bmm": (3, 3),
    "mv": (2, 1),
    "dot": (1, 1),
    "vdot": (1, 1),
}.items():
    _make_matmul(getattr(torch, _name), *_dims)
    _make_matmul(getattr(Tensor, _name), *_dims)
_make_added("addmm", "mm")
_make_added("addmv", "mv")
_make_added("addr", "outer")
_make_added("baddbmm", "bmm")
_make_added("addbmm", "bmm", over_batch=True)
