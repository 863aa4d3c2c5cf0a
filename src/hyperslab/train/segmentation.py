"""Learning a class for every cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hyperslab.train.batch import Batch
from hyperslab.train.class_figures import draw_confusion
from hyperslab.train.classification import predicted_classes
from hyperslab.train.fitting import Values, fit_labels, num_classes
from hyperslab.train.losses import MAP_LOSSES
from hyperslab.train.metrics import by_name, check_names, map_confusion, mean_of, overlaps, ratio
from hyperslab.train.slices import Picture, draw_pictures, input_pictures, label_picture
from hyperslab.train.task import Meter, Task


class Segmentation(Task):
    losses = MAP_LOSSES
    best_by = "iou"
    has_classes = True

    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        output, target = fit_labels(output, target, loss=self.loss_name)
        check_names(self.names, num_classes(output), "classes")
        return output, target

    def meter(self) -> Meter:
        return SegmentationMeter(self)


class SegmentationMeter(Meter):
    """IoU and Dice of each class, their means over classes that are somewhere, and accuracy."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        num = len(task.names)
        self._counts = np.zeros((num, num))
        self._pictures: list[Picture] = []

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
        drawn = draw_pictures(self._pictures, folder / "sample.png")
        if self._counts.any():
            drawn += draw_confusion(self._counts, self.names, folder / "confusion.png")
        return drawn


def _labels(target: Values) -> Values:
    """Labels, where the target has probabilities of classes."""
    return target.argmax(1) if target.is_floating_point() else target
