"""Learning a class for each sample, or for every cell."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from hyperslab.errors import ConfigError
from hyperslab.nn import gather
from hyperslab.train.figures import draw_confusion, draw_roc
from hyperslab.train.fitting import IGNORED, Values, fit_labels, num_classes, the_tensor
from hyperslab.train.losses import CLASS_LOSSES, MAP_LOSSES
from hyperslab.train.metrics import (
    Floats,
    Labels,
    as_floats,
    by_name,
    check_names,
    confusion,
    log_odds,
    log_softmax,
    macro_auc,
    map_confusion,
    mean_of,
    overlaps,
    ratio,
)
from hyperslab.train.slices import input_pictures, label_picture
from hyperslab.train.task import Batch, Meter, Task


def predicted_classes(output: Values) -> Values:
    """Of logits (N, K, ...) the class of the largest; of one logit 1 where it is above 0."""
    output = the_tensor(output)
    if output.ndim == 1:
        output = output.unsqueeze(1)
    return (output > 0).long().squeeze(1) if output.shape[1] == 1 else output.argmax(1)


class ClassificationMeter(Meter):
    """Accuracy, AUC and cross-entropy of all samples, by their weights."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._logits: list[Floats] = []
        self._labels: list[Labels] = []
        self._weights: list[Floats] = []

    def collect(self, output: Values, target: Values, weight: Values | None) -> None:
        logits = as_floats(gather(output)).reshape(output.shape[:2])
        if logits.shape[1] == 1:
            logits = np.concatenate([np.zeros_like(logits), logits], 1)
        self._logits.append(logits)
        labels = gather(_labels(target))
        self._labels.append(labels.flatten().cpu().numpy())
        ones = torch.ones(len(labels)) if weight is None else gather(weight)
        self._weights.append(as_floats(ones))

    def look(self, output: Values, target: Values, batch: Batch) -> None:
        self._pictures = input_pictures(batch.x)

    def count(self) -> dict[str, float]:
        if not self._logits:
            return dict.fromkeys(("accuracy", "auc", "cross_entropy"), math.nan)
        logits, labels, weights = self._samples()
        total = float(weights.sum())
        hits = float(weights[logits.argmax(1) == labels].sum())
        losses = -log_softmax(logits)[np.arange(len(labels)), labels]
        return {
            "accuracy": ratio(hits, total),
            "auc": macro_auc(logits, labels, weights),
            "cross_entropy": ratio(float(losses @ weights), total),
        }

    def draw(self, folder: Path) -> list[Path]:
        drawn = super().draw(folder)
        if self._logits and (samples := self._samples())[1].size:
            logits, labels, weights = samples
            counts = confusion(labels, logits.argmax(1), weights, logits.shape[1])
            drawn += draw_confusion(counts, self.names, folder / "confusion.png")
            is_one = logits.shape[1] == 2
            scores = log_odds(logits)[:, None] if is_one else log_softmax(logits)
            drawn += draw_roc(scores, labels, weights, self.names, folder / "roc.png")
        return drawn

    def _remarks(self) -> list[str]:
        if not self._logits or not len(self._logits[0]):
            return []
        label, logits = int(self._labels[0][0]), self._logits[0][:1]
        guess = int(logits.argmax())
        share = math.exp(log_softmax(logits)[0, guess])
        true = "unknown" if label == IGNORED else self._name(label)
        return [f"true: {true}, predicted: {self._name(guess)} ({share:.0%})"]

    def _name(self, label: int) -> str:
        return self.names[label] if self.names else f"class {label}"

    def _samples(self) -> tuple[Floats, Labels, Floats]:
        """Logits, labels and weights of all samples that count."""
        labels = np.concatenate(self._labels)
        counted = labels != IGNORED
        logits, weights = np.concatenate(self._logits), np.concatenate(self._weights)
        return logits[counted], labels[counted], weights[counted]


class _ClassTask(Task):
    has_classes = True

    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        output, target = fit_labels(output, target, loss=self.loss_name)
        check_names(self.names, num_classes(output), "classes")
        return output, target


class Classification(_ClassTask):
    meters = ClassificationMeter
    losses = CLASS_LOSSES
    best_by = "accuracy"

    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        output, target = super().fit(output, target)
        if max(output.shape[2:], default=1) > 1:
            raise ConfigError(
                f"the model gives {tuple(output.shape)}, and one class a sample is learned: pool "
                "its cells, or set task.kind = 'segmentation'"
            )
        return output, target


class SegmentationMeter(Meter):
    """IoU and Dice of each class, their means over classes that are somewhere, and accuracy."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        num = len(task.names)
        self._counts = np.zeros((num, num))

    def collect(self, output: Values, target: Values, weight: Values | None) -> None:
        counts = map_confusion(
            _labels(target), predicted_classes(output), weight, num_classes(output)
        )
        self._counts = counts + self._counts if self._counts.size else counts

    def look(self, output: Values, target: Values, batch: Batch) -> None:
        num = num_classes(output)
        self._pictures = [
            *input_pictures(batch.x, num=1),
            *label_picture(_labels(target), "true classes", num, self.names),
            *label_picture(predicted_classes(output), "predicted classes", num, self.names),
        ]

    def count(self) -> dict[str, float]:
        each = overlaps(self._counts)
        accuracy = ratio(float(np.trace(self._counts)), float(self._counts.sum()))
        scores = {key: mean_of(values) for key, values in each.items()} | {"accuracy": accuracy}
        for key, values in each.items():
            scores |= by_name(key, values, self.names)
        return scores

    def draw(self, folder: Path) -> list[Path]:
        drawn = super().draw(folder)
        if self._counts.any():
            drawn += draw_confusion(self._counts, self.names, folder / "confusion.png")
        return drawn


class Segmentation(_ClassTask):
    meters = SegmentationMeter
    losses = MAP_LOSSES
    best_by = "iou"


def _labels(target: Values) -> Values:
    """Labels, where the target has probabilities of classes."""
    return target.argmax(1) if target.is_floating_point() else target
