"""A mesh that moves with a flow, and folds where the flow turns or narrows too fast for it.

Points of the plane are complex numbers x + iy, on a square of side 10; a step takes time 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

SIDE = 10.0
REACH = 3.0
"""Radii from its centre at which an eddy is over."""
ROUGHNESS = 0.1
"""How far a node is from where a mesh of squares would have it, at most, in sides of a square."""

Points: TypeAlias = NDArray[np.complex128]
Values: TypeAlias = NDArray[np.float64]
Number = TypeVar("Number", np.float64, np.complex128)


@dataclass(frozen=True)
class Eddy:
    """Turns what is near its centre, by ``rate.imag`` radians a step, and spreads it, by the factor
    ``exp(rate.real)``; below 0 it draws it together. Both fade about like a Gaussian of ``radius``.
    """

    centre: complex
    radius: float
    rate: complex

    def move(self, points: Points, time: float) -> None:
        """Moves points along with it: exactly where it only turns."""
        box, offset, fading = self._near(points)
        points[box] += offset * (np.exp(self.rate * time * fading) - 1)

    def add_velocity(self, points: Points, velocity: Points) -> None:
        box, offset, fading = self._near(points)
        velocity[box] += self.rate * offset * fading

    def _near(self, points: Points) -> tuple[tuple[slice, slice], Points, Values]:
        """Where in the array points near the centre are, their offset from it, and its strength."""
        reach = REACH * self.radius
        is_near = np.abs(points.real - self.centre.real) < reach
        is_near &= np.abs(points.imag - self.centre.imag) < reach
        box = _extent(is_near, axis=0), _extent(is_near, axis=1)
        offset = points[box] - self.centre
        rest = np.maximum(0, 1 - (offset.real**2 + offset.imag**2) / reach**2)
        return box, offset, (rest * rest) ** 2


def _extent(is_near: NDArray[np.bool_], axis: int) -> slice:
    """The rows or columns in which any is."""
    places = np.flatnonzero(is_near.any(axis=1 - axis))
    return slice(places[0], places[-1] + 1) if len(places) else slice(0)


@dataclass(frozen=True)
class ShearLayer:
    """Two halves of the plane that slide past each other, with a smooth layer between."""

    point: complex
    direction: complex
    """Of length 1."""
    width: float
    speed: float

    def move(self, points: Points, time: float) -> None:
        self.add_velocity(points, points, time)

    def add_velocity(self, points: Points, velocity: Points, factor: float = 1.0) -> None:
        across = ((points - self.point) * np.conj(self.direction)).imag
        velocity += factor * self.speed * self.direction * np.tanh(across / self.width)


Flow: TypeAlias = tuple[Eddy | ShearLayer, ...]


def draw_flow(rng: np.random.Generator) -> Flow:
    """Eddies of many sizes and strengths, and up to two layers."""
    layers = [
        ShearLayer(
            _place(rng), np.exp(2j * np.pi * rng.random()), rng.uniform(0.3, 1), rng.normal(0, 0.2)
        )
        for _ in range(rng.integers(3))
    ]
    wildness = rng.uniform(0.5, 1.6)
    eddies = [
        Eddy(
            _place(rng),
            0.25 * 5 ** rng.random(),
            wildness * complex(rng.normal(0, 0.18), rng.normal(0, 0.8)),
        )
        for _ in range(rng.integers(8, 21))
    ]
    return (*layers, *eddies)


def _place(rng: np.random.Generator) -> complex:
    return complex(*rng.uniform(0, SIDE, 2))


class Corners(NamedTuple):
    """One value a cell for each of its corners, x before y: (0, 0), (1, 0), (0, 1), (1, 1)."""

    low: Values
    right: Values
    top: Values
    far: Values


@dataclass(frozen=True)
class QuadMesh:
    """Quadrilaterals in rows and columns, by the places of their (H + 1) x (W + 1) nodes."""

    nodes: Points

    @classmethod
    def at_rest(cls, size: int, rng: np.random.Generator) -> QuadMesh:
        """``size`` x ``size`` almost squares, as a mesh is that was mended; rows go along y."""
        ticks = np.linspace(0, SIDE, size + 1)
        jitter = ROUGHNESS * SIDE / size * rng.uniform(-1, 1, (2, size + 1, size + 1))
        return cls(ticks[None, :] + jitter[0] + 1j * (ticks[:, None] + jitter[1]))

    @cached_property
    def edges(self) -> tuple[Points, Points]:
        """Along x, and along y."""
        return np.diff(self.nodes, axis=1), np.diff(self.nodes, axis=0)

    @cached_property
    def jacobians(self) -> Corners:
        """The area of the parallelogram at each corner; below 0 where it is turned inside out."""
        x, y = self.edges
        sides = ((x[i : i + len(y)], y[:, j : j + x.shape[1]]) for i in (0, 1) for j in (0, 1))
        return Corners(*(cross(along, up) for along, up in sides))

    @cached_property
    def is_tangled(self) -> NDArray[np.bool_]:
        """Which cells have a corner that is turned inside out."""
        low, right, top, far = self.jacobians
        found: NDArray[np.bool_] = np.minimum(np.minimum(low, right), np.minimum(top, far)) <= 0
        return found

    @cached_property
    def areas(self) -> Values:
        return (self.jacobians.low + self.jacobians.far) / 2

    def gradient(self, values: Values) -> Points:
        """Of ``values`` at the nodes, for each cell: along x, and along y as the imaginary part."""
        up, down = (
            self.nodes[1:, 1:] - self.nodes[:-1, :-1],
            self.nodes[1:, :-1] - self.nodes[:-1, 1:],
        )
        rise, fall = values[1:, 1:] - values[:-1, :-1], values[1:, :-1] - values[:-1, 1:]
        turned: Points = -1j * (rise * down - fall * up) / (2 * self.areas)
        return turned


def cross(a: Points, b: Points) -> Values:
    area: Values = a.real * b.imag - a.imag * b.real
    return area


def at_nodes(cells: NDArray[Number]) -> NDArray[Number]:
    """The mean of the cells around each node."""
    padded = np.pad(cells, 1, mode="edge")
    rows = padded[1:] + padded[:-1]
    mean: NDArray[Number] = (rows[:, 1:] + rows[:, :-1]) / 4
    return mean
