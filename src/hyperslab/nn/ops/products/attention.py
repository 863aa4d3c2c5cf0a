"""Attention of queries, which may be split, to keys that every rank holds whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.dist_ops.empty_output import empty_output
from hyperslab.layout import Layout
from hyperslab.nn.op import Call, define, unsupported
from hyperslab.nn.ops.products.matmul import Names, bring, plan_product
from hyperslab.nn.placement import whole_along
from hyperslab.nn.slab import Slab

_SPLIT_KEYS = "its keys, or the parts of its vectors, are split: gather keys and values first"


def _flops(call: Call) -> int:
    query, key, value = call.operands[:3]
    scores = query.numel() // query.shape[-1] * key.shape[-2]
    return int(2 * scores * (query.shape[-1] + value.shape[-1]))


@define("product", F.scaled_dot_product_attention, flops=_flops)
def scaled_dot_product_attention(
    query: Slab | Tensor,
    key: Slab | Tensor,
    value: Slab | Tensor,
    attn_mask: Slab | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Slab:
    """``softmax(query @ key.T * scale + attn_mask) @ value``; batch and queries may be split."""
    function: Callable[..., Tensor] = F.scaled_dot_product_attention
    operands = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    slab = next(t for t in operands if isinstance(t, Slab))
    if dropout_p > 0:
        raise unsupported(function, slab, "its dropout draws random numbers")
    batch = tuple(f"batch {n}" for n in range(max(t.ndim for t in operands) - 2))[::-1]

    def named(t: Slab | Tensor, *last: str) -> Names:
        return (*batch[len(batch) - t.ndim + 2 :], *last)

    names = [named(query, "query", "part"), named(key, "key", "part"), named(value, "key", "out")]
    if attn_mask is not None:
        names.append(named(attn_mask, "query", "key"))
    if enable_gqa:  # the heads of keys and values are fewer, and each serves several queries
        names[1:3] = [(*mine[:-3], "shared head", *mine[-2:]) for mine in names[1:3]]
    like, plan = plan_product(function, operands, tuple(names), (*batch, "query", "out"))
    if plan.axes:
        raise unsupported(function, like, _SPLIT_KEYS)
    if enable_gqa and any(target.splits[-3] for target in plan.targets[:3]):
        raise unsupported(function, like, "its heads are split and shared by queries")
    pieces = [bring(t, target, like) for t, target in zip(operands, plan.targets, strict=True)]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if is_causal and plan.output.splits[-2]:
        pieces.append(_causal(like, plan.output.span(-2, like.mesh.coords).start, *pieces[:2]))
    elif is_causal:
        options["is_causal"] = True
    box = plan.output.box(like.mesh.coords)
    local = function(*pieces, **options) if box else empty_output(box.shape, *pieces)
    return like.with_local(local, plan.output)


def _causal(like: Slab, start: int, query: Tensor, key: Tensor) -> Tensor:
    """Which keys each query of this rank, of which the first is ``start``, may attend to."""
    allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=like.device)
    return allowed.tril(start)


def _with_whole_vectors(t: Slab | Tensor, like: Slab) -> Slab:
    """Of queries, keys and values, which have 3 dims, where weights are cut as vectors are."""
    if not isinstance(t, Slab):
        return like.with_local(t, Layout.unsplit(t.shape))
    return whole_along(t, [2]) if t.ndim == 3 else t


_MULTI_HEAD: dict[str, Names] = {
    "query": ("query", "sample", "part"),
    "key": ("key", "sample", "part of key"),
    "value": ("key", "sample", "part of value"),
    "key_padding_mask": ("sample", "key"),
    "attn_mask": ("query", "key"),
}


@define("product", F.multi_head_attention_forward)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Slab, Slab | None]:
    """What ``nn.MultiheadAttention`` computes; samples and queries may be split."""
    function = F.multi_head_attention_forward
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    operands = {name: given[name] for name in _MULTI_HEAD if given[name] is not None}
    slab = next(t for t in given.values() if isinstance(t, Slab))
    if any(t.ndim != len(_MULTI_HEAD[name]) for name, t in operands.items()):
        raise unsupported(function, slab, "its input must have 3 dims and its masks 2")
    if cut := {n: t for n, t in given.items() if n not in operands and isinstance(t, Slab)}:
        given.update({n: whole_along(t, t.layout.split_dims).local for n, t in cut.items()})
        operands = {name: _with_whole_vectors(t, slab) for name, t in operands.items()}
    if given["training"] and given["dropout_p"] > 0:
        raise unsupported(function, slab, "its dropout draws random numbers")
    names = tuple(_MULTI_HEAD[name] for name in operands)
    like, plan = plan_product(function, [*operands.values()], names, _MULTI_HEAD["query"])
    if plan.axes or plan.output.splits[2]:
        raise unsupported(function, like, _SPLIT_KEYS)
    pieces = {
        name: bring(t, target, like)
        for (name, t), target in zip(operands.items(), plan.targets, strict=True)
    }
    # The hint that the mask is causal counts queries from this rank's first.
    causal = given["is_causal"] and not plan.output.splits[0]
    made, weights = function(**{**given, **pieces, "is_causal": causal})
    if weights is None:
        return like.with_local(made, plan.output), None
    queries, samples = plan.output.splits[:2]
    heads = (None,) * (weights.ndim - 3)
    layout = Layout(
        (plan.output.shape[1], *weights.shape[1:-2], plan.output.shape[0], weights.shape[-1]),
        (samples, *heads, queries, None),
    )
    return like.with_local(made, plan.output), like.with_local(weights, layout)
