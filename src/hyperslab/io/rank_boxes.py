"""Which box of a sample each rank of a mesh reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hyperslab.errors import LayoutError
from hyperslab.io.dataset import Dataset
from hyperslab.io.spec import ArraySpec
from hyperslab.layout import Box, Grid, Layout, Span, split_over

AXIS_OF = {"C": "channel", "D": "depth", "H": "height", "W": "width"}


Cuts = Mapping[str, Sequence[int]]


def sample_layout(spec: ArraySpec, grid: Grid, cuts: Cuts | None = None) -> Layout:
    """How one sample of an array is cut over ``grid``: as a tensor that enters the mesh.

    ``cuts`` gives the bounds along some axes; the others are cut evenly.
    """
    if not spec.is_cut:
        return Layout.unsplit(spec.shape)
    return split_over(spec.shape, grid, [AXIS_OF[letter] for letter in spec.axes.names], cuts)


def rank_boxes(dataset: Dataset, grid: Grid, ranks: Iterable[int]) -> dict[str, Box]:
    """The box of each array that holds what all of ``ranks`` read of one sample."""
    coords = [grid.coords[rank] for rank in ranks]
    layouts = {name: sample_layout(spec, grid) for name, spec in dataset.arrays.items()}
    return {
        name: around([layout.box(place) for place in coords]) for name, layout in layouts.items()
    }


def check_cuts(spec: ArraySpec, grid: Grid) -> None:
    """Raises if ``grid`` cuts along an axis that the sample ``spec`` does not have."""
    names = spec.axes.names
    spatial = [axis for axis in grid.long_axes if axis not in ("sample", "channel")]
    if missing := [axis for axis in spatial if axis not in {AXIS_OF[n] for n in names}]:
        raise LayoutError(
            f"the mesh {grid.describe()} cuts along {', '.join(missing)}, but the samples have "
            f"dims {names} of shape {spec.shape}: leave it out, or name their dims by axes"
        )


def around(boxes: list[Box]) -> Box:
    """The smallest box that holds all of ``boxes``; empty ones ask for nothing."""
    full = [box for box in boxes if box] or boxes[:1]
    return Box(
        tuple(
            Span(min(span.start for span in spans), max(span.stop for span in spans))
            for spans in zip(*(box.spans for box in full), strict=True)
        )
    )
