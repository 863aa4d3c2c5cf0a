"""Gas of two materials on a mesh that it carries along, and where that mesh will be tangled.

The mesh began as squares and was moved by the flow for about a step. Cells keep their mass, so
density follows from area; pressure follows from density, as in an ideal gas that takes up no heat,
and pushes the nodes. From then on nodes keep their velocity and acceleration, and cells whose
corners turn inside out are counted: what a code whose mesh goes with the flow must foresee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.lagrangian import (
    SIDE,
    Flow,
    Points,
    QuadMesh,
    Values,
    at_nodes,
    draw_flow,
)

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
