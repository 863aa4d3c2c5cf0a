"""Samples that hold values which are not numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io import Dataset
from hyperslab.store.placement import Placement


def find_not_finite(
    dataset: Dataset, placement: Placement, indices: Sequence[int]
) -> tuple[int, str] | None:
    """The first of the samples with a NaN or an infinity in this rank's boxes, if there is one.

    Given are its place in ``indices`` and what is wrong in words. Samples that cannot be read are
    left out.
    """
    for place, index in enumerate(indices):
        for name, spec in placement.arrays.items():
            if spec.dtype.kind not in "fc":
                continue
            try:
                values = dataset.read(index, placement.box(name), array=name)
            except FormatError:
                continue
            if (bad := ~np.isfinite(values)).any():
                path, number = dataset.place_of(index)
                return place, (
                    f"{dataset.name_of(index)} (number {number} in {path}) holds "
                    f"{values[bad][0]} in array {name!r}"
                )
    return None
