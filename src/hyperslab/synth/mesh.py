"""Files of meshes that are about to tangle, as codes for flows meet them: one a file."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.synth.hydro import CHANNELS, NUM_STEPS, make_tangling
from hyperslab.synth.whole_file import Settings

MOST = 8192
"""Cells along a dim."""


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Meshes that go with a flow, and how many of their cells will be turned inside out.

    ``data`` (18, size, size) float32; ``target`` (4, size / block, size / block) float32, the
    fraction of each block's cells that are tangled within 1, 2, 3 and 4 steps; ``names`` (18,)
    strings, of the channels.
    """

    size: int = 1024
    """Cells along each dim."""
    count: int = 8
    seed: int = 0
    block: int = 64
    """Cells along each dim of a block."""

    def __post_init__(self) -> None:
        if self.block < 1 or not 0 < self.size <= MOST or self.size % self.block:
            raise ConfigError(
                f"the size of a mesh must be a multiple of {self.block}, the size of its blocks, "
                f"up to {MOST}, got {self.size}"
            )
        if self.count < 1 or self.seed < 0:
            raise ConfigError(f"count must be above 0 and seed not below, got {self}")

    @property
    def num_files(self) -> int:
        return self.count

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 560 * self.size**2

    def file_name(self, index: int) -> str:
        return f"mesh_{index:06d}.h5"

    def file_nbytes(self, index: int) -> int:
        blocks = (self.size // self.block) ** 2
        return 4 * (len(CHANNELS) * self.size**2 + NUM_STEPS * blocks) + 2**14

    def settings(self, index: int) -> Settings:
        sizes = {"size": self.size, "block": self.block}
        return {"kind": "mesh", **sizes, "seed": self.seed, "index": index}

    def fill(self, file: h5py.File, index: int) -> None:
        rng = np.random.default_rng([self.seed, index])
        file["data"], file["target"] = make_tangling(self.size, self.block, rng)
        file["names"] = np.array(CHANNELS, "S")
