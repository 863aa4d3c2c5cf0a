"""Files of collisions seen by a calorimeter, as HEPCNN has them: many images a file."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.synth.calorimeter import image
from hyperslab.synth.collisions import background, signal
from hyperslab.synth.jets import find_jets
from hyperslab.synth.whole_file import Settings

EXPECTED = {"background": 1000.0, "signal": 0.05}
"""Real collisions that one drawn collision stands for, on average."""
CUTS = {"jets": 4, "pt": 80.0, "eta": 2.8, "sum": 1200.0}
"""A search without a network keeps events with so many jets, so hard, and such a sum of pt."""


@dataclass(frozen=True, kw_only=True)
class Collisions:
    """Images of collisions in HEPCNN's schema.

    ``data`` (n, 3, eta, phi) float32, and for each of them: ``label`` int32, 1 for signal; ``psr``
    int32, 1 where it passes the cuts of a search without a network; ``normweight`` float32, 1 on
    average in each class; ``weight`` float32, the same times how common the class is.
    """

    shape: tuple[int, int] = (224, 224)
    count: int = 256
    """Images, in all files."""
    per_file: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.shape) < 1 or max(self.shape) > 4096:
            raise ConfigError(f"the size of an image must be 1x1 to 4096x4096, got {self.shape}")
        if self.count < 1 or self.per_file < 1 or self.seed < 0:
            raise ConfigError(f"count and per_file must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return -(-self.count // self.per_file)

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 40 * self.shape[0] * self.shape[1]

    def file_name(self, index: int) -> str:
        return f"hep_{index:06d}.h5"

    def num_images(self, index: int) -> int:
        return min(self.per_file, self.count - index * self.per_file)

    def file_nbytes(self, index: int) -> int:
        return self.num_images(index) * (12 * self.shape[0] * self.shape[1] + 16) + 2**14

    def settings(self, index: int) -> Settings:
        return {
            "kind": "hep",
            "size": "x".join(map(str, self.shape)),
            "first": index * self.per_file,
            "images": self.num_images(index),
            "seed": self.seed,
        }

    def fill(self, file: h5py.File, index: int) -> None:
        num, first = self.num_images(index), index * self.per_file
        data = file.create_dataset("data", (num, 3, *self.shape), np.float32)
        numbers = []
        for place in range(num):
            rng = np.random.default_rng([self.seed, first + place])
            data[place], row = _event(self.shape, rng)
            numbers.append(row)
        label, passes, weight, rarity = np.array(numbers).T
        file["label"] = label.astype(np.int32)
        file["psr"] = passes.astype(np.int32)
        file["normweight"] = weight.astype(np.float32)
        file["weight"] = (weight * rarity).astype(np.float32)


def _event(
    shape: tuple[int, int], rng: np.random.Generator
) -> tuple[NDArray[np.float32], tuple[int, bool, float, float]]:
    name = "signal" if rng.random() < 0.5 else "background"
    particles, weight = (signal if name == "signal" else background)(rng)
    jets = find_jets(particles.of(np.abs(particles.eta) < CUTS["eta"]), least_pt=CUTS["pt"])
    passes = len(jets.pt) >= CUTS["jets"] and jets.pt.sum() >= CUTS["sum"]
    pixels = image(particles, shape, rng)
    return pixels, (int(name == "signal"), passes, weight, EXPECTED[name])
