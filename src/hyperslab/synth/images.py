"""Pictures of a thing of one of ten shapes, in any pose, colour and pattern, many a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.synth.production import BatchFiles, check_size
from hyperslab.synth.smooth_noise import Field, smooth_noise

Colour: TypeAlias = NDArray[np.float32]


class Places(NamedTuple):
    """Of pixels, as the thing sees them: it reaches to about 1 from its middle."""

    u: Field
    v: Field
    r: Field
    angle: Field

    @classmethod
    def of(cls, u: Field, v: Field) -> Places:
        return cls(u, v, np.hypot(u, v), np.arctan2(v, u))


THIRD = 2 * np.pi / 3
"""Of a turn."""

SHAPES: Mapping[str, Callable[[Places], NDArray[Any]]] = {
    "disc": lambda at: 0.9 - at.r,
    "ring": lambda at: 0.2 - np.abs(at.r - 0.8),
    "square": lambda at: 0.8 - np.maximum(np.abs(at.u), np.abs(at.v)),
    "triangle": lambda at: 0.5 - at.r * np.cos(at.angle % THIRD - THIRD / 2),
    "flower": lambda at: 0.65 + 0.35 * np.cos(5 * at.angle) - at.r,
    "cross": lambda at: np.maximum(_bar(at.u, at.v, 1, 0.28), _bar(at.v, at.u, 1, 0.28)),
    "crescent": lambda at: np.minimum(1 - at.r, np.hypot(at.u - 0.5, at.v) - 0.8),
    "gear": lambda at: np.minimum(0.85 + 0.13 * _teeth(9 * at.angle) - at.r, at.r - 0.35),
    "spiral": lambda at: np.minimum(0.22 * np.cos(at.angle - 9 * at.r), 1 - at.r),
    "dumbbell": lambda at: np.maximum(
        0.42 - np.hypot(np.abs(at.u) - 0.6, at.v), _bar(at.u, at.v, 0.6, 0.14)
    ),
}
"""How far inside a shape each place is; below 0 outside."""


def _bar(u: Field, v: Field, length: float, width: float) -> Field:
    found: Field = np.minimum(length - np.abs(u), width - np.abs(v))
    return found


def _teeth(angle: Field) -> Field:
    found: Field = np.clip(4 * np.cos(angle), -1, 1)
    return found


class Pixels(NamedTuple):
    """Where the pixels of a picture are: its shorter side is from -1 to 1."""

    x: Field
    y: Field
    pitch: float
    """From one to the next."""

    @classmethod
    def of(cls, shape: tuple[int, int]) -> Pixels:
        pitch = 2 / min(shape)
        ticks = [pitch * (np.arange(n, dtype=np.float32) - (n - 1) / 2) for n in shape]
        y, x = np.meshgrid(*ticks, indexing="ij")
        return cls(x.astype(np.float32), y.astype(np.float32), pitch)


def make_image(shape: tuple[int, int], label: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A picture (3, height, width) of a thing whose shape is number ``label`` of ``SHAPES``."""
    pixels = Pixels.of(shape)
    behind, front = _contrasting(rng)
    image = _ground(shape, behind, rng)
    for _ in range(rng.integers(2, 8)):
        _paint_patch(image, pixels, rng)
    size = rng.uniform(0.45, 0.8)
    places = _posed(pixels, size, rng)
    covered = np.clip(0.5 + list(SHAPES.values())[label](places) * size / pixels.pitch, 0, 1)
    image += covered * (_patterned(places, front, rng) - image)
    for _ in range(rng.integers(2)):
        _paint_patch(image, pixels, rng)
    return _exposed(image, pixels, rng)


def _contrasting(rng: np.random.Generator) -> tuple[Colour, Colour]:
    """Two colours that can be told apart."""
    while True:
        pair: tuple[Colour, Colour] = tuple(rng.random((2, 3, 1, 1), np.float32))
        if np.abs(pair[0] - pair[1]).sum() > 1:
            return pair


def _ground(shape: tuple[int, int], colour: Colour, rng: np.random.Generator) -> Field:
    """A surface of changing colour, rough or smooth."""
    waves = smooth_noise(shape, rng.uniform(2, 5), rng)
    grain = smooth_noise(shape, min(shape) / 4, rng)
    tint = rng.normal(0, 0.08, (2, 3, 1, 1)).astype(np.float32)
    image: Field = colour + tint[0] * waves + tint[1] * grain
    return image


def _posed(pixels: Pixels, size: float, rng: np.random.Generator) -> Places:
    """Turned, moved, and seen at a slant, so that one direction is up to 1.5 times shorter."""
    turn, slant = rng.uniform(0, 2 * np.pi, 2)
    squeeze = rng.uniform(1, 1.5)
    x, y = (each - rng.uniform(-0.3, 0.3) for each in pixels[:2])
    spin = _rotation(turn) @ np.diag([1, squeeze]) @ _rotation(slant) / size
    (a, b), (c, d) = spin.astype(np.float32)
    return Places.of(a * x + b * y, c * x + d * y)


def _rotation(angle: float) -> NDArray[np.float64]:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def _patterned(at: Places, colour: Colour, rng: np.random.Generator) -> Field:
    """One colour, stripes, or checks of two shades of it."""
    wave = np.float32(rng.uniform(6, 14))
    kind = rng.integers(3)
    if kind == 0:
        return np.broadcast_to(colour, (3, *at.u.shape))
    shade = np.sin(wave * at.u) if kind == 1 else np.sin(wave * at.u) * np.sin(wave * at.v)
    step = rng.normal(0, 0.12, (3, 1, 1)).astype(np.float32)
    pattern: Field = colour + step * np.clip(4 * shade, -1, 1)
    return pattern


def _paint_patch(image: Field, pixels: Pixels, rng: np.random.Generator) -> None:
    """A small bar or blob of any colour."""
    extents = [max(2, int(n * rng.uniform(0.05, 0.25))) for n in image.shape[1:]]
    starts = [rng.integers(n) - m // 2 for n, m in zip(image.shape[1:], extents, strict=True)]
    box = tuple(slice(max(0, a), a + m) for a, m in zip(starts, extents, strict=True))
    x, y = pixels.x[box], pixels.y[box]
    if x.size:
        angle, reach = rng.uniform(0, np.pi), max(extents) * pixels.pitch / 2
        u, v = x - x.mean(), y - y.mean()
        across = np.abs(u * np.sin(angle) + v * np.cos(angle)).astype(np.float32)
        inside = rng.uniform(0.15, 0.6) * reach - across
        covered = np.clip(0.5 + inside / pixels.pitch, 0, 1)
        image[:, *box] += covered * (rng.random((3, 1, 1), np.float32) - image[:, *box])


def _exposed(image: Field, pixels: Pixels, rng: np.random.Generator) -> NDArray[np.uint8]:
    """In uneven light, with the noise of a camera."""
    slope = rng.normal(0, 0.15, 2).astype(np.float32)
    light = np.float32(rng.uniform(0.7, 1.2)) * (1 + slope[0] * pixels.x + slope[1] * pixels.y)
    noise = np.float32(rng.uniform(0.01, 0.04)) * rng.standard_normal(image.shape, np.float32)
    seen: Field = np.rint(255 * np.clip(image * light + noise, 0, 1))
    return seen.astype(np.uint8)


# Files of labelled pictures, as networks for images are trained on: many a file

LEAST, MOST = 16, 4096
"""Pixels along a dim."""


@dataclass(frozen=True, kw_only=True)
class Images(BatchFiles):
    """Pictures of things, told by their shape alone.

    ``data`` (n, 3, height, width) uint8, ``label`` (n,) int32 from 0 to 9, and ``names`` (10,)
    strings, of the classes.
    """

    prefix = "images"
    count: int = 1024
    per_file: int = 256

    def __post_init__(self) -> None:
        check_size("an image", self.shape, LEAST, MOST)
        super().__post_init__()

    @property
    def memory_nbytes(self) -> int:
        return 2**27 + 100 * self.shape[0] * self.shape[1]

    def file_nbytes(self, index: int) -> int:
        return len(self.numbers(index)) * (3 * self.shape[0] * self.shape[1] + 4) + 2**14

    def fill(self, file: h5py.File, index: int) -> None:
        images = self.numbers(index)
        data = file.create_dataset("data", (len(images), 3, *self.shape), np.uint8)
        label = np.empty(len(images), np.int32)
        for place, number in enumerate(images):
            rng = self.rng(number)
            label[place] = rng.integers(len(SHAPES))
            data[place] = make_image(self.shape, label[place], rng)
        file["label"], file["names"] = label, np.array(list(SHAPES), "S")
