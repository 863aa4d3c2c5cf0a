"""Learning to give back the sample itself."""

from __future__ import annotations

import math
from pathlib import Path

from hyperslab.nn import Slab
from hyperslab.train.batch import Batch
from hyperslab.train.fitting import Values
from hyperslab.train.metrics import Errors
from hyperslab.train.regression import Regression
from hyperslab.train.slices import (
    Picture,
    draw_pictures,
    in_colours,
    input_pictures,
    on_one_scale,
    pictures_of,
)
from hyperslab.train.task import Meter, Task


class Reconstruction(Regression):
    def target_of(self, batch: Batch) -> Slab:
        return batch.x

    def meter(self) -> Meter:
        return ReconstructionMeter(self)


class ReconstructionMeter(Meter):
    """Errors, and PSNR in dB: its peak is how far apart the largest and the least value are."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._errors = Errors()
        self._low, self._high = math.inf, -math.inf
        self._pictures: list[Picture] = []

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

    def draw(self, folder: Path) -> list[Path]:
        return draw_pictures(self._pictures, folder / "sample.png")
