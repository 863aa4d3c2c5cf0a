"""Scores of predictions, exact over all samples and ranks. What has no value is NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperslab.comm import reduce_sum
from hyperslab.errors import ConfigError
from hyperslab.nn import Slab, gather
from hyperslab.nn.placement import recut
from hyperslab.train.fitting import IGNORED, Values

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

SAME = 1e-28
"""Targets whose variance is less than this part of their squared mean differ by rounding alone."""
MOST_NAMED = 100
"""Scores of single numbers or classes that have no names are told up to so many."""


@dataclass
class WeightedMean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        if weight:
            self.total, self.weight = self.total + value * weight, self.weight + weight

    @property
    def value(self) -> float:
        return ratio(self.total, self.weight)


class Errors:
    """Errors of each number, which is a channel where a sample has many cells.

    Batches are merged by their means, so that targets far from 0 lose no digits (Chan et al.).
    """

    def __init__(self) -> None:
        self.weight = 0.0
        """Of all cells of one number."""
        self.absolute = self.squared = self.mean = self.spread = np.zeros(0)

    def add(self, output: Values, target: Values, weight: Values | None) -> None:
        """Adds values (N, numbers, ...) of one shape; ``weight`` is (N,).

        Collective over the mesh.
        """
        if not output.numel():
            return
        if output.ndim == 2:  # few enough for all digits
            output, target = output.double(), target.double()
        num_cells, added = output.shape[2:].numel(), float(output.shape[0])
        if weight is not None:
            added = float(weight.sum(dtype=torch.float64))
        error = output - target
        absolute, squared = _sums(error.abs(), weight), _sums(error * error, weight)
        mean, spread = _moments(target, weight, added * num_cells)
        if not self.absolute.size:
            self.absolute, self.squared, self.mean, self.spread = np.zeros((4, len(absolute)))
        self.absolute, self.squared = self.absolute + absolute, self.squared + squared
        self._merge(added * num_cells, mean, spread)

    def _merge(self, added: float, mean: Floats, spread: Floats) -> None:
        total = self.weight + added
        if total:
            apart = mean - self.mean
            self.spread = self.spread + spread + apart**2 * (self.weight * added / total)
            self.mean = self.mean + apart * (added / total)
        self.weight = total

    @property
    def mae(self) -> Floats:
        return self.absolute / (self.weight or math.nan)

    @property
    def mse(self) -> Floats:
        return self.squared / (self.weight or math.nan)

    @property
    def r2(self) -> Floats:
        """1 is perfect, 0 as good as the mean of the targets; NaN where they are all the same."""
        known = self.spread > SAME * self.weight * self.mean**2
        return np.where(known, 1 - self.squared / np.where(known, self.spread, 1), math.nan)

    def means(self) -> dict[str, float]:
        """Over all numbers; R2's over those that have one, if predictions are numbers at all."""
        if not self.absolute.size:
            return dict.fromkeys(("mae", "mse", "r2"), math.nan)
        mae, mse = float(self.mae.mean()), float(self.mse.mean())
        return {"mae": mae, "mse": mse, "r2": math.nan if math.isnan(mse) else mean_of(self.r2)}


def _sums(each: Values, weight: Values | None) -> Floats:
    """The sum of each number over samples, by their weights, and cells, in float64."""
    if each.ndim > 2:
        each = each.sum(tuple(range(2, each.ndim)), dtype=torch.float64)
    if weight is not None:
        each = each * weight.double().unsqueeze(1)
    return as_floats(each.sum(0))


def _moments(target: Values, weight: Values | None, added: float) -> tuple[Floats, Floats]:
    """The mean of each number, and the sum of squares of the distances to it."""
    mean = _sums(target, weight) / (added or math.nan)
    centre = torch.as_tensor(mean, device=target.device).to(target.dtype)
    distance = target - centre.view(-1, *[1] * (target.ndim - 2))
    rounding = mean - as_floats(centre)
    spread = _sums(distance * distance, weight) - added * rounding**2
    return (mean, spread) if added else (np.zeros_like(mean), np.zeros_like(mean))


def auc(scores: Floats, is_positive: NDArray[np.bool_], weights: Floats) -> float:
    """The chance that a positive sample has a higher score than a negative one; ties count half.

    NaN if all samples are of one kind, or a score is NaN.
    """
    if np.isnan(scores).any():
        return math.nan
    values, place = np.unique(scores, return_inverse=True)
    positive, negative = (
        np.bincount(place[kind], weights[kind], minlength=len(values)).astype(np.float64)
        for kind in (is_positive, ~is_positive)
    )
    below = np.cumsum(negative) - negative / 2
    return ratio(float(positive @ below), float(positive.sum() * negative.sum()))


def macro_auc(logits: Floats, labels: Labels, weights: Floats) -> float:
    """Of two classes the AUC, of more the mean of each against the rest.

    Classes that all samples have, or none, are left out.
    """
    if logits.shape[1] == 2:
        return auc(log_odds(logits), labels == 1, weights)
    scores = log_softmax(logits)
    each = [auc(scores[:, k], labels == k, weights) for k in range(logits.shape[1])]
    return mean_of(np.array(each))


def log_odds(logits: Floats) -> Floats:
    """Of class 1 against class 0; it orders samples where probabilities have rounded to 1."""
    with np.errstate(invalid="ignore"):
        odds: Floats = logits[:, 1] - logits[:, 0]
    return odds


def log_softmax(logits: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        shifted: Floats = logits - logits.max(axis=1, keepdims=True, initial=-math.inf)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def roc(scores: Floats, is_positive: NDArray[np.bool_], weights: Floats) -> tuple[Floats, Floats]:
    """Rates of false and true positives, from the highest threshold to the lowest."""
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    ends = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(order) - 1)
    hits = np.where(is_positive, weights, 0)[order]
    true, false = (np.cumsum(each)[ends] for each in (hits, weights[order] - hits))
    return np.append(0, false / false[-1]), np.append(0, true / true[-1])


def confusion(labels: Labels, predicted: Labels, weights: Floats, num_classes: int) -> Floats:
    """How often, by weight, each class was taken for each: [truth, prediction]."""
    pairs = labels * num_classes + predicted
    flat = np.bincount(pairs, weights, minlength=num_classes**2).astype(np.float64)
    return flat.reshape(num_classes, num_classes)


def map_confusion(
    labels: Slab, predicted: Values, weight: Values | None, num_classes: int
) -> Floats:
    """The same of label maps (N, ...), which are never gathered: each rank counts its own cells.

    Collective over the mesh. Sums go over the axes that split the maps: along others ranks hold the
    same cells.
    """
    if isinstance(predicted, Slab):
        labels, mine = recut(labels, predicted.layout), predicted.local
    else:
        mine = predicted[tuple(slice(span.start, span.stop) for span in labels.box.spans)]
    weights = None if weight is None else gather(weight)[labels.box.spans[0].start :]
    counts = _count(labels.local, mine, weights, num_classes)
    return as_floats(reduce_sum(counts.to(labels.device), labels.mesh, labels.layout.axes))


def _count(labels: Tensor, predicted: Tensor, weights: Tensor | None, num_classes: int) -> Tensor:
    """Sample by sample: temporaries stay small, and counts are whole numbers on any device."""
    total = torch.zeros(num_classes**2, dtype=torch.float64)
    for number, (truth, guess) in enumerate(zip(labels, predicted, strict=True)):
        pairs = (truth * num_classes + guess)[truth != IGNORED]
        counts = torch.bincount(pairs, minlength=num_classes**2).double().cpu()
        total += counts if weights is None else counts * float(weights[number])
    return total.view(num_classes, num_classes)


def overlaps(counts: Floats) -> Mapping[str, Floats]:
    """IoU and Dice of each class from a confusion matrix; NaN for classes that are nowhere."""
    both, sizes = counts.diagonal(), counts.sum(0) + counts.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {"iou": both / (sizes - both), "dice": 2 * both / sizes}


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def mean_of(values: Floats) -> float:
    """The mean of those that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def as_floats(x: Values) -> Floats:
    """The whole of a small tensor or Slab.

    Collective over the mesh where an axis, such as channel, splits it.
    """
    whole: Tensor = gather(x) if isinstance(x, Slab) else x
    floats: Floats = whole.double().cpu().numpy()
    return floats


def check_names(names: Sequence[str], num: int, what: str) -> None:
    """Raises if there are ``names``, but not ``num`` of them."""
    if names and len(names) != num:
        raise ConfigError(
            f"task.names has {len(names)} names ({', '.join(names)}), but the model gives {num} "
            f"{what}: give as many names, or none"
        )


def by_name(key: str, values: Floats, names: Sequence[str]) -> dict[str, float]:
    """Each value under ``key/name``, or without names under its number."""
    if not names and (len(values) == 1 or len(values) > MOST_NAMED):
        return {}
    if not len(values):
        values = np.full(len(names), math.nan)
    known = names or [str(number) for number in range(len(values))]
    return {f"{key}/{name}": float(value) for name, value in zip(known, values, strict=True)}
