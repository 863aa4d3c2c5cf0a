"""Gas on a mesh that it carries along, and where that mesh will be tangled, in files of one each.

Points of the plane are complex numbers x + iy, on a square of side 10; a step takes time 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.synth.production import SampleFiles, Settings

# A mesh that moves with a flow, and folds where the flow turns or narrows too fast for it


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


# Gas of two materials
#
# The mesh began as squares and was moved by the flow for about a step. Cells keep their mass, so
# density follows from area; pressure follows from density, as in an ideal gas that takes up no
# heat, and pushes the nodes. From then on nodes keep their velocity and acceleration, and cells
# whose corners turn inside out are counted: what a code whose mesh goes with the flow must foresee.


GAMMA = 5 / 3
NUM_STEPS = 4
"""That are looked ahead."""

CHANNELS = (
    *("displacement x", "displacement y", "velocity x", "velocity y"),
    *("acceleration x", "acceleration y", "density", "pressure", "energy", "sound speed"),
    *("Mach number", "heavy material", "log area", "log aspect", "skewness", "scaled Jacobian"),
    *("vorticity", "divergence"),
)
"""Vectors are those of a cell's first node, all others of the cell itself."""


class Motion(NamedTuple):
    """Of the nodes, now and until they are moved otherwise."""

    mesh: QuadMesh
    velocity: Points
    acceleration: Points

    def after(self, time: float) -> QuadMesh:
        return QuadMesh(self.mesh.nodes + time * (self.velocity + time / 2 * self.acceleration))


@dataclass(frozen=True)
class Gas:
    """Its state in each cell."""

    heavy: Values
    """The fraction of the heavier material."""
    density: Values
    pressure: Values

    @property
    def energy(self) -> Values:
        """Within a unit of mass."""
        return self.pressure / ((GAMMA - 1) * self.density)

    @property
    def sound_speed(self) -> Values:
        return np.sqrt(GAMMA * self.pressure / self.density)


def make_tangling(
    size: int, block: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``CHANNELS`` of ``size`` x ``size`` cells, and how many will be tangled.

    The latter is the fraction of each block of ``block`` x ``block`` cells that are tangled within
    1, 2, 3 and 4 steps from now.
    """
    flow, rest = draw_flow(rng), QuadMesh.at_rest(size, rng)
    mesh = _carried(rest, flow, rng.uniform(0.5, 1.5))
    gas = draw_gas(rest, mesh, rng)
    motion = Motion(mesh, _velocity(flow, mesh.nodes), _acceleration(mesh, gas))
    return channels(rest, motion, gas), tangled_fractions(motion, block)


def _carried(rest: QuadMesh, flow: Flow, time: float) -> QuadMesh:
    """The mesh as the flow has left it after ``time``, or before, if it would be tangled then."""
    mesh = QuadMesh(rest.nodes.copy())
    for part in flow:
        part.move(mesh.nodes, time)
    return _carried(rest, flow, time / 2) if mesh.is_tangled.any() else mesh


def draw_gas(rest: QuadMesh, mesh: QuadMesh, rng: np.random.Generator) -> Gas:
    """Gas that was at rest, at one pressure, when the mesh was ``rest``."""
    direction = np.exp(2j * np.pi * rng.random())
    place = (rest.nodes[:-1, :-1] - complex(*rng.uniform(0.2, 0.8, 2)) * SIDE) * direction
    waves = rng.uniform(0.1, 0.4) * np.sin(rng.uniform(1, 4) * place.real + rng.uniform(0, 6))
    heavy = (1 + np.tanh((place.imag - waves) / 0.1)) / 2
    before = 1 + rng.uniform(0.5, 3) * heavy
    compression = rest.areas / mesh.areas
    pressure = rng.uniform(0.15, 0.4) ** 2 / GAMMA * compression**GAMMA
    return Gas(heavy, before * compression, pressure)


def _velocity(flow: Flow, nodes: Points) -> Points:
    velocity = np.zeros_like(nodes)
    for part in flow:
        part.add_velocity(nodes, velocity)
    return velocity


def _acceleration(mesh: QuadMesh, gas: Gas) -> Points:
    """Of each node, by the pressure around it."""
    return at_nodes(-mesh.gradient(at_nodes(gas.pressure)) / gas.density)


def channels(rest: QuadMesh, motion: Motion, gas: Gas) -> NDArray[np.float32]:
    mesh, velocity, acceleration = motion
    jacobians = mesh.jacobians
    x, y = mesh.edges[0][:-1], mesh.edges[1][:, :-1]
    lengths = np.abs(x), np.abs(y)
    along_x, along_y = mesh.gradient(velocity.real), mesh.gradient(velocity.imag)
    speed = np.abs(velocity[:-1, :-1])
    vectors = (mesh.nodes - rest.nodes, velocity, acceleration)
    scalars = (
        *(gas.density, gas.pressure, gas.energy, gas.sound_speed, speed / gas.sound_speed),
        *(gas.heavy, np.log(mesh.areas / rest.areas), np.log(lengths[0] / lengths[1])),
        (x * np.conj(y)).real / (lengths[0] * lengths[1]),
        np.minimum.reduce(jacobians) / np.maximum.reduce(jacobians),
        *(along_y.real - along_x.imag, along_x.real + along_y.imag),
    )
    data = np.empty((len(CHANNELS), *mesh.areas.shape), np.float32)
    for number, vector in enumerate(vectors):
        data[2 * number] = vector.real[:-1, :-1]
        data[2 * number + 1] = vector.imag[:-1, :-1]
    for number, scalar in enumerate(scalars, 2 * len(vectors)):
        data[number] = scalar
    return data


def tangled_fractions(motion: Motion, block: int) -> NDArray[np.float32]:
    rows, columns = motion.mesh.areas.shape
    was_tangled = np.zeros((rows, columns), np.bool_)
    fractions = []
    for step in range(1, NUM_STEPS + 1):
        was_tangled |= motion.after(step).is_tangled
        blocks = was_tangled.reshape(rows // block, block, columns // block, block)
        fractions.append(blocks.mean((1, 3), dtype=np.float32))
    return np.stack(fractions)


# Files of meshes that are about to tangle, as codes for flows meet them: one a file

MOST = 8192
"""Cells along a dim."""


@dataclass(frozen=True, kw_only=True)
class Meshes(SampleFiles):
    """Meshes that go with a flow, and how many of their cells will be turned inside out.

    ``data`` (18, size, size) float32; ``target`` (4, size / block, size / block) float32, the
    fraction of each block's cells that are tangled within 1, 2, 3 and 4 steps; ``names`` (18,)
    strings, of the channels.
    """

    prefix = "mesh"
    size: int = 1024
    """Cells along each dim."""
    count: int = 8
    block: int = 64
    """Cells along each dim of a block."""

    def __post_init__(self) -> None:
        if self.block < 1 or not 0 < self.size <= MOST or self.size % self.block:
            raise ConfigError(
                f"the size of a mesh must be a multiple of {self.block}, the size of its blocks, "
                f"up to {MOST}, got {self.size}"
            )
        super().__post_init__()

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 560 * self.size**2

    def file_nbytes(self, index: int) -> int:
        blocks = (self.size // self.block) ** 2
        return 4 * (len(CHANNELS) * self.size**2 + NUM_STEPS * blocks) + 2**14

    @property
    def sizes(self) -> Settings:
        return {"size": self.size, "block": self.block}

    def fill(self, file: h5py.File, index: int) -> None:
        made = make_tangling(self.size, self.block, self.rng(index))
        file["data"], file["target"] = made
        file["names"] = np.array(CHANNELS, "S")
