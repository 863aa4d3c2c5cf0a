"""Norms of vectors that run over any dims of the global tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.layout import integers
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.reduce.reductions import Dims, normalize_dims, total, widened, without_dims
from hyperslab.nn.slab import Slab


def norm_of(
    x: Slab, p: float, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None = None
) -> Slab | Tensor:
    """``sum(abs(x) ** p) ** (1 / p)`` over ``dims``, and what it tends to for 0 and infinite p."""
    if not x.layout.axes_of(dims):
        local = torch.linalg.vector_norm(x.local, p, dims, keepdim, dtype=dtype)
        return without_dims(x, local, dims, keepdim=keepdim)
    out_dtype = torch.linalg.vector_norm(x.local.new_zeros(1), p, dtype=dtype).dtype
    sizes = x.with_local(widened(x.local if dtype is None else x.local.to(dtype)).abs())
    return _norm_of_sizes(sizes, p, dims, keepdim).to(out_dtype)


def _norm_of_sizes(x: Slab, p: float, dims: tuple[int, ...], keepdim: bool) -> Slab | Tensor:
    if math.isinf(p):
        extreme: Any = x.amax if p > 0 else x.amin
        return extreme(dims, keepdim)  # type: ignore[no-any-return]
    if p == 0:  # torch's own has no gradient either, but requires one
        ones = torch.linalg.vector_norm(x.local[..., None], 0, -1)
        return total(x.with_local(ones), dims, keepdim)
    summed = total(x.with_local(_power(x.local, p)), dims, keepdim)
    if isinstance(summed, Slab):
        return summed.with_local(_power(summed.local, 1 / p))
    return _power(summed, 1 / p)


def _power(x: Tensor, p: float) -> Tensor:
    """``x ** p``, whose gradient is 0 at 0."""
    if x.requires_grad and p < 1:
        x = torch.where(x == 0, x.detach(), x)
    return x**p


@define("reducing", torch.linalg.vector_norm)
def vector_norm(
    x: Slab,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Slab | Tensor:
    """The norm of the elements along ``dim`` of the global tensor."""
    return norm_of(x, ord, normalize_dims(x, dim), keepdim, dtype)


@define("reducing", torch.norm, Tensor.norm)
def norm(
    x: Slab,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Slab | Tensor:
    """The norm of the elements along ``dim`` of the global tensor; ``"fro"`` is that of p = 2."""
    if isinstance(p, str) and p != "fro":
        raise unsupported(torch.norm, x, f"p={p!r} is not supported")
    order = 2.0 if p is None or isinstance(p, str) else p
    return norm_of(x, order, normalize_dims(x, dim), keepdim, dtype)


@define("reducing", torch.linalg.matrix_norm)
def matrix_norm(
    A: Slab,  # noqa: N803
    ord: float | str = "fro",
    dim: tuple[int, int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Slab | Tensor:
    """The norm of the matrices along two dims; those of singular values want both whole."""
    function = torch.linalg.matrix_norm
    dims = normalize_dims(A, dim)
    if not A.layout.axes_of(dims):
        local = function(A.local, ord, dim, keepdim, dtype=dtype)
        return without_dims(A, local, dims, keepdim=keepdim)
    if ord == "fro":
        return norm_of(A, 2, dims, keepdim, dtype)
    if isinstance(ord, str) or abs(ord) not in (1, math.inf):
        raise unsupported(function, A, f"ord={ord!r} wants both dims whole")
    summed, kept = normalize_dims(A, dim[0]), normalize_dims(A, dim[1])
    if abs(ord) == math.inf:
        summed, kept = kept, summed
    sums = norm_of(A, 1, summed, True, dtype)
    assert isinstance(sums, Slab)
    found: Any = sums.amax(kept, True) if ord > 0 else sums.amin(kept, True)
    return found if keepdim else found.squeeze(dims)  # type: ignore[no-any-return]


@define("reducing", torch.linalg.norm)
def linalg_norm(
    A: Slab,  # noqa: N803
    ord: float | str | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Slab | Tensor:
    """A vector norm along one dim, a matrix norm along two; of all elements without ``ord``."""
    function = torch.linalg.norm
    given = tuple(range(A.ndim)) if dim is None else integers(dim)
    if dim is not None and len(given) not in (1, 2):
        raise LayoutError(f"linalg.norm wants one dim or two, got {dim}")
    if ord is None:
        return norm_of(A, 2, normalize_dims(A, given), keepdim, dtype)
    if len(given) == 2:
        return matrix_norm(A, ord, given, keepdim, dtype=dtype)
    if len(given) != 1 or isinstance(ord, str):
        raise unsupported(function, A, f"it wants a vector or a matrix for ord={ord!r}")
    return norm_of(A, ord, normalize_dims(A, given), keepdim, dtype)


@define("reducing", torch.dist, Tensor.dist)
def dist(x: Slab | Tensor, other: Slab | Tensor, p: float = 2) -> Slab | Tensor:
    """The norm of the difference."""
    apart: Any = x - other  # type: ignore[operator]
    return norm_of(apart, p, normalize_dims(apart, None), False)


@define("reducing", F.normalize)
def normalize(x: Slab, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Slab:
    """``x`` divided by its norms along ``dim``, which are at least ``eps``."""
    norms: Any = norm(x, p, dim, True)
    return x / norms.clamp_min(eps)  # type: ignore[no-any-return]
