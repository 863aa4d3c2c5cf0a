"""Losses by name: one number for the global batch, the same on every rank and mesh.

They are plain torch functions, which on Slabs give the mean over all ranks. Where samples have
weights, the mean is ``sum(weight * loss) / sum(weight)``; where nothing counts, it is 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.errors import ConfigError, did_you_mean
from hyperslab.nn import Slab
from hyperslab.train.fitting import IGNORED, Values, beside, widened
from hyperslab.train.named import find_named

Loss: TypeAlias = Callable[[Values, Values, Values | None, Tensor | None], Tensor]
"""Of output, target, weights of samples and weights of classes."""

SMOOTH = 1e-5
"""Keeps Dice defined for classes that a sample does not have."""


def weighted_mean(each: Values, weight: Values | None) -> Tensor:
    """The mean of ``each`` (N, ...), its samples weighted."""
    if weight is None:
        mean: Tensor = each.mean()
        return mean
    num_cells = max(1, each.shape[1:].numel())
    return _ratio((each * beside(weight, each)).sum() / num_cells, weight.sum())


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / torch.where(count == 0, torch.ones_like(count), count)


def _of_values(function: Callable[..., Any]) -> Loss:
    return lambda output, target, weight, class_weights: weighted_mean(
        function(output, target, reduction="none"), weight
    )


def cross_entropy(
    output: Values, target: Values, weight: Values | None, class_weights: Tensor | None
) -> Tensor:
    """Of logits (N, K, ...) and labels, or probabilities, which ``class_weights`` weigh too."""
    each = F.cross_entropy(output, target, class_weights, ignore_index=IGNORED, reduction="none")
    if target.is_floating_point():
        return weighted_mean(each, weight)
    return _counted_mean(each, _counts(target, class_weights, each.dtype), weight)


def bce(
    output: Values, target: Values, weight: Values | None, class_weights: Tensor | None
) -> Tensor:
    """Of logits (N, 1, ...) and labels (N, ...), or of as many logits as fractions."""
    if target.is_floating_point():
        each = F.binary_cross_entropy_with_logits(output, target, reduction="none")
        return weighted_mean(each, weight)
    counts = _counts(target, class_weights, output.dtype)
    truth = target.clamp(min=0).to(output.dtype)
    each = F.binary_cross_entropy_with_logits(output.squeeze(1), truth, reduction="none")
    return _counted_mean(each * counts, counts, weight)


def dice(
    output: Values, target: Values, weight: Values | None, class_weights: Tensor | None
) -> Tensor:
    """1 - Dice, the mean over samples and classes; with one logit, of class 1 alone."""
    chance = output.sigmoid() if output.shape[1] == 1 else output.softmax(1)
    if target.is_floating_point():
        return weighted_mean(1 - _overlap(chance, target), weight)
    labels = target.unsqueeze(1)
    first = int(output.shape[1] == 1)
    classes = torch.arange(first, first + output.shape[1], device=output.device)
    truth = labels == classes.view(-1, *[1] * (output.ndim - 2))
    counted = (labels != IGNORED).to(chance.dtype)
    return weighted_mean(1 - _overlap(chance * counted, truth.to(chance.dtype)), weight)


def _overlap(chance: Values, truth: Values) -> Values:
    """Dice of each sample and class, (N, K)."""
    cells = tuple(range(2, chance.ndim))
    both, sizes = chance * truth, chance + truth
    if cells:
        both, sizes = both.sum(cells), sizes.sum(cells)
    return (2 * both + SMOOTH) / (sizes + SMOOTH)


def _both(first: Loss, second: Loss) -> Loss:
    return lambda *given: first(*given) + second(*given)


LOSSES: Mapping[str, Loss] = {
    "mse": _of_values(F.mse_loss),
    "l1": _of_values(F.l1_loss),
    "huber": _of_values(F.huber_loss),
    "smooth_l1": _of_values(F.smooth_l1_loss),
    "bce": bce,
    "cross_entropy": cross_entropy,
    "dice": dice,
    "dice_cross_entropy": _both(dice, cross_entropy),
    "dice_bce": _both(dice, bce),
}
"""``bce`` takes logits. Class weights count in entropies; Dice balances classes by itself."""

VALUE_LOSSES = ("mse", "l1", "huber", "smooth_l1", "bce")
CLASS_LOSSES = ("cross_entropy", "bce")
MAP_LOSSES = (*CLASS_LOSSES, "dice", "dice_cross_entropy", "dice_bce")
COUNTED = ("cross_entropy", "bce")
"""Those that are divided by what the labels count, if there are labels."""
ENTROPIES = tuple(name for name in MAP_LOSSES if name != "dice")
"""Those in which classes can have weights."""


def check_loss(name: str, kind: str, choices: tuple[str, ...]) -> None:
    """Raises unless ``name`` is one of ``choices``."""
    if name in choices:
        return
    if name in LOSSES:
        raise ConfigError(
            f"task.loss = {name!r} is not a loss for task.kind = {kind!r}, which has "
            f"{', '.join(choices)}"
        )
    raise ConfigError(
        f"task.loss = {name!r} is not known{did_you_mean(name, choices, ': ')} (there are "
        f"{', '.join(choices)}, and functions of yours as module:function or file.py:function)"
    )


class OwnLoss:
    """A user's function of output and target that gives one number, or one for each sample.

    If it has an argument ``sample_weight``, it is given the weights of the samples.
    """

    def __init__(self, name: str) -> None:
        self._name, self._function = name, _made(find_named(name, "task.loss"), name)
        self._takes_weight = "sample_weight" in _parameters(self._function)

    def __call__(self, output: Values, target: Values, weight: Values | None) -> Tensor:
        if isinstance(output, Slab | Tensor):
            output = widened(output)
            if isinstance(self._function, nn.Module):
                self._function.to(output.device, output.dtype)
        if self._takes_weight:
            loss = self._function(output, target, sample_weight=weight)
            return self._one_number(loss, target.shape[0])
        each = self._function(output, target)
        if weight is None:
            return self._one_number(each, target.shape[0])
        num_samples = weight.shape[0]
        if not isinstance(each, Slab | Tensor) or tuple(each.shape[:1]) != (num_samples,):
            raise ConfigError(
                f"task.loss = {self._name!r} gives one number, and samples have weights "
                "(task.weight): return the loss of each sample, or take an argument sample_weight"
            )
        return weighted_mean(each, weight)

    def _one_number(self, loss: Any, num_samples: int) -> Tensor:
        if not isinstance(loss, Slab | Tensor):
            raise ConfigError(
                f"task.loss = {self._name!r} gives a {type(loss).__name__}, not a tensor"
            )
        if loss.ndim and loss.shape[0] != num_samples:
            raise ConfigError(
                f"task.loss = {self._name!r} gives a tensor of shape {tuple(loss.shape)} for "
                f"{num_samples} samples: return one number, or one for each sample"
            )
        return loss if isinstance(loss, Tensor) and not loss.ndim else loss.mean()


def _made(found: Any, name: str) -> Callable[..., Any]:
    """The function itself, or what a class such as ``torch.nn:HuberLoss`` makes of nothing."""
    try:
        made: Callable[..., Any] = found() if isinstance(found, type) else found
    except TypeError as error:
        raise ConfigError(
            f"task.loss = {name!r} cannot be made without arguments ({error}): write a function "
            "of output and target that makes it"
        ) from error
    if isinstance(made, nn.Module) and any(True for _ in made.parameters()):
        raise ConfigError(
            f"task.loss = {name!r} has parameters, which would not be trained: put them into the "
            "model"
        )
    return made


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    if isinstance(function, nn.Module):
        function = function.forward
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins that tell no signature
        return ()


def _counts(labels: Values, class_weights: Tensor | None, dtype: torch.dtype) -> Values:
    """What each label counts: the weight of its class, or 1, and 0 if it is ignored."""
    counted = labels != IGNORED
    if class_weights is None:
        return counted.to(dtype)
    local = labels.local if isinstance(labels, Slab) else labels
    weights = class_weights.to(dtype)[local.clamp(min=0)]
    return (labels.with_local(weights) if isinstance(labels, Slab) else weights) * counted


def label_count(labels: Values, weight: Values | None, class_weights: Tensor | None) -> float:
    """What all labels together count. Collective over the mesh."""
    counts = _counts(labels, class_weights, torch.float64)
    if weight is not None:
        counts = counts * beside(weight.to(torch.float64), counts)
    return float(counts.sum())


def _counted_mean(total: Values, counts: Values, weight: Values | None) -> Tensor:
    if weight is not None:
        total, counts = total * beside(weight, total), counts * beside(weight, counts)
    return _ratio(total.sum(), counts.sum())
