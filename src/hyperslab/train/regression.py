"""Learning numbers: a few for every sample, some for every cell, or the sample itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np

from hyperslab.nn import Slab, gather
from hyperslab.train.figures import draw_predictions
from hyperslab.train.fitting import Values, fit_values
from hyperslab.train.losses import VALUE_LOSSES
from hyperslab.train.metrics import Errors, Floats, as_floats, by_name, check_names
from hyperslab.train.slices import in_colours, input_pictures, on_one_scale, pictures_of
from hyperslab.train.task import Batch, Meter, Task

MOST_PANELS = 12
"""Numbers that are drawn."""
MOST_REMARKS = 4
"""Numbers of the first sample that are told with its picture."""


class RegressionMeter(Meter):
    """MAE, MSE and R2 of each number and their means; numbers of a map are its channels."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._errors = Errors()
        self._predicted: list[Floats] = []
        self._true: list[Floats] = []

    def collect(self, output: Values, target: Values, weight: Values | None) -> None:
        self._errors.add(output, target, weight)
        if output.shape[2:].numel() == 1:
            for rows, x in ((self._predicted, output), (self._true, target)):
                rows.append(as_floats(gather(x)).reshape(x.shape[:2])[:, :MOST_PANELS])

    def look(self, output: Values, target: Values, batch: Batch) -> None:
        self._pictures = input_pictures(batch.x)
        if output.shape[2:].numel() > 1:
            true, predicted = (
                pictures_of(x, title, self.names)
                for title, x in {"true": target, "predicted": output}.items()
            )
            self._pictures += on_one_scale(true, predicted)

    def count(self) -> dict[str, float]:
        each = {"mae": self._errors.mae, "mse": self._errors.mse, "r2": self._errors.r2}
        scores = self._errors.means()
        for key, values in each.items():
            scores |= by_name(key, values, self.names)
        return scores

    def draw(self, folder: Path) -> list[Path]:
        drawn = super().draw(folder)
        if self._predicted:
            true, predicted = np.concatenate(self._true), np.concatenate(self._predicted)
            path = folder / "predictions.png"
            drawn += draw_predictions(true, predicted, self._errors.r2, self.names, path)
        return drawn

    def _remarks(self) -> list[str]:
        if not self._predicted or not len(self._predicted[0]):
            return []
        true, predicted = self._true[0][0], self._predicted[0][0]
        names = self.names or [
            f"number {k}" if len(true) > 1 else "value" for k in range(len(true))
        ]
        rows = list(zip(names, true, predicted, strict=False))[:MOST_REMARKS]
        return [f"{name}: true {one:.4g}, predicted {other:.4g}" for name, one, other in rows]


class Regression(Task):
    meters: ClassVar[type[Meter]] = RegressionMeter
    losses = VALUE_LOSSES
    best_by = "loss"

    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        output, target = fit_values(output, target)
        if output.ndim == 1:
            output, target = output.unsqueeze(1), target.unsqueeze(1)
        check_names(self.names, output.shape[1], "numbers")
        return output, target


class ReconstructionMeter(Meter):
    """Errors, and PSNR in dB: its peak is how far apart the largest and the least value are."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._errors = Errors()
        self._low, self._high = math.inf, -math.inf

    def collect(self, output: Values, target: Values, weight: Values | None) -> None:
        self._errors.add(output, target, weight)
        self._low = min(self._low, float(target.amin()))
        self._high = max(self._high, float(target.amax()))

    def look(self, output: Values, target: Values, batch: Batch) -> None:
        inputs, outputs = input_pictures(target), pictures_of(output, "reconstructed")
        if len(outputs) > len(inputs):
            outputs = in_colours(outputs, "reconstructed")
        self._pictures = on_one_scale(inputs, outputs)

    def count(self) -> dict[str, float]:
        scores = self._errors.means()
        return scores | {"psnr": self._psnr(scores["mse"])}

    def _psnr(self, mse: float) -> float:
        peak = self._high - self._low
        if not peak > 0 or math.isnan(mse):
            return math.nan
        return 10 * math.log10(peak**2 / mse) if mse else math.inf


class Reconstruction(Regression):
    meters = ReconstructionMeter

    def target_of(self, batch: Batch) -> Slab:
        return batch.x
