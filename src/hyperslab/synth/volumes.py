"""Bodies in a magnetic resonance scanner, with maps of organs and lesions, in files of one each.

Places are from -1 to 1 along each dim. A soft displacement of all places bends every surface; a
voxel that a surface goes through shows a mixture; the image gets uneven illumination and the noise
of a magnitude of two noisy signals (Rice's distribution).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.io.spec import shown_shape
from hyperslab.synth.production import SampleFiles, Settings, check_size
from hyperslab.synth.smooth_noise import Field, smooth_noise

CLASSES = ("background", "liver", "kidneys", "lesions")
BLUR = 1.5
"""Voxels over which one tissue becomes another."""
BEND = 0.06
"""The standard deviation of the displacement."""


@dataclass(frozen=True)
class Ellipsoid:
    centre: NDArray[np.float64]
    radii: NDArray[np.float64]
    turn: NDArray[np.float64]
    """Rows are the directions of its axes."""

    @classmethod
    def draw(
        cls,
        centre: NDArray[np.float64],
        radii: tuple[float, float, float],
        rng: np.random.Generator,
        tilt: float = 1.0,
    ) -> Ellipsoid:
        """With radii about these, turned at random; less so with a small ``tilt``."""
        near = np.eye(3) + tilt * rng.normal(0, 1, (3, 3))
        return cls(centre, np.array(radii) * rng.uniform(0.85, 1.15, 3), np.linalg.qr(near)[0])

    def place_inside(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """A place well within."""
        direction = rng.normal(0, 1, 3)
        direction *= 0.7 * rng.random() ** (1 / 3) / np.linalg.norm(direction)
        inside: NDArray[np.float64] = self.centre + (direction * self.radii) @ self.turn
        return inside


@dataclass(frozen=True)
class Tissue:
    shape: Ellipsoid
    brightness: float
    roughness: float
    """How much the brightness changes within."""
    label: int | None = None
    """None: it keeps that of what it lies in."""


def make_phantom(
    shape: tuple[int, int, int], rng: np.random.Generator
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """An image, and the number of the class (of ``CLASSES``) of each voxel."""
    places = _bent_places(shape, rng)
    grain = smooth_noise(shape, [max(2.0, extent / 5) for extent in shape], rng)
    image, label = np.full(shape, 0.02, np.float32), np.zeros(shape, np.uint8)
    for tissue in draw_body(rng):
        _paint(tissue, places, grain, image, label)
    return _scanned(image, rng), label


def draw_body(rng: np.random.Generator) -> list[Tissue]:
    """Tissues in the order in which they are painted: later ones lie within earlier ones."""
    middle = rng.normal(0, 0.03, 3)
    body = Ellipsoid.draw(middle, (1.05, 0.78, 0.85), rng, tilt=0.05)
    inner = Ellipsoid(body.centre, body.radii - rng.uniform(0.06, 0.14), body.turn)
    liver = Ellipsoid.draw(middle + _near(rng, 0, -0.1, -0.3), (0.52, 0.4, 0.38), rng, 0.4)
    kidneys = [
        Ellipsoid.draw(middle + _near(rng, 0.1, 0.38, side), (0.3, 0.15, 0.15), rng, 0.3)
        for side in (-0.42, 0.42)
    ]
    spine = Ellipsoid.draw(middle + _near(rng, 0, 0.55, 0), (1.3, 0.09, 0.1), rng, 0.02)
    fat, muscle, bone = rng.uniform(0.8, 1), rng.uniform(0.33, 0.43), rng.uniform(0.15, 0.6)
    organs = [rng.uniform(0.52, 0.65), rng.uniform(0.6, 0.85)]
    lesion = organs[0] + rng.choice([-1, 1]) * rng.uniform(0.15, 0.3)
    hosts = [liver, liver, kidneys[0], kidneys[1]]
    return [
        Tissue(body, fat, 0.05),
        Tissue(inner, muscle, 0.1),
        Tissue(spine, bone, 0.1),
        *(Tissue(each, rng.uniform(0.3, 0.8), 0.1) for each in _bowels(middle, rng)),
        Tissue(liver, organs[0], 0.06, 1),
        *(Tissue(each, organs[1], 0.12, 2) for each in kidneys),
        *(Tissue(_vessel(liver, rng), rng.uniform(0.6, 0.9), 0.02) for _ in range(3)),
        *(Tissue(_lesion(host, rng), lesion, 0.15, 3) for host in hosts if rng.random() < 0.7),
        Tissue(_lesion(liver, rng), lesion, 0.15, 3),
    ]


def _near(rng: np.random.Generator, *place: float) -> NDArray[np.float64]:
    return np.array(place) + rng.normal(0, 0.04, 3)


def _bowels(middle: NDArray[np.float64], rng: np.random.Generator) -> list[Ellipsoid]:
    """Bright and dark loops that look like organs and lesions, and are neither."""
    places = middle + rng.uniform((-0.7, -0.5, 0), (0.7, 0.1, 0.55), (rng.integers(4, 10), 3))
    return [Ellipsoid.draw(each, (0.18, 0.08, 0.08), rng) for each in places]


def _vessel(organ: Ellipsoid, rng: np.random.Generator) -> Ellipsoid:
    return Ellipsoid.draw(organ.place_inside(rng), (0.3, 0.025, 0.025), rng)


def _lesion(organ: Ellipsoid, rng: np.random.Generator) -> Ellipsoid:
    radius = organ.radii.min() * rng.uniform(0.25, 0.55)
    return Ellipsoid.draw(organ.place_inside(rng), (radius, radius, radius), rng)


def _bent_places(shape: tuple[int, int, int], rng: np.random.Generator) -> Field:
    """Where each voxel is, (3, ...), but for a smooth displacement."""
    places = BEND * np.stack([smooth_noise(shape, 4, rng) for _ in shape])
    for dim, extent in enumerate(shape):
        ticks = (2 * np.arange(extent, dtype=np.float32) + 1) / extent - 1
        places[dim] += ticks.reshape([-1 if dim == other else 1 for other in range(3)])
    return places


def _paint(
    tissue: Tissue, places: Field, grain: Field, image: Field, label: NDArray[np.uint8]
) -> None:
    ellipsoid = tissue.shape
    reach = ellipsoid.radii.max() + 5 * BEND
    box = tuple(
        slice(*(int(min(max(0, (end + 1) / 2 * extent), extent)) for end in ends))
        for *ends, extent in zip(
            ellipsoid.centre - reach, ellipsoid.centre + reach, image.shape, strict=True
        )
    )
    covered = _covered(ellipsoid, places[:, *box], voxel=2 / min(image.shape))
    bright = np.float32(tissue.brightness) * (1 + np.float32(tissue.roughness) * grain[box])
    image[box] += covered * (bright - image[box])
    if tissue.label is not None:
        label[box][covered > 0.5] = tissue.label


def _covered(ellipsoid: Ellipsoid, places: Field, voxel: float) -> Field:
    """The fraction of each voxel that lies inside."""
    matrix = (ellipsoid.turn / ellipsoid.radii[:, None]).astype(np.float32)
    offset = matrix @ ellipsoid.centre.astype(np.float32)
    radius = np.zeros(places.shape[1:], np.float32)
    for row, start in zip(matrix, offset, strict=True):
        radius += (row[0] * places[0] + row[1] * places[1] + row[2] * places[2] - start) ** 2
    slope = ellipsoid.radii.min() / (BLUR * voxel)
    covered: Field = np.clip(0.5 + np.float32(slope) * (1 - np.sqrt(radius)), 0, 1)
    return covered


def _scanned(image: Field, rng: np.random.Generator) -> NDArray[np.int16]:
    gain = np.exp(0.25 * smooth_noise(image.shape, 1.5, rng))
    noise = np.float32(rng.uniform(0.02, 0.06)) * rng.standard_normal((2, *image.shape), np.float32)
    signal = np.hypot(image * gain + noise[0], noise[1])
    values: Field = np.rint(np.float32(rng.uniform(800, 1200)) * signal)
    return values.astype(np.int16)


# Files of bodies as a scanner sees them, with their organs marked: one a file

LEAST, MOST = 16, 1024
"""Voxels along a dim."""


@dataclass(frozen=True, kw_only=True)
class Volumes(SampleFiles):
    """Images of bodies and maps of the organs and lesions in them.

    ``image`` (1, depth, height, width) int16; ``label`` (depth, height, width) uint8, 0 for the
    background, 1 in the liver, 2 in the kidneys, 3 in lesions of either; ``stats`` (1, 4) float32,
    the least, the most, the mean and the standard deviation of this image; ``names`` (4,) strings.
    """

    prefix = "volumes"
    shape: tuple[int, int, int] = (128, 128, 128)
    count: int = 16

    def __post_init__(self) -> None:
        check_size("a volume", self.shape, LEAST, MOST)
        super().__post_init__()

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 60 * math.prod(self.shape)

    def file_nbytes(self, index: int) -> int:
        return 3 * math.prod(self.shape) + 2**14

    @property
    def sizes(self) -> Settings:
        return {"size": shown_shape(self.shape)}

    def fill(self, file: h5py.File, index: int) -> None:
        image, label = make_phantom(self.shape, self.rng(index))
        file["image"], file["label"] = image[None], label
        numbers = [image.min(), image.max(), image.mean(), image.std()]
        file["stats"] = np.array([numbers], np.float32)
        file["names"] = np.array(CLASSES, "S")
