"""Elements that are picked, or put, at indices along a dim, which may be split.

Each rank sees all indices. It picks those of its own elements that are asked for, or puts what
belongs to its own: the one-hot map of labels, or the score of each label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperslab.comm.agree import run_together
from hyperslab.comm.reduce import reduce_sum
from hyperslab.layout import Span
from hyperslab.nn.op import unsupported
from hyperslab.nn.ops.reduce.along import (
    Along,
    AlongPlan,
    Refusal,
    normalized,
    pieces_of,
    plan_along,
    run_along,
    with_one,
)
from hyperslab.nn.ops.whole import run_whole
from hyperslab.nn.placement import whole_along
from hyperslab.nn.slab import Slab, layout_of


class OwnPlaces(NamedTuple):
    """Indices along a dim, as seen by a rank that holds a part of it."""

    is_here: Tensor
    place: Tensor
    """Counted from the part's first element."""


def own_places(index: Tensor, span: Span, extent: int, *, elsewhere: int = 0) -> OwnPlaces:
    """Where ``index`` is in ``span``; ``elsewhere`` is the place of what others hold.

    Indices that a dim of ``extent`` does not have get a place that no part has, for torch to
    refuse.
    """
    is_here = (index >= span.start) & (index < span.stop)
    is_known = (index >= 0) & (index < extent)
    others = torch.where(is_known, elsewhere, extent + 1)
    return OwnPlaces(is_here, torch.where(is_here, index - span.start, others))


def run_at_indices(
    function: Callable[..., Any],
    along: Along,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_place: bool = False,
) -> Any:
    """``gather``, ``scatter`` and the like. What is picked is whole along the dim."""
    x, *others = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, Slab | Tensor))
    [dim] = normalized(along.dims(tuple(x.shape), args, kwargs), x.ndim) or (0,)
    split = x.layout.splits[dim] if isinstance(x, Slab) and x.ndim else None
    axis = split.axis if split else None
    whole = {id(t): _whole(t, dim, axis) for t in others if isinstance(t, Slab)}
    args = tuple(whole.get(id(arg), arg) for arg in args)
    kwargs = {name: whole.get(id(arg), arg) for name, arg in kwargs.items()}
    if isinstance(x, Tensor) and not any(t.layout.split_dims for t in whole.values()):
        return run_whole(function, args, kwargs)
    if split is None:
        return run_along(function, along, args, kwargs, in_place=in_place)
    assert isinstance(x, Slab)
    operands = [x, *(whole.get(id(t), t) for t in others)]
    plan = _plan(function, operands, dim, in_place=in_place)
    pieces = pieces_of(operands, plan, x)
    x = x.with_local(pieces[id(x)], plan.targets[0])

    def call(local: Tensor, place: Tensor) -> Tensor:
        """``function`` of other pieces in the place of its input and its indices."""
        now = {**pieces, id(operands[0]): local, id(operands[1]): place}
        found: Tensor = function(
            *(now.get(id(arg), arg) for arg in args),
            **{name: now.get(id(arg), arg) for name, arg in kwargs.items()},
        )
        return found

    index = pieces[id(operands[1])]
    if "gather" in function.__name__:
        return x.with_local(_picked(x, dim, index, call), plan.targets[1])
    own = _put(x, dim, index, call)
    if not in_place:
        return x.with_local(own)
    x.local.copy_(own)
    return operands[0]


def _whole(x: Slab, dim: int, axis: str | None) -> Slab:
    """``x`` whole along ``dim``, and along what ``axis`` cuts."""
    splits = enumerate(x.layout.splits)
    return whole_along(x, [d for d, split in splits if split and (d == dim or split.axis == axis)])


def _plan(
    function: Callable[..., Any], operands: list[Any], dim: int, *, in_place: bool
) -> AlongPlan:
    """How the operands meet, the first of them split along ``dim`` as it is."""
    x = operands[0]
    layouts = [*map(layout_of, operands)]
    layouts[0] = x.layout.whole_along([dim])
    plan = plan_along(tuple(layouts), (dim,), "alike", in_place)
    if isinstance(plan, Refusal):
        raise unsupported(function, x.with_local(x.local, layouts[plan.number]), plan.why)
    first = plan.targets[0].with_dim(dim, x.layout.shape[dim], x.layout.splits[dim])
    return plan._replace(targets=(first, *plan.targets[1:]))


Call = Callable[[Tensor, Tensor], Tensor]


def _picked(x: Slab, dim: int, index: Tensor, call: Call) -> Tensor:
    """Of each element that is asked for, one rank brings its value and the others zero."""
    span = x.box.spans[dim]
    own = own_places(index, span, x.layout.shape[dim])
    local = x.local if span.size else with_one(x.local, [dim])
    found = run_together(lambda: call(local, own.place), x.mesh)
    part = found.masked_fill(~own.is_here, 0)
    is_mask = part.dtype == torch.bool
    total = reduce_sum(part.byte() if is_mask else part, x.mesh, x.layout.axes_of([dim]))
    return total.bool() if is_mask else total


def _put(x: Slab, dim: int, index: Tensor, call: Call) -> Tensor:
    """What belongs to other ranks goes to an element behind this rank's own, which is dropped."""
    span = x.box.spans[dim]
    own = own_places(index, span, x.layout.shape[dim], elsewhere=span.size)
    local = with_one(x.local, [dim])
    return run_together(lambda: call(local, own.place), x.mesh).narrow(dim, 0, span.size)
