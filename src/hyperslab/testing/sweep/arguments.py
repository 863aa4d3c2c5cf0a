"""Arguments of one call: guesses at them, which of them are Slabs, and how those are split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor

from hyperslab.torch_private import tree_flatten, tree_map, tree_unflatten

MAX_DIMS = 5


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, all of them plain."""

    label: str
    """How it is found again: the kind of sample and its number, such as ``float64 3``."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in the order in which they are flattened."""
        leaves, _ = tree_flatten((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other values in the place of their tensors."""
        leaves, spec = tree_flatten((self.args, dict(self.kwargs)))
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else _fresh(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        return args, kwargs


def _fresh(leaf: Any) -> Any:
    return leaf.clone_state() if isinstance(leaf, Generator) else leaf


def can_be_slab(tensor: Tensor) -> bool:
    """Whether it has dims and ordinary memory."""
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and tensor.device.type == "cpu" and tensor.ndim > 0


def can_be_split(tensor: Tensor) -> bool:
    """Whether the sweep cuts it."""
    return can_be_slab(tensor) and tensor.ndim <= MAX_DIMS and splittable_dims(tensor) != []


def splittable_dims(tensor: Tensor) -> list[int]:
    """The dims that two ranks can each have a part of."""
    return [dim for dim, extent in enumerate(tensor.shape) if extent > 1 and tensor.numel()]


def guessed_samples(name: str, function: Callable[..., Any]) -> Iterator[Sample]:
    """Argument lists that are known to fit, or those of many guesses that the function takes."""
    calls = _KNOWN[name]() if name in _KNOWN else _guesses()
    for number, (args, kwargs) in enumerate(calls):
        trial = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                function(*trial, **kwargs)
            except Exception:  # noqa: BLE001 - not arguments for it
                continue
        yield Sample(f"guess {number}", args, kwargs)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _tensor(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.25


_SHAPES = ((5,), (3, 4), (2, 3, 6), (2, 3, 4, 5), (2, 4, 3, 4, 3))


@cache
def _guesses() -> tuple[Call, ...]:
    return tuple((args, {}) for shape in _SHAPES for args in _beside(_tensor(*shape)))


def _beside(x: Tensor) -> Iterator[tuple[Any, ...]]:
    """Argument lists that begin with ``x``."""
    same, third = _tensor(*x.shape), _tensor(*x.shape)
    mask, signs = same > 0.7, torch.where(same > 0.7, 1.0, -1.0).double()
    index = torch.zeros(x.shape, dtype=torch.int64)
    yield (x,)
    yield from ((x, number) for number in (0, 1, -1, 2, 0.5, True))
    yield from ((x, *pair) for pair in ((0, 1), (1, 0), (0, -1), (2, 1), (0.5, True), (0.5, False)))
    yield from ((x, other) for other in (same, mask, index, x.shape, torch.float32, "mean"))
    yield from ((x, other) for other in ((0,), (1, 1), (2, 2), (2, 2, 2), [1, 2], -1.5))
    yield from ((x, same, other) for other in (third, 1, 2, 0.5, signs, index, mask))
    yield (x, mask, 2.0)
    yield from ((x, dim, torch.tensor([0, 1])) for dim in (0, -1))
    yield from ((x, dim, torch.tensor([0, 1]), 2.0) for dim in (0, -1))
    yield from ((x, dim, index, same) for dim in (0, -1))
    yield (mask,)
    yield (index,)
    yield (index + 1, 1)
    yield (index + 1, index + 2)
    yield (mask, ~mask)
    yield (x.to(torch.complex128),)
    yield ([x, same],)
    yield ([x, same], 0)


def _with_channels(num_dims: int) -> Tensor:
    return _tensor(2, 4, *(7, 6, 5)[:num_dims])


def _norm_calls() -> list[Call]:
    x, one = _with_channels(2), _tensor(4)
    running = (_tensor(4), _tensor(4))
    return [
        ((x, one, one, *running, True, 0.1, 1e-5, False), {}),
        ((x, None, None, *running, False, 0.1, 1e-5, False), {}),
    ]


def _pool_calls(num_dims: int, *last: Any) -> Callable[[], list[Call]]:
    def calls() -> list[Call]:
        x = _with_channels(num_dims)
        return [((x, *last), {}), ((x, *last, 2), {}), ((x[0], *last), {})]

    return calls


def _dropout_calls(num_dims: int) -> Callable[[], list[Call]]:
    def calls() -> list[Call]:
        x = _with_channels(num_dims)
        return [((x, p, training), {}) for p in (0.5, 0.0, 1.0) for training in (True, False)]

    return calls


def _convolution_calls() -> list[Call]:
    x, weight, bias = _with_channels(2), _tensor(3, 4, 3, 3), _tensor(3)
    return [
        ((x, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        ((x, weight, None, [2, 1], [0, 1], [1, 1], False, [0, 0], 1), {}),
    ]


def _setitem_calls() -> list[Call]:
    x = _with_channels(2)
    mask = x > 0.7
    return [
        ((x, (slice(None), 1), 2.0), {}),
        ((x, (Ellipsis, slice(1, 3)), _tensor(2, 4, 7, 2)), {}),
        ((x, mask, 0.0), {}),
        ((x, (slice(None), slice(None), torch.tensor([0, 2])), 1.0), {}),
        ((x, 0, _tensor(4, 7, 6)), {}),
    ]


def _embedding_calls() -> list[Call]:
    return [((torch.tensor([[0, 2, 1], [3, 0, 4]]), _tensor(5, 3)), {})]


def _torch_embedding_calls() -> list[Call]:
    return [((_tensor(5, 3), torch.tensor([[0, 2, 1], [3, 0, 4]])), {})]


def _attention_calls() -> list[Call]:
    query = _tensor(2, 3, 4)
    return [((query, _tensor(2, 5, 4), _tensor(2, 5, 4)), {})]


_KNOWN: Mapping[str, Callable[[], list[Call]]] = {
    "batch_norm": _norm_calls,
    "instance_norm": _norm_calls,
    "convolution": _convolution_calls,
    "Tensor.__setitem__": _setitem_calls,
    "nn.functional.embedding": _embedding_calls,
    "embedding": _torch_embedding_calls,
    "nn.functional.scaled_dot_product_attention": _attention_calls,
    "nn.functional.conv_tbc": lambda: [((_tensor(7, 2, 4), _tensor(3, 4, 3), _tensor(3)), {})],
    "conv_tbc": lambda: [((_tensor(7, 2, 4), _tensor(3, 4, 3), _tensor(3)), {})],
    "nn.functional.fold": lambda: [((_tensor(2, 8, 12), (4, 5), (2, 2)), {})],
    "nn.functional.affine_grid": lambda: [((_tensor(2, 2, 3), [2, 1, 4, 5]), {})],
    "Tensor.apply_": lambda: [((_tensor(3, 4), abs), {})],
    "Tensor.map_": lambda: [((_tensor(3, 4), _tensor(3, 4), max), {})],
    **{f"max_pool{n}d": _pool_calls(n, 2) for n in (1, 2, 3)},
    **{f"nn.functional.max_pool{n}d_with_indices": _pool_calls(n, 2) for n in (1, 2, 3)},
    **{f"nn.functional.adaptive_max_pool{n}d_with_indices": _pool_calls(n, 2) for n in (1, 2, 3)},
    **{f"nn.functional.lp_pool{n}d": _pool_calls(n, 2.0, 2) for n in (1, 2, 3)},
    **{f"nn.functional.dropout{n}d": _dropout_calls(n) for n in (1, 2, 3)},
    **dict.fromkeys(
        ("dropout", "nn.functional.dropout", "feature_dropout", "alpha_dropout", "native_dropout"),
        _dropout_calls(2),
    ),
}
"""Argument lists for functions that those of ``_guesses`` do not fit."""


# Which arguments of a call are Slabs, and how they are split

AXIS = "depth"
"""The axis of the mesh that all splits are over."""


@dataclass(frozen=True)
class Cut:
    """How one tensor is spread: a Slab cut along ``dim``, or whole if that is None."""

    dim: int | None = None
    bounds: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.dim is None:
            return "whole"
        return f"dim {self.dim} at {'-'.join(map(str, self.bounds))}"


@dataclass(frozen=True)
class Placement:
    """How each tensor of a call is spread; None leaves it a plain tensor."""

    kind: str
    """``main``, ``alike``, ``later``, ``every``, ``crossed`` or ``whole``."""
    cuts: tuple[Cut | None, ...]

    @property
    def main_dim(self) -> int | None:
        """The dim along which the first Slab is split."""
        return next(cut.dim for cut in self.cuts if cut)

    def __str__(self) -> str:
        shown = [f"{number}: {cut}" for number, cut in enumerate(self.cuts) if cut]
        return f"{self.kind} ({', '.join(shown)})"


def placements(tensors: Sequence[Tensor]) -> list[Placement]:
    """All that are tried with these tensors among the arguments, each once."""
    found: dict[tuple[Cut | None, ...], Placement] = {}
    for kind, cuts in _candidates(tensors):
        if any(cuts):
            found.setdefault(cuts, Placement(kind, cuts))
    return list(found.values())


def _candidates(tensors: Sequence[Tensor]) -> Iterator[tuple[str, tuple[Cut | None, ...]]]:
    split = [number for number, tensor in enumerate(tensors) if can_be_split(tensor)]
    for number in split:
        kind = "later" if number else "main"
        for dim in splittable_dims(tensors[number]):
            for cut in (_uneven(tensors[number], dim), _with_nothing(tensors[number], dim)):
                yield kind, tuple(cut if i == number else None for i in range(len(tensors)))
    if split:
        main = tensors[split[0]]
        for dim in splittable_dims(main):
            cut = _uneven(main, dim)
            yield (
                "alike",
                tuple(cut if t.shape == main.shape and can_be_slab(t) else None for t in tensors),
            )
            yield "every", tuple(_aligned(t, main, dim, cut) for t in tensors)
            yield "crossed", tuple(_crossed(t, main, dim, cut) for t in tensors)
        yield "whole", tuple(Cut() if i == split[0] else None for i in range(len(tensors)))
        yield "whole", tuple(Cut() if can_be_slab(t) else None for t in tensors)


def _uneven(tensor: Tensor, dim: int) -> Cut:
    extent = tensor.shape[dim]
    return Cut(dim, (0, max(1, extent // 3), extent))


def _with_nothing(tensor: Tensor, dim: int) -> Cut:
    """The first rank has nothing along even dims, the second along odd ones."""
    extent = tensor.shape[dim]
    return Cut(dim, (0, extent if dim % 2 else 0, extent))


def _aligned(tensor: Tensor, main: Tensor, dim: int, cut: Cut) -> Cut | None:
    """The same cut where ``tensor`` broadcasts against ``main`` along ``dim``; else whole."""
    own = dim - main.ndim + tensor.ndim
    if can_be_slab(tensor) and own >= 0 and tensor.shape[own] == main.shape[dim]:
        return Cut(own, cut.bounds)
    return Cut() if can_be_slab(tensor) else None


def _crossed(tensor: Tensor, main: Tensor, dim: int, cut: Cut) -> Cut | None:
    """``main`` along ``dim``, the others each along another of their dims."""
    if tensor is main:
        return cut
    dims = splittable_dims(tensor) if can_be_split(tensor) else []
    others = [d for d in dims if d - tensor.ndim != dim - main.ndim]
    if others:
        return _uneven(tensor, others[-1])
    return Cut() if can_be_slab(tensor) else None
