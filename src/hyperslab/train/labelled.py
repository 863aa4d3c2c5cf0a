"""Few labels: a part of the samples, the same on every mesh, larger parts around smaller ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.io.schedule import Indices, permutation

KEY = 0x1ABE1
"""Draws another order than that of the parts and the epochs."""


def take_labelled(
    data: Dataset, fraction: float, seed: int, *, classes: str | None = None
) -> Dataset:
    """The ``fraction`` of the samples whose labels are used, drawn by ``seed``.

    Of two fractions the larger has all samples of the smaller. ``classes`` names the array with the
    class of each sample: every class then keeps its share, to rounding.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"{fraction} of the labels cannot be taken: there are {len(data)} samples, and a "
            "fraction above 0 and at most 1 was expected"
        )
    if fraction == 1:
        return data
    num = round(fraction * len(data))
    if not num:
        raise ConfigError(
            f"data.labelled_fraction = {fraction} of {len(data)} samples to train on is none: set "
            f"{1 / len(data):.2g} at least, which is one"
        )
    labels = None if classes is None else read_classes(data, classes)
    return data.take(np.sort(labelled_order(len(data), seed, labels)[:num]))


def labelled_order(num: int, seed: int, labels: NDArray[np.generic] | None = None) -> Indices:
    """All samples in the order in which they are given labels.

    >>> labels = np.array([0, 0, 0, 0, 1, 1, 0, 0])
    >>> sorted(labels[labelled_order(8, 3, labels)[:4]].tolist())
    [0, 0, 0, 1]
    """
    drawn = permutation(num, seed, KEY)
    if labels is None:
        return drawn
    places = np.empty(num)
    for each in np.unique(labels):
        mine = drawn[labels[drawn] == each]
        places[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return drawn[np.argsort(places[drawn], kind="stable")]


def read_classes(data: Dataset, name: str) -> NDArray[np.generic]:
    """The class of every sample; of a map, or of several numbers, there is none."""
    spec = data.arrays[name]
    if int(np.prod(spec.shape)) != 1:
        raise ConfigError(
            f"{name!r} has {int(np.prod(spec.shape))} numbers a sample: classes of which each is "
            "to keep its share are one"
        )
    return np.array([data.read(index, array=name).reshape(()) for index in range(len(data))])
