"""Hypothesis strategies for tests of rules: meshes and cuts as users may have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import hyperslab as hs
from hyperslab.layout import AXES, DIM_AXES

SIZES = ((), (2,), (2,), (3,), (4,), (2, 2), (2, 2, 2))
"""The sizes of the meshes that are drawn: on 1, 2, 3, 4 and 8 ranks."""


@dataclass(frozen=True)
class Place:
    """A mesh, and uneven cuts along some of its axes."""

    axes: Mapping[str, int]
    cuts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axes.values())

    def mesh(self, device: str = "cpu") -> hs.Mesh:
        """Collective over all ranks."""
        return hs.init(**self.axes, device=device, timeout_seconds=100, transport="auto")

    def cuts_of(self, num_dims: int) -> dict[str, Sequence[int]]:
        """The cuts along the axes that cut a tensor of ``num_dims`` dims."""
        return {axis: cuts for axis, cuts in self.cuts.items() if axis in DIM_AXES[num_dims]}

    def __str__(self) -> str:
        axes = [
            f"{axis}={size}"
            + (f"@{'-'.join(map(str, self.cuts[axis]))}" if axis in self.cuts else "")
            for axis, size in self.axes.items()
        ]
        return " x ".join(axes) or "one rank"


@st.composite
def places(draw: DrawFn, shape: Sequence[int]) -> Place:
    """A mesh for tensors of ``shape``, with even, uneven, thin and empty pieces.

    Some of its axes may cut no dim of the tensor, which is then equal on several ranks.
    """
    own = [axis for axis in DIM_AXES[len(shape)] if axis]
    others = [axis for axis in AXES if axis not in own]
    order = draw(
        st.one_of(st.permutations(own).map(lambda own: [*own, *others]), st.permutations(AXES))
    )
    axes = dict(zip(order, draw(st.sampled_from(SIZES)), strict=False))
    return Place(axes, draw(cuts_for(shape, axes)))


@st.composite
def cuts_for(
    draw: DrawFn, shape: Sequence[int], axes: Mapping[str, int]
) -> dict[str, Sequence[int]]:
    """Cuts of a tensor of ``shape`` on a mesh of ``axes``, for some of them or all."""
    named = {axis: n for axis, n in zip(DIM_AXES[len(shape)], shape, strict=True) if axis}
    drawn = {axis: draw(bounds_of(extent, axes.get(axis, 1))) for axis, extent in named.items()}
    return {axis: bounds for axis, bounds in drawn.items() if bounds is not None}


def bounds_of(extent: int, num: int) -> SearchStrategy[list[int] | None]:
    """The bounds of ``num`` pieces of ``extent`` indices; None, where it can be, for even ones."""
    inner = st.lists(st.integers(0, extent), min_size=num - 1, max_size=num - 1)
    uneven = inner.map(lambda bounds: [0, *sorted(bounds), extent])
    return st.one_of(st.none(), uneven) if extent >= num else uneven
