"""Files of universes, as CosmoFlow has them: one a file, with the parameters it grew from."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from hyperslab.errors import ConfigError
from hyperslab.synth.cosmology import RANGES, Cosmology
from hyperslab.synth.universe import REDSHIFTS, Lattice, count_particles, memory_nbytes
from hyperslab.synth.whole_file import Settings

SIZES = (4, 1024)
"""The smallest and the largest."""


@dataclass(frozen=True, kw_only=True)
class Universes:
    """Particle counts at four redshifts and the parameters behind them, in CosmoFlow's schema.

    ``full`` (size, size, size, 4) int16, ``unitPar``, ``physPar``, ``redshifts`` (4,) float32 and
    ``namePar`` (4,) strings. ``unitPar`` are the parameters scaled to [-1, 1].
    """

    size: int = 128
    """Cells of 1 Mpc/h along each dim: 512 in CosmoFlow, 128 in the cubes that MLPerf cuts."""
    count: int = 16
    seed: int = 0
    particles: int = 1
    """In a cell, on average; a cube such as 1 or 8. CosmoFlow has 1."""

    def __post_init__(self) -> None:
        low, high = SIZES
        if not low <= self.size <= high:
            raise ConfigError(f"the size of a universe must be {low} to {high}, got {self.size}")
        if self.count < 1 or self.seed < 0:
            raise ConfigError(f"count must be above 0 and seed not below, got {self}")
        if self.particles < 1 or self.lattice.per_cell**3 != self.particles:
            raise ConfigError(
                f"particles per cell must be a cube, such as 1, 8 or 27, got {self.particles}"
            )

    @property
    def lattice(self) -> Lattice:
        return Lattice(size=self.size, per_cell=round(self.particles ** (1 / 3)))

    @property
    def num_files(self) -> int:
        return self.count

    @property
    def memory_nbytes(self) -> int:
        return memory_nbytes(self.lattice)

    def file_name(self, index: int) -> str:
        return f"cosmo_{index:06d}.h5"

    def file_nbytes(self, index: int) -> int:
        return 2 * self.size**3 * len(REDSHIFTS) + 2**14

    def settings(self, index: int) -> Settings:
        return {
            "kind": "cosmo",
            "size": self.size,
            "particles": self.particles,
            "seed": self.seed,
            "index": index,
        }

    def fill(self, file: h5py.File, index: int) -> None:
        rng = np.random.default_rng([self.seed, index])
        unit = rng.uniform(-1, 1, len(RANGES)).astype(np.float32)
        cosmology = Cosmology.from_unit(unit)
        file["full"] = count_particles(cosmology, self.lattice, rng)
        file["unitPar"] = unit
        file["physPar"] = np.array(cosmology.parameters, np.float32)
        file["namePar"] = np.array(list(RANGES), "S")
        file["redshifts"] = np.array(REDSHIFTS, np.float32)
