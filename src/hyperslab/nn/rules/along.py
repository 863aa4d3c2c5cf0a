"""Functions that work along some dims and treat every other dim as a batch.

Where the dims that such a function works along are whole on every rank, it runs on the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hyperslab.comm.agree import run_together
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout, Split
from hyperslab.nn.recut import recut
from hyperslab.nn.registry import integers, numpy_names, register, unsupported
from hyperslab.nn.rules.extreme import extreme_of
from hyperslab.nn.slab import Slab, check_one_grid, is_slab

Shape = tuple[int, ...]
Pick = Callable[[Shape, tuple[Any, ...], dict[str, Any]], Any]
"""The dims that a call works along (None: all), from the shape and the call's arguments."""


class Along(NamedTuple):
    """How a function works along dims."""

    dims: Pick
    keeps: bool | int = True
    """Whether its results keep these dims; a number is the place of the argument ``keepdim``."""
    others: str = "alike"
    """How its further tensors go with the first: ``alike`` are cut as it is (vectors are whole),
    ``broadcast`` against it, ``whole`` are used as they are on every rank, ``numbers`` are 0-d."""
    in_front: Callable[..., int] = lambda *_, **__: 0
    """How many new dims its results have in front of the batch."""
    takes_empty: bool = True
    """Whether torch runs it on a batch of nothing."""
    looks: bool = False
    """Whether values, such as an index out of range, can make it raise."""


def at(place: int, default: Any = None) -> Pick:
    """The argument ``dim``, which stands at ``place`` if it is not named."""

    def pick(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = kwargs.get("dim", kwargs.get("axis", default))
        return args[place] if len(args) > place else named

    return pick


def last(num: int) -> Pick:
    """The last ``num`` dims."""

    def pick(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(shape) < num:
            raise RuntimeError(f"a tensor of shape {shape} does not have {num} dims to work along")
        return range(-num, 0)

    return pick


def all_but(place: int) -> Pick:
    """Every dim but the argument ``dim``."""
    pick = at(place)

    def rest(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = _normalized(pick(shape, args, kwargs), len(shape))
        return [dim for dim in range(len(shape)) if dim not in batch]

    return rest


def _transformed(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dims of an n-dim Fourier transform: ``dim``, or as many of the last as ``s`` sizes."""
    sizes = args[1] if len(args) > 1 else kwargs.get("s")
    dims = at(2)(shape, args, kwargs)
    return range(-len(sizes), 0) if dims is None and sizes is not None else dims


def _num_quantiles_dims(input: Any, q: Any = None, *_: Any, **__: Any) -> int:
    return q.ndim if isinstance(q, Tensor | Slab) else 0


ALONG: dict[str, Along] = {
    # Sorting, and what comes of it.
    "sort argsort": Along(at(1, -1)),
    "msort": Along(lambda *_: 0),
    "topk": Along(at(2, -1)),
    "kthvalue": Along(at(2, -1), keeps=3),
    "median nanmedian": Along(at(1), keeps=2),
    "mode": Along(at(1, -1), keeps=2),
    "quantile nanquantile": Along(at(2), keeps=3, in_front=_num_quantiles_dims, takes_empty=False),
    # Differences and sums from one element to the next.
    "cummax cummin logcumsumexp": Along(at(1)),
    "diff": Along(at(2, -1)),
    "cumulative_trapezoid": Along(at(9, -1)),
    "trapezoid trapz": Along(at(9, -1), keeps=False),
    "gradient": Along(at(9), others="numbers"),
    # Vectors.
    "glu": Along(at(1, -1)),
    "renorm": Along(all_but(2)),
    "local_response_norm": Along(lambda *_: 1),
    "cosine_similarity": Along(at(2, 1), keeps=False, others="broadcast"),
    "pairwise_distance": Along(last(1), keeps=4, others="broadcast"),
    "vecdot": Along(at(9, -1), keeps=False, others="broadcast"),
    "cdist": Along(last(2), others="broadcast"),
    "vander": Along(last(1), others="numbers"),
    # Fourier transforms.
    "fft ifft rfft irfft hfft ihfft": Along(at(2, -1), takes_empty=False),
    "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2": Along(at(2, (-2, -1)), takes_empty=False),
    "fftn ifftn rfftn irfftn hfftn ihfftn": Along(_transformed, takes_empty=False),
    "fftshift ifftshift": Along(at(1)),
    # Matrices in the last two dims.
    "tril triu": Along(last(2)),
    """det logdet slogdet inverse inv inv_ex pinverse pinv cholesky cholesky_ex cholesky_inverse qr
    svd svdvals eig eigh eigvals eigvalsh matrix_exp matrix_power matrix_rank lu lu_factor
    lu_factor_ex ldl_factor ldl_factor_ex""": Along(last(2), others="numbers"),
    "cond": Along(last(2), others="numbers", takes_empty=False),
    "solve_triangular cholesky_solve": Along(last(2), others="broadcast"),
    # Indices along a dim, the same in every batch or one for each element.
    "gather scatter scatter_add scatter_reduce": Along(at(1), looks=True),
    "take_along_dim": Along(at(2), others="broadcast", looks=True),
    "index_add index_copy index_fill index_reduce": Along(at(1), looks=True),
    # Each element by itself, looked up in tensors that are whole.
    "bucketize isin": Along(lambda *_: (), others="whole"),
}
"""The functions of torch's namespaces, and the methods of tensors, in place too, by name."""


_SPACES = (torch, Tensor, F, torch.special, torch.linalg, torch.fft)


def _functions(names: str) -> Iterator[Callable[..., Any]]:
    for name in names.split():
        for space in _SPACES:
            for spelling in (name, f"{name}_"):
                function = getattr(space, spelling, None)
                if callable(function):
                    yield function


def _make_rule(function: Callable[..., Any], along: Along) -> Callable[..., Any]:
    in_place = getattr(function, "__name__", "").endswith("_")

    def rule(*args: Any, **kwargs: Any) -> Any:
        return run_along(function, along, args, kwargs, in_place=in_place)

    return rule


def run_along(
    function: Callable[..., Any],
    along: Along,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_place: bool = False,
) -> Any:
    """What ``function`` gives for global tensors that are whole along the dims it works along."""
    operands = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Slab | Tensor)]
    like = _check(function, args, kwargs, operands, in_place=in_place)
    layouts = tuple(t.layout if isinstance(t, Slab) else Layout.unsplit(t.shape) for t in operands)
    shape = layouts[0].shape
    if along.others == "broadcast":
        shape = (1,) * (max(len(layout.shape) for layout in layouts) - len(shape)) + shape
    dims = _normalized(along.dims(shape, args, kwargs), len(shape))
    plan = _plan(layouts, dims, along.others, in_place)
    if isinstance(plan, _Refusal):
        blocking = like.with_local(like.local, layouts[plan.number])
        raise unsupported(function, blocking, plan.why)
    pieces = {
        id(t): recut(t if isinstance(t, Slab) else like.with_local(t, layout), target).local
        for t, layout, target in zip(operands, layouts, plan.targets, strict=True)
    }
    batch = like.with_local(like.local, plan.batch)
    empty = (
        []
        if along.takes_empty
        else [d for d in plan.batch.split_dims if not batch.box.spans[d].size]
    )
    if empty:
        pieces[id(operands[0])] = _with_one(pieces[id(operands[0])], empty)

    def run() -> Any:
        return function(
            *(pieces.get(id(arg), arg) for arg in args),
            **{name: pieces.get(id(arg), arg) for name, arg in kwargs.items()},
        )

    out = run_together(run, like.mesh) if along.looks and plan.batch.split_dims else run()
    if in_place:
        return operands[0]
    gone = () if _keeps(along, args, kwargs) else dims
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    sources = [None] * along.in_front(*args, **kwargs) + kept
    for dim in empty:
        out = out.narrow(sources.index(dim), 0, 0)
    return _wrapped(function, out, batch, sources)


def _with_one(piece: Tensor, dims: list[int]) -> Tensor:
    """``piece`` with an element along ``dims``, in which it has none."""
    for dim in dims:
        shape = [1 if d == dim else n for d, n in enumerate(piece.shape)]
        piece = torch.cat([piece, piece.new_ones(shape)], dim)
    return piece


def _check(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[Slab | Tensor],
    *,
    in_place: bool,
) -> Slab:
    """The first Slab among the operands, if they are such as can be worked with."""
    slabs = [operand for operand in operands if isinstance(operand, Slab)]
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    nested = next(filter(is_slab, tree_leaves(lists, is_leaf=is_slab)), None) if lists else None
    if nested is not None:
        raise unsupported(function, nested, "it stands in a list")
    if kwargs.get("out") is not None:
        raise unsupported(function, slabs[0], "out= is not supported")
    if in_place and not isinstance(operands[0], Slab):
        why = "it would write a split tensor into a plain one, which every rank holds whole"
        raise unsupported(function, slabs[0], why)
    check_one_grid(slab.mesh.grid for slab in slabs)
    return slabs[0]


def _normalized(dims: Any, ndim: int) -> Shape:
    """``dims`` as non-negative dims; None are all dims."""
    if dims is None:
        return tuple(range(ndim))
    reach = max(ndim, 1)
    picked = integers(dims)
    for dim in picked:
        if not -reach <= dim < reach:
            raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dims")
    return tuple(dim % ndim for dim in picked) if ndim else ()


def _keeps(along: Along, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(along.keeps, bool):
        return along.keeps
    named = kwargs.get("keepdim", kwargs.get("keepdims", False))
    return bool(args[along.keeps] if len(args) > along.keeps else named)


class _Plan(NamedTuple):
    batch: Layout
    """The layout of the results along the dims that are not worked along."""
    targets: tuple[Layout, ...]
    """The layout in which each operand takes part."""


class _Refusal(NamedTuple):
    number: int
    """Of the operand that is in the way."""
    why: str


@lru_cache(maxsize=4096)
def _plan(
    layouts: tuple[Layout, ...], dims: Shape, others: str, in_place: bool
) -> _Plan | _Refusal:
    """The batch is split as in the first operand; else, if that is not written to, as in others."""
    ndim = max(len(layout.shape) for layout in (layouts if others == "broadcast" else layouts[:1]))
    members = [_takes_part(layout, ndim, others, first=not n) for n, layout in enumerate(layouts)]
    for number, (layout, member) in enumerate(zip(layouts, members, strict=True)):
        if not member and (why := _not_whole(layout, others)):
            return _Refusal(number, why)
        if member and any(dim + ndim - len(layout.shape) in dims for dim in layout.split_dims):
            return _Refusal(number, "it works along a split dim")
    leads = [layout for layout, member in zip(layouts, members, strict=True) if member]
    batch = _merged(leads, ndim, leads[:1] if in_place else leads)
    targets = []
    for number, (layout, member) in enumerate(zip(layouts, members, strict=True)):
        target = _cut_as(batch, layout, others) if member else layout
        if target is None:
            return _Refusal(number, "its extents differ from another operand's along a split dim")
        targets.append(target)
    return _Plan(batch, tuple(targets))


def _takes_part(layout: Layout, ndim: int, others: str, *, first: bool) -> bool:
    """Whether an operand has the dims of the batch."""
    return first or others == "broadcast" or (others == "alike" and len(layout.shape) == ndim)


def _not_whole(layout: Layout, others: str) -> str:
    """Why an operand without the dims of the batch cannot be used as it is, or nothing."""
    if layout.split_dims:
        return "it must be whole on every rank"
    most = {"alike": 1, "numbers": 0}.get(others, len(layout.shape))
    return "" if len(layout.shape) <= most else "its dims are not those of the first operand"


def _merged(layouts: list[Layout], ndim: int, splitting: list[Layout]) -> Layout:
    """The layout of what all broadcast to, split as those that are ``splitting``."""
    shape, splits = [1] * ndim, dict[int, Split]()
    for layout in layouts:
        for dim, extent in enumerate(layout.shape, ndim - len(layout.shape)):
            shape[dim] = extent if shape[dim] == 1 else shape[dim]
    for layout in splitting:
        for dim, split in enumerate(layout.splits, ndim - len(layout.shape)):
            whole = layout.shape[dim - ndim] == shape[dim]
            taken = {chosen.axis for chosen in splits.values()}
            if split and whole and dim not in splits and split.axis not in taken:
                splits[dim] = split
    return Layout(tuple(shape), tuple(splits.get(dim) for dim in range(ndim)))


def _cut_as(batch: Layout, layout: Layout, others: str) -> Layout | None:
    """The layout of an operand that goes with ``batch``; None where its extents do not fit."""
    behind = len(batch.shape) - len(layout.shape)
    splits: list[Split | None] = []
    for dim, extent in enumerate(layout.shape, behind):
        split = batch.splits[dim]
        stretched = extent == 1 and others == "broadcast"
        if split and extent != batch.shape[dim] and not stretched:
            return None
        splits.append(split if extent == batch.shape[dim] else None)
    return Layout(layout.shape, tuple(splits))


def _wrapped(function: Callable[..., Any], out: Any, batch: Slab, sources: list[int | None]) -> Any:
    """Tensors in ``out`` as Slabs; ``sources`` are the dims of the batch that theirs are."""
    if isinstance(out, tuple | list):
        kind: Any = type(out)
        return kind(_wrapped(function, each, batch, sources) for each in out)
    if not isinstance(out, Tensor):
        return out
    box, shape = batch.box, list(out.shape)
    splits: list[Split | None] = [None] * out.ndim
    for place, dim in enumerate(sources):
        if dim is None or not (split := batch.layout.splits[dim]):
            continue
        if place >= out.ndim or shape[place] != box.spans[dim].size:
            raise unsupported(function, batch, "its result does not follow the batch")
        splits[place], shape[place] = split, batch.layout.shape[dim]
    return batch.with_local(out, Layout(tuple(shape), tuple(splits))) if out.ndim else out


@register(F.embedding)
def embedding(
    input: Slab | Tensor,
    weight: Slab | Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The rows of ``weight``, whole on every rank, that ``input`` names."""
    if max_norm is not None or scale_grad_by_freq:
        slab = input if isinstance(input, Slab) else weight
        assert isinstance(slab, Slab)
        why = "max_norm and scale_grad_by_freq depend on which rows other ranks read"
        raise unsupported(F.embedding, slab, why)
    return run_along(F.embedding, _LOOKED_UP, (input, weight, padding_idx), {"sparse": sparse})


@register(F.one_hot)
def one_hot(tensor: Slab, num_classes: int = -1) -> Any:
    """Each number as a vector of zeros and a one; by default as long as the largest one asks."""
    x = tensor
    if num_classes == -1 and x.layout.split_dims:
        if not x.numel():
            raise LayoutError("one_hot of an empty tensor needs num_classes")
        num_classes = int(extreme_of(x, tuple(range(x.ndim)), largest=True)) + 1
    return run_along(F.one_hot, _LOOKED_UP, (x, num_classes), {})


@register(torch.searchsorted)
def searchsorted(sorted_sequence: Slab | Tensor, input: Any = None, **kwargs: Any) -> Any:
    """Where each number belongs in a sorted sequence: one for all, or one for each row of them."""
    values = kwargs.pop("self", input)
    if sorted_sequence.ndim == 1 and isinstance(values, Slab | Tensor):

        def search(values: Tensor, sequence: Tensor, **options: Any) -> Tensor:
            return torch.searchsorted(sequence, values, **options)

        return run_along(search, _LOOKED_UP, (values, sorted_sequence), kwargs)
    return run_along(torch.searchsorted, Along(last(1)), (sorted_sequence, values), kwargs)


@register(torch.linalg.solve)
def solve(
    A: Slab | Tensor,  # noqa: N803
    B: Slab | Tensor,  # noqa: N803
    *,
    left: bool = True,
    out: Slab | Tensor | None = None,
) -> Any:
    """``X`` in ``A @ X = B`` for batches of matrices."""
    if B.ndim == 1 or (B.ndim == A.ndim - 1 and tuple(B.shape) == tuple(A.shape[:-1])):
        slab = A if isinstance(A, Slab) else B
        assert isinstance(slab, Slab)
        raise unsupported(torch.linalg.solve, slab, "B must be a batch of matrices, not of vectors")
    along = Along(last(2), others="broadcast")
    return run_along(torch.linalg.solve, along, (A, B), {"left": left, "out": out})


@register(torch.cross, Tensor.cross)
@numpy_names
def cross(
    input: Slab | Tensor,
    other: Slab | Tensor,
    dim: int | None = None,
    *,
    out: Slab | Tensor | None = None,
) -> Any:
    """The cross product along ``dim``, or along the first dim of three elements."""
    if dim is None:
        shape = input.shape if 3 in input.shape else other.shape
        dim = tuple(shape).index(3) - len(shape) if 3 in shape else -1
    return run_along(torch.linalg.cross, _CROSS, (input, other), {"dim": dim, "out": out})


_LOOKED_UP = Along(lambda *_: (), others="whole", looks=True)
_CROSS = Along(at(9, -1), others="broadcast")

register(torch.linalg.cross)(_make_rule(torch.linalg.cross, _CROSS))
for _names, _along in ALONG.items():
    for _function in _functions(_names):
        register(_function)(_make_rule(_function, _along))
