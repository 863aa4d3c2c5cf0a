"""Losses over the whole global batch and volume, equal on every rank.

The losses of single elements, or samples, are torch's own of this rank's pieces; what is asked for
is then the sum or the mean of them over all ranks.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.comm.agree import run_together
from hyperslab.comm.reduce import reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.layout import Layout
from hyperslab.nn.align import localize
from hyperslab.nn.op import define, unsupported
from hyperslab.nn.ops.products.matmul import Names, bring, plan_product
from hyperslab.nn.ops.reduce.along import with_one
from hyperslab.nn.ops.reduce.at_indices import own_places
from hyperslab.nn.ops.reduce.reductions import SHORT, mean, total, widened
from hyperslab.nn.placement import whole_along
from hyperslab.nn.slab import Slab


@lru_cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of ``function`` by their names, in their order."""
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The reduction asked for, by the old arguments if they are given."""
    if size_average is not None or reduce is not None:
        if reduce is False:
            return "none"
        return "sum" if size_average is False else "mean"
    return reduction


def _checked(reduction: str, *further: str) -> str:
    allowed = ("none", "mean", "sum", *further)
    if reduction not in allowed:
        raise ValueError(f"{reduction!r} is not a reduction: use one of {allowed}")
    return reduction


def _reduce(each: Any, reduction: str) -> Any:
    """The losses of ``each`` element or sample as ``reduction`` wants them."""
    if reduction == "none":
        return each
    if isinstance(each, Slab):  # the rules themselves: ranks that agree on the loss agree on these
        return total(each) if reduction == "sum" else mean(each)
    return each.sum() if reduction == "sum" else each.mean()


class _LossCall:
    """A call of a loss, with its arguments by name."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        defaults = _defaults(function)  # torch has bound the arguments, and hands on what it got
        self.arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        average, reduce = (self.arguments.pop(name, None) for name in ("size_average", "reduce"))
        further = ("batchmean",) if function is F.kl_div else ()
        asked = _reduction(average, reduce, self.arguments.pop("reduction"))
        self.reduction = _checked(asked, *further)

    def of_whole(self) -> Any:
        """What torch's own function gives, where no axis splits any tensor; else None."""
        slabs = [t for t in self.arguments.values() if isinstance(t, Slab)]
        if any(slab.layout.split_dims for slab in slabs):
            return None
        pieces = {n: t.local if isinstance(t, Slab) else t for n, t in self.arguments.items()}
        local = self.function(**pieces, reduction=self.reduction)
        return slabs[0].with_local(local, Layout.unsplit(local.shape)) if local.ndim else local

    def each(self, names: dict[str, Names], output: Names) -> Any:
        """The loss of each element or sample; ``names`` are those of the tensors' dims."""
        tensors = {name: self.arguments[name] for name in names}
        like, plan = plan_product(
            self.function, tuple(tensors.values()), tuple(names.values()), output, gathers=True
        )
        if plan.axes:
            raise unsupported(self.function, like, "a dim along which it compares is split")
        pieces = [
            bring(t, target, like) for t, target in zip(tensors.values(), plan.targets, strict=True)
        ]
        are_alike = len({piece.shape for piece in pieces}) == 1
        if not are_alike and all(
            mine == output[len(output) - len(mine) :] for mine in names.values()
        ):
            pieces = list(torch.broadcast_tensors(*pieces))
        local = self._run_together(dict(zip(tensors, pieces, strict=True)), like)
        return like.with_local(local, plan.output) if local.ndim else local

    def _run_together(self, pieces: dict[str, Tensor], like: Slab) -> Tensor:
        """The loss on this rank; where values are wrong on one rank, all of them stop."""

        def run() -> Tensor:
            local: Tensor = self.function(**{**self.arguments, **pieces, "reduction": "none"})
            return local

        return run() if self.function in _OF_ANY_VALUES else run_together(run, like.mesh)


_OF_ANY_VALUES = {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
"""Losses that no values are wrong for: ranks need not ask each other."""


def _from_the_right(tensors: Sequence[Slab | Tensor]) -> tuple[list[Names], Names]:
    """Names for dims that broadcast, for each tensor and for what they broadcast to."""
    names = tuple(f"dim {n}" for n in range(max(t.ndim for t in tensors)))[::-1]
    return [names[len(names) - t.ndim :] for t in tensors], names


def _make_elementwise(function: Callable[..., Any], *further: str, strict: bool = False) -> None:
    """A loss of every element by itself; its ``further`` tensors broadcast as the first two do."""

    @define("reducing", function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        call = _LossCall(function, args, kwargs)
        first, second = list(call.arguments)[:2]
        same = _check_shapes(call, first, second, strict=strict)
        if same and (found := call.of_whole()) is not None:
            return found
        if function is F.gaussian_nll_loss:
            call.arguments["var"] = _fitting_var(call.arguments["var"], call.arguments["input"])
        tensors = {
            name: call.arguments[name]
            for name in (first, second, *further)
            if isinstance(call.arguments[name], Slab | Tensor)
        }
        names, output = _from_the_right(list(tensors.values()))
        each = call.each(dict(zip(tensors, names, strict=True)), output)
        if call.reduction == "batchmean":
            batch = call.arguments[first].shape[:1]
            return each.sum() / batch[0] if batch else each.sum()
        return _reduce(each, call.reduction)


def _check_shapes(call: _LossCall, first: str, second: str, *, strict: bool) -> bool:
    """Whether the first two tensors have one shape; raises, or warns, where they have not."""
    shapes = [tuple(call.arguments[name].shape) for name in (first, second)]
    if shapes[0] == shapes[1]:
        return True
    told = (
        f"{call.function.__name__} of an {first} of shape {shapes[0]} and a {second} of shape "
        f"{shapes[1]}"
    )
    if strict:
        raise LayoutError(f"{told}: give them one shape")
    warnings.warn(
        f"{told} broadcasts them, which is seldom meant: give them one shape", stacklevel=5
    )
    return False


def _fitting_var(var: Any, x: Slab | Tensor) -> Any:
    """``var`` with as many dims as ``x``, if it is one for every element or vector of it."""
    if not isinstance(var, Slab | Tensor):
        return var
    if tuple(var.shape) == tuple(x.shape[:-1]):
        var = var.unsqueeze(-1)
    unlike = [n for n, m in zip(var.shape, x.shape, strict=False) if n != m]
    if var.ndim != x.ndim or unlike not in ([], [1]):
        raise LayoutError(f"var of shape {tuple(var.shape)} for input of shape {tuple(x.shape)}")
    return var


def _make_weighted(function: Callable[..., Any], *, by_weight: bool) -> None:
    """A loss whose elements may have weights, by the sum of which a mean is divided or not."""

    @define("reducing", function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        call = _LossCall(function, args, kwargs)
        weight = call.arguments.pop("weight", None)
        if function is F.l1_loss and weight is None:
            weight = _left_out(F.l1_loss, "weight")
        same = _check_shapes(call, "input", "target", strict=False)
        if same and weight is None and (found := call.of_whole()) is not None:
            return found
        (x, target), output = _from_the_right([call.arguments[n] for n in ("input", "target")])
        if weight is None:
            return _reduce(call.each({"input": x, "target": target}, output), call.reduction)
        each = call.each({"input": x, "target": target}, output)
        if tuple(weight.shape) != tuple(each.shape):
            raise LayoutError(
                f"weight of shape {tuple(weight.shape)} for errors of shape {tuple(each.shape)}"
            )
        if by_weight and call.reduction == "mean":
            return (each * weight).sum() / weight.sum()
        return _reduce(each * weight, call.reduction)


def _left_out(function: Callable[..., Any], name: str) -> Any:
    """An argument of the running call of ``function`` that torch does not hand on to rules."""
    frame = inspect.currentframe()
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame.f_locals.get(name) if frame else None


def _make_per_sample(function: Callable[..., Any], **last: str) -> None:
    """A loss of whole samples: dims of a batch, and then those that ``last`` names for each tensor.

    A weight has no batch.
    """

    @define("reducing", function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        call = _LossCall(function, args, kwargs)
        batch = _batch(next(iter(call.arguments.values())).ndim - 1)
        names = {n: (*batch, *dim.split()) if n != "weight" else (dim,) for n, dim in last.items()}
        given = {name: mine for name, mine in names.items() if call.arguments[name] is not None}
        for name, mine in given.items():
            if call.arguments[name].ndim != len(mine):
                slab = next(t for t in call.arguments.values() if isinstance(t, Slab))
                raise unsupported(function, slab, f"its {name} does not have {len(mine)} dims")
        return _reduce(call.each(given, batch), call.reduction)


def _batch(ndim: int) -> Names:
    return tuple(f"batch {n}" for n in range(ndim))


@define("reducing", F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """The mean over the classes, in the last dim, of the cross entropies of each with its label."""
    reduction = _checked(_reduction(size_average, reduce, reduction))
    each = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    each = each if weight is None else each * weight
    return _reduce(each.sum(-1) / input.shape[-1], reduction)


@define("reducing", F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Callable[[Any, Any], Any] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """How much less than ``margin`` the negative is farther than the positive, if it is."""
    _checked(reduction)
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    distance = distance_function or F.pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return _reduce(torch.clamp_min(margin + near - far, 0), reduction)


def _make_class_loss(function: Callable[..., Any]) -> None:
    """A loss of scores whose classes lie along dim 1, in every position."""

    @define("reducing", function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        call = _LossCall(function, args, kwargs)
        x, target, weight = (call.arguments[name] for name in ("input", "target", "weight"))
        if isinstance(weight, Slab):
            weight = call.arguments["weight"] = whole_along(weight, weight.layout.split_dims).local
        if x.ndim < 2:
            slab = next(t for t in (x, target) if isinstance(t, Slab))
            raise unsupported(function, slab, "its classes must lie along dim 1")
        batch = _batch(x.ndim - 1)
        classes = (batch[0], "class", *batch[1:])
        soft = tuple(target.shape) == tuple(x.shape) and function is F.cross_entropy
        positions = (*x.shape[:1], *x.shape[2:])
        if not soft and tuple(target.shape) != positions:
            raise LayoutError(
                f"targets of shape {tuple(target.shape)} for scores of shape {tuple(x.shape)}"
            )
        if (found := call.of_whole()) is not None:
            return found
        if isinstance(x, Slab) and x.layout.splits[1]:
            each = _each_of_split_classes(call, x, soft=soft)
        else:
            names = {"input": classes, "target": classes if soft else batch}
            if weight is not None:
                names["weight"] = ("class",)
            each = call.each(names, batch)
        if call.reduction != "mean" or soft:
            return _reduce(each, call.reduction)
        added = each.sum(dtype=torch.float32 if each.dtype in SHORT else None)
        return (added / _num_counted(target, weight, call.arguments["ignore_index"])).to(each.dtype)


def _each_of_split_classes(call: _LossCall, x: Slab, *, soft: bool) -> Any:
    """The loss in each position, from what ranks that hold some of the classes know of it."""
    target, weight = call.arguments["target"], call.arguments["weight"]
    if torch.is_autocast_enabled(x.device.type) and x.dtype in SHORT:  # as torch's own losses do
        x = x.float()
    scores: Any = F.log_softmax(x, 1) if call.function is F.cross_entropy else x  # type: ignore[arg-type]
    smoothing = call.arguments.get("label_smoothing", 0.0)
    weighted = scores if weight is None else scores * weight.view(-1, *[1] * (x.ndim - 2))
    if soft:
        return -(weighted * (target * (1 - smoothing) + smoothing / x.shape[1])).sum(1)
    each: Any = _entries_of_labels(call, -weighted, target)
    if not smoothing:
        return each
    counted = (target != call.arguments["ignore_index"]).to(each.dtype)
    return each * (1 - smoothing) - weighted.sum(1) * counted * (smoothing / x.shape[1])


def _entries_of_labels(call: _LossCall, scores: Slab, labels: Slab | Tensor) -> Slab:
    """The entry of ``scores`` at each label, which one of the ranks has; 0 where it is ignored.

    Labels that are no classes are torch's to refuse.
    """
    layout, span = scores.layout, scores.box.spans[1]
    target = Layout((layout.shape[0], *layout.shape[2:]), (layout.splits[0], *layout.splits[2:]))
    mine: Tensor = localize(labels, target, target.box(scores.mesh.coords))
    is_ignored = mine == call.arguments["ignore_index"]
    own = own_places(mine.masked_fill(is_ignored, 0), span, layout.shape[1])
    local = scores.local if span.size else with_one(scores.local, [1])
    found = run_together(lambda: local.gather(1, own.place.unsqueeze(1)).squeeze(1), scores.mesh)
    part = torch.where(own.is_here & ~is_ignored, found, 0)
    return scores.with_local(reduce_sum(part, scores.mesh, layout.axes_of([1])), target)


def _num_counted(target: Any, weight: Any, ignored: int) -> Any:
    """How many labels are not ``ignored``, or the sum of the weights of their classes."""
    counted = target != ignored
    if weight is None:
        return counted.sum()
    labels = target.local if isinstance(target, Slab) else target
    counts = counted.local if isinstance(counted, Slab) else counted
    weights = widened(weight)[labels * counts] * counts
    return (target.with_local(weights) if isinstance(target, Slab) else weights).sum()


_make_weighted(F.mse_loss, by_weight=True)
_make_weighted(F.l1_loss, by_weight=True)
_make_weighted(F.huber_loss, by_weight=False)
_make_elementwise(F.smooth_l1_loss)
_make_elementwise(F.kl_div)
_make_elementwise(F.poisson_nll_loss)
_make_elementwise(F.soft_margin_loss)
_make_elementwise(F.hinge_embedding_loss)
_make_elementwise(F.binary_cross_entropy, "weight", strict=True)
_make_elementwise(F.binary_cross_entropy_with_logits, "weight", "pos_weight", strict=True)
_make_elementwise(F.gaussian_nll_loss, "var")
_make_elementwise(F.margin_ranking_loss, "target")
_make_per_sample(F.multi_margin_loss, input="class", target="", weight="class")
_make_per_sample(F.multilabel_margin_loss, input="class", target="class")
_make_per_sample(F.cosine_embedding_loss, input1="part", input2="part", target="")
_make_per_sample(F.triplet_margin_loss, anchor="part", positive="part", negative="part")
_make_class_loss(F.cross_entropy)
_make_class_loss(F.nll_loss)
