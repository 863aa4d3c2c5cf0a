"""Files of labelled pictures, as networks for images are trained on: many a file."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.synth.silhouettes import SHAPES, make_image
from hyperslab.synth.whole_file import Settings

LEAST, MOST = 16, 4096
"""Pixels along a dim."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Pictures of things, told by their shape alone.

    ``data`` (n, 3, height, width) uint8, ``label`` (n,) int32 from 0 to 9, and ``names`` (10,)
    strings, of the classes.
    """

    shape: tuple[int, int] = (224, 224)
    count: int = 1024
    """Pictures, in all files."""
    per_file: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not LEAST <= min(self.shape) <= max(self.shape) <= MOST:
            raise ConfigError(
                f"the size of an image must be {LEAST}x{LEAST} to {MOST}x{MOST}, got "
                f"{'x'.join(map(str, self.shape))}"
            )
        if self.count < 1 or self.per_file < 1 or self.seed < 0:
            raise ConfigError(f"count and per_file must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return -(-self.count // self.per_file)

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 100 * self.shape[0] * self.shape[1]

    def file_name(self, index: int) -> str:
        return f"images_{index:06d}.h5"

    def num_images(self, index: int) -> int:
        return min(self.per_file, self.count - index * self.per_file)

    def file_nbytes(self, index: int) -> int:
        return self.num_images(index) * (3 * self.shape[0] * self.shape[1] + 4) + 2**14

    def settings(self, index: int) -> Settings:
        return {
            "kind": "images",
            "size": "x".join(map(str, self.shape)),
            "first": index * self.per_file,
            "images": self.num_images(index),
            "seed": self.seed,
        }

    def fill(self, file: h5py.File, index: int) -> None:
        num, first = self.num_images(index), index * self.per_file
        data = file.create_dataset("data", (num, 3, *self.shape), np.uint8)
        label = np.empty(num, np.int32)
        for place in range(num):
            rng = np.random.default_rng([self.seed, first + place])
            label[place] = rng.integers(len(SHAPES))
            data[place] = make_image(self.shape, label[place], rng)
        file["label"], file["names"] = label, np.array(list(SHAPES), "S")
