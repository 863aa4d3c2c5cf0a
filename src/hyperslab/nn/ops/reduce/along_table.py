"""The functions that work along dims, by name: sorts, spectra, matrices and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.nn.op import define, unsupported, writes_in_place
from hyperslab.nn.ops.reduce.along import Along, Pick, Shape, normalized, run_along
from hyperslab.nn.ops.reduce.at_indices import run_at_indices
from hyperslab.nn.slab import Slab


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
        batch = normalized(pick(shape, args, kwargs), len(shape))
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
    # Indices along a dim.
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


def _make_rule(
    function: Callable[..., Any], along: Along, run: Callable[..., Any] = run_along
) -> Callable[..., Any]:
    in_place = writes_in_place(function)

    def rule(*args: Any, **kwargs: Any) -> Any:
        return run(function, along, args, kwargs, in_place=in_place)

    return rule


@define("reducing", torch.linalg.solve)
def solve(
    A: Slab | Tensor,  # noqa: N803
    B: Slab | Tensor,  # noqa: N803
    *,
    left: bool = True,
) -> Any:
    """``X`` in ``A @ X = B`` for batches of matrices."""
    if B.ndim == 1 or (B.ndim == A.ndim - 1 and tuple(B.shape) == tuple(A.shape[:-1])):
        slab = A if isinstance(A, Slab) else B
        assert isinstance(slab, Slab)
        raise unsupported(torch.linalg.solve, slab, "B must be a batch of matrices, not of vectors")
    along = Along(last(2), others="broadcast")
    return run_along(torch.linalg.solve, along, (A, B), {"left": left})


@define("reducing", torch.cross, Tensor.cross)
def cross(x: Slab | Tensor, other: Slab | Tensor, dim: int | None = None) -> Any:
    """The cross product along ``dim``, or along the first dim of three elements."""
    if dim is None:
        shape = x.shape if 3 in x.shape else other.shape
        dim = tuple(shape).index(3) - len(shape) if 3 in shape else -1
    return run_along(torch.linalg.cross, _CROSS, (x, other), {"dim": dim})


_CROSS = Along(at(9, -1), others="broadcast")
_AT_INDICES = Along(at(1), looks=True)

define("reducing", torch.linalg.cross)(_make_rule(torch.linalg.cross, _CROSS))
for _names, _along in ALONG.items():
    for _function in dict.fromkeys(_functions(_names)):  # torch has some under two names
        define("reducing", _function)(_make_rule(_function, _along))
for _function in _functions("gather scatter scatter_add scatter_reduce"):
    define("reducing", _function)(_make_rule(_function, _AT_INDICES, run_at_indices))
