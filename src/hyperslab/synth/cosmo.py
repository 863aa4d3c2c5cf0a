"""Universes: particles that gravity has moved, counted in cells, in files as CosmoFlow has them.

The truncated Zel'dovich approximation: every particle starts on a lattice and runs along a straight
line, ``x = q + D(z) psi(q)``, where ``-div psi`` is a Gaussian random field with the linear power
spectrum, smoothed over ``SMOOTHING * D(z)``. It is exact to first order, so that large scales
follow linear theory, and it makes the sheets, filaments and knots of the cosmic web.

Why not second order (2LPT): it takes seven more Fourier transforms, and in cells of 1 Mpc/h, where
densities vary by more than their mean, it throws matter back into the voids. Why smoothed:
without it, streams cross and run on, and more structure in the beginning (a larger sigma_8, a later
time) would make cells *less* different in the end (Coles, Melott, Shandarin 1993, MNRAS 260, 765).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.synth.cosmology import RANGES, Cosmology
from hyperslab.synth.production import SampleFiles, Settings

REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
"""Those of the CosmoFlow files, a channel each."""

SMOOTHING = 1.5
"""A Gaussian's radius in Mpc/h, today; it lowers power by exp(-(k radius)^2), 2% at 0.1 h/Mpc."""

PARTICLES_AT_ONCE = 2**22
"""Binned together; this bounds the memory beside the fields themselves."""

Real = NDArray[np.float32]
Complex = NDArray[np.complex64]


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Where particles start: ``per_cell`` along every dim of each of ``size`` cells."""

    size: int
    per_cell: int = 1
    cell: float = 1.0
    """The width of a cell in Mpc/h."""

    @property
    def num(self) -> int:
        """Particles along a dim, and points of the random field."""
        return self.size * self.per_cell

    @property
    def length(self) -> float:
        """Of the box, in Mpc/h."""
        return self.size * self.cell

    @property
    def wavenumbers(self) -> NDArray[np.float64]:
        """Along a dim, in h/Mpc, in the order of a Fourier transform."""
        return np.asarray(2 * np.pi * np.fft.fftfreq(self.num, self.length / self.num), np.float64)

    @property
    def half_wavenumbers(self) -> NDArray[np.float64]:
        """Along the last dim of the transform of a real field."""
        return np.asarray(2 * np.pi * np.fft.rfftfreq(self.num, self.length / self.num), np.float64)

    def squares(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Planes of k^2 in the transform, one at a time: all of them would be the largest array."""
        k, half = self.wavenumbers, self.half_wavenumbers
        in_plane = k[:, None] ** 2 + half**2
        for plane in range(self.num):
            yield plane, k[plane] ** 2 + in_plane


def count_particles(
    cosmology: Cosmology,
    lattice: Lattice,
    rng: np.random.Generator,
    redshifts: Sequence[float] = REDSHIFTS,
) -> NDArray[np.int16]:
    """Particles in every cell, of shape ``(size, size, size, len(redshifts))``.

    Needs about ``memory_nbytes(lattice)`` of memory.
    """
    waves = potential(linear_field(cosmology, lattice, rng), lattice)
    counts = np.zeros((lattice.size,) * 3 + (len(redshifts),), np.int16)
    for channel, redshift in enumerate(redshifts):
        moves = displacements(waves, lattice, cosmology.growth(redshift))
        add_particles(moves, lattice, counts[..., channel])
        del moves
    return counts


def memory_nbytes(lattice: Lattice) -> int:
    """The most that ``count_particles`` holds at once: two transforms, three fields, the counts."""
    points = lattice.num**3
    slab = 36 * min(points, PARTICLES_AT_ONCE) + 8 * lattice.size**2 * min(lattice.size, 64)
    counts = 2 * len(REDSHIFTS) * lattice.size**3
    return 4 * points * (1 + 3) + counts + max(4 * points, slab) + 2**26


def linear_field(cosmology: Cosmology, lattice: Lattice, rng: np.random.Generator) -> Complex:
    """The transform of the linear density contrast today: Gaussian, of the cosmology's spectrum."""
    field = forward(rng.standard_normal((lattice.num,) * 3, np.float32))
    squares = np.geomspace(1e-10, 1e6, 2**15)
    amplitudes = np.sqrt(cosmology.power(np.sqrt(squares)) * lattice.num**3 / lattice.length**3)
    for plane, square in lattice.squares():
        field[plane] *= np.interp(square, squares, amplitudes).astype(np.float32)
    field[0, 0, 0] = 0
    return field


def potential(field: Complex, lattice: Lattice) -> Complex:
    """What displacements are the slopes of, transformed; it takes the place of ``field``."""
    for plane, square in lattice.squares():
        square[square == 0] = np.inf
        field[plane] *= (1j / square).astype(np.complex64)
    return field


def displacements(waves: Complex, lattice: Lattice, growth: float) -> tuple[Real, Real, Real]:
    """How far particles have gone along each dim, in cells, when structure has grown so far."""
    x, y, z = (inverse(_slope(waves, lattice, growth, dim), lattice.num) for dim in range(3))
    return x, y, z


def _slope(waves: Complex, lattice: Lattice, growth: float, dim: int) -> Complex:
    """Of the smoothed potential along ``dim``."""
    out = waves.copy()
    for other, k in enumerate((lattice.wavenumbers, lattice.wavenumbers, lattice.half_wavenumbers)):
        factor = np.exp(-((k * SMOOTHING * growth) ** 2) / 2)
        if other == dim:
            factor *= k * growth / lattice.cell
            if lattice.num % 2 == 0:  # a wave at the limit of the lattice has no slope there
                factor[lattice.num // 2] = 0
        out *= _along(other, factor)
    return out


def _along(dim: int, values: NDArray[np.float64]) -> Real:
    """``values`` as an array that is broadcast over the two other dims."""
    shape = [1, 1, 1]
    shape[dim] = len(values)
    return values.astype(np.float32).reshape(shape)


def add_particles(moves: Sequence[Real], lattice: Lattice, counts: NDArray[np.int16]) -> None:
    """Adds every particle to the cell of ``counts`` it lies in."""
    size = lattice.size
    planes = max(1, PARTICLES_AT_ONCE // lattice.num**2)
    for start in range(0, lattice.num, planes):
        part = slice(start, min(start + planes, lattice.num))
        index = _cells(moves[0][part], lattice, 0, start).astype(np.int64)
        first = int(index.min())
        index -= first  # few planes hold all of them, and only those are counted
        for dim in (1, 2):
            index *= size
            index += _cells(moves[dim][part], lattice, dim) % size
        found = np.bincount(index.ravel())
        found.resize(-(-len(found) // size**2), size, size, refcheck=False)
        _add(found, first, counts)


def _cells(moves: Real, lattice: Lattice, dim: int, start: int = 0) -> NDArray[np.int32]:
    """The cell along ``dim`` of each particle, before it is wrapped around the box."""
    rest = (np.arange(start, start + moves.shape[dim]) + 0.5) / lattice.per_cell
    place = moves + _along(dim, rest)
    np.floor(place, out=place)
    return place.astype(np.int32)


def _add(found: NDArray[np.int64], first: int, counts: NDArray[np.int16]) -> None:
    for plane, part in enumerate(found, first):
        total = counts[plane % len(counts)] + part
        if total.max() > np.iinfo(np.int16).max:
            raise ConfigError(
                f"a cell has {total.max()} particles, more than int16 holds: use fewer per cell"
            )
        counts[plane % len(counts)] = total


def forward(field: Real) -> Complex:
    """The transform of a real field, in single precision; transforms in place save a copy."""
    out = np.fft.rfft(field, axis=2)
    for dim in (1, 0):
        np.fft.fft(out, axis=dim, out=out)
    assert out.dtype == np.complex64
    return np.asarray(out)


def inverse(field: Complex, num: int) -> Real:
    """The real field of which ``field`` is the transform; ``field`` is used up."""
    for dim in (0, 1):
        np.fft.ifft(field, axis=dim, out=cast(Any, field))  # the stubs know complex128 only
    out = np.fft.irfft(field, num, axis=2)
    assert out.dtype == np.float32
    return np.asarray(out)


# Files of universes, as CosmoFlow has them: one a file, with the parameters it grew from

SIZES = (4, 1024)
"""The smallest and the largest."""


@dataclass(frozen=True, kw_only=True)
class Universes(SampleFiles):
    """Particle counts at four redshifts and the parameters behind them, in CosmoFlow's schema.

    ``full`` (size, size, size, 4) int16, ``unitPar``, ``physPar``, ``redshifts`` (4,) float32 and
    ``namePar`` (4,) strings. ``unitPar`` are the parameters scaled to [-1, 1].
    """

    prefix = "cosmo"
    size: int = 128
    """Cells of 1 Mpc/h along each dim: 512 in CosmoFlow, 128 in the cubes that MLPerf cuts."""
    count: int = 16
    particles: int = 1
    """In a cell, on average; a cube such as 1 or 8. CosmoFlow has 1."""

    def __post_init__(self) -> None:
        low, high = SIZES
        if not low <= self.size <= high:
            raise ConfigError(f"the size of a universe must be {low} to {high}, got {self.size}")
        super().__post_init__()
        if self.particles < 1 or self.lattice.per_cell**3 != self.particles:
            raise ConfigError(
                f"particles per cell must be a cube, such as 1, 8 or 27, got {self.particles}"
            )

    @property
    def lattice(self) -> Lattice:
        return Lattice(size=self.size, per_cell=round(self.particles ** (1 / 3)))

    @property
    def memory_nbytes(self) -> int:
        return memory_nbytes(self.lattice)

    def file_nbytes(self, index: int) -> int:
        return 2 * self.size**3 * len(REDSHIFTS) + 2**14

    @property
    def sizes(self) -> Settings:
        return {"size": self.size, "particles": self.particles}

    def fill(self, file: h5py.File, index: int) -> None:
        rng = self.rng(index)
        unit = rng.uniform(-1, 1, len(RANGES)).astype(np.float32)
        cosmology = Cosmology.from_unit(unit)
        file["full"] = count_particles(cosmology, self.lattice, rng)
        file["unitPar"] = unit
        file["physPar"] = np.array(cosmology.parameters, np.float32)
        file["namePar"] = np.array(list(RANGES), "S")
        file["redshifts"] = np.array(REDSHIFTS, np.float32)
