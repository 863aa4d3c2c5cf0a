"""Random fields that are smooth: values on a coarse grid, with cubic splines between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Field: TypeAlias = NDArray[np.float32]

SPREAD = (151 / 315) ** 0.5
"""The standard deviation that a spline leaves of that of its values, along one dim."""


def smooth_noise(
    shape: Sequence[int], cells: float | Sequence[float], rng: np.random.Generator
) -> Field:
    """A field of mean 0 and standard deviation 1, from a grid of ``cells`` cells along each dim."""
    counts = [cells] * len(shape) if isinstance(cells, int | float) else cells
    weights = [spline_weights(num, count) for num, count in zip(shape, counts, strict=True)]
    field: Field = rng.standard_normal([each.shape[1] for each in weights], np.float32)
    for each in weights:  # the first dim goes, and comes back as the last
        field = np.tensordot(field, each, axes=(0, 1))
    return field / np.float32(SPREAD ** len(shape))


def spline_weights(num: int, cells: float) -> Field:
    """What each of the values counts for each of ``num`` points spread over ``cells`` cells."""
    places = (np.arange(num) + 0.5) * cells / num
    first = np.floor(places).astype(int)
    t = places - first
    of_four = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 1 + 3 * (t + t**2 - t**3), t**3)
    weights = np.zeros((num, int(np.ceil(cells)) + 3), np.float32)
    for number, each in enumerate(of_four):
        weights[np.arange(num), first + number] = each / 6
    return weights
