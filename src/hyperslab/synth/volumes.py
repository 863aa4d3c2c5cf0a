"""Files of bodies as a scanner sees them, with their organs marked: one a file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import h5py
import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.synth.phantom import CLASSES, make_phantom
from hyperslab.synth.whole_file import Settings

LEAST, MOST = 16, 1024
"""Voxels along a dim."""


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Images of bodies and maps of the organs and lesions in them.

    ``image`` (1, depth, height, width) int16; ``label`` (depth, height, width) uint8, 0 for the
    background, 1 in the liver, 2 in the kidneys, 3 in lesions of either; ``stats`` (1, 4) float32,
    the least, the most, the mean and the standard deviation of this image; ``names`` (4,) strings.
    """

    shape: tuple[int, int, int] = (128, 128, 128)
    count: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not LEAST <= min(self.shape) <= max(self.shape) <= MOST:
            raise ConfigError(
                f"the size of a volume must be {LEAST} to {MOST} along each dim, got "
                f"{'x'.join(map(str, self.shape))}"
            )
        if self.count < 1 or self.seed < 0:
            raise ConfigError(f"count must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return self.count

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 60 * math.prod(self.shape)

    def file_name(self, index: int) -> str:
        return f"volumes_{index:06d}.h5"

    def file_nbytes(self, index: int) -> int:
        return 3 * math.prod(self.shape) + 2**14

    def settings(self, index: int) -> Settings:
        size = "x".join(map(str, self.shape))
        return {"kind": "volumes", "size": size, "seed": self.seed, "index": index}

    def fill(self, file: h5py.File, index: int) -> None:
        image, label = make_phantom(self.shape, np.random.default_rng([self.seed, index]))
        file["image"], file["label"] = image[None], label
        numbers = [image.min(), image.max(), image.mean(), image.std()]
        file["stats"] = np.array([numbers], np.float32)
        file["names"] = np.array(CLASSES, "S")
