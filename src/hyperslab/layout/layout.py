"""The grid of ranks with named axes, and how a global tensor is spread over it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from zlib import crc32

from hyperslab.errors import LayoutError
from hyperslab.layout.box import Box, Span
from hyperslab.layout.cuts import Cuts, cut_at, cut_evenly, cut_in_chunks

AXES = ("sample", "channel", "depth", "height", "width")

DIM_AXES: Mapping[int, tuple[str | None, ...]] = {
    0: (),
    1: ("sample",),
    2: ("sample", "channel"),
    3: ("sample", "channel", "width"),
    4: ("sample", "channel", "height", "width"),
    5: ("sample", "channel", "depth", "height", "width"),
}
"""Which axis cuts which dim, by the tensor's number of dims."""


@dataclass(frozen=True)
class Grid:
    """Ranks in row-major order over ``AXES``: ranks that differ in width are next to each other."""

    sizes: tuple[int, ...]

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[AXES.index(axis)]

    @cached_property
    def coords(self) -> tuple[Mapping[str, int], ...]:
        """Every rank's coords, by axis name."""
        grid = product(*(range(size) for size in self.sizes))
        return tuple(dict(zip(AXES, coords, strict=True)) for coords in grid)

    @cached_property
    def long_axes(self) -> tuple[str, ...]:
        """The axes along which there is more than one rank."""
        return tuple(axis for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)

    def groups(self, axes: Collection[str]) -> Iterator[tuple[int, ...]]:
        """The sets of ranks whose coords differ only along ``axes``; they partition the grid."""
        kept = [axis for axis in self.long_axes if axis not in axes]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, coords in enumerate(self.coords):
            members.setdefault(tuple(coords[axis] for axis in kept), []).append(rank)
        return map(tuple, members.values())

    def describe(self) -> str:
        """The long axes with their sizes, such as ``sample=2 x depth=4``."""
        return " x ".join(f"{axis}={self.size(axis)}" for axis in self.long_axes) or "one rank"


@dataclass(frozen=True, slots=True)
class Split:
    """One dim cut over the ranks along one axis."""

    axis: str
    cuts: Cuts


@dataclass(frozen=True)
class Layout:
    """The shape of a global tensor and, for each dim, how it is split (None: whole on every rank).

    A tensor is equal on ranks that differ only along an axis that splits none of its dims.
    """

    shape: tuple[int, ...]
    splits: tuple[Split | None, ...]

    def __hash__(self) -> int:
        """Made once, because layouts are keys of every cache on the way of a step."""
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = self.__dict__["_hash"] = hash((self.shape, self.splits))
        return kept

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        # Hashes of strings differ from process to process, so a copy makes its own.
        return Layout, (self.shape, self.splits)

    @staticmethod
    def unsplit(shape: Sequence[int]) -> Layout:
        return _unsplit(tuple(shape))

    @cached_property
    def split_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, split in enumerate(self.splits) if split)

    @cached_property
    def fingerprint(self) -> int:
        """A number that is the same in every process, unlike a hash."""
        return crc32(repr((self.shape, self.splits)).encode())

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that split a dim."""
        return tuple(split.axis for split in self.splits if split)

    def span(self, dim: int, coords: Mapping[str, int]) -> Span:
        split = self.splits[dim]
        return split.cuts.spans[coords[split.axis]] if split else Span(0, self.shape[dim])

    def box(self, coords: Mapping[str, int]) -> Box:
        """What the rank at ``coords`` holds."""
        return Box(tuple(self.span(dim, coords) for dim in range(len(self.shape))))

    def axes_of(self, dims: Sequence[int]) -> tuple[str, ...]:
        """The axes that split any of ``dims``."""
        return tuple(split.axis for dim in dims if (split := self.splits[dim]))

    def with_dim(self, dim: int, extent: int, split: Split | None = None) -> Layout:
        """This layout with dim ``dim`` of another extent and split."""
        return Layout(
            (*self.shape[:dim], extent, *self.shape[dim + 1 :]),
            (*self.splits[:dim], split, *self.splits[dim + 1 :]),
        )

    def whole_along(self, dims: Sequence[int]) -> Layout:
        """This layout with ``dims`` no longer split."""
        splits = tuple(None if dim in dims else split for dim, split in enumerate(self.splits))
        return replace(self, splits=splits)

    def describe(self) -> str:
        """The shape and its splits in words, for errors.

        >>> Layout.unsplit((2, 3)).describe()
        '2x3, whole on every rank'
        """
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{shape}, {self.describe_splits() or 'whole on every rank'}"

    def describe_splits(self) -> str:
        """The split dims in words, such as ``dim 2 split over depth=2``."""
        return ", ".join(
            f"dim {dim} split over {split.axis}={split.cuts.num}"
            for dim, split in enumerate(self.splits)
            if split
        )


@lru_cache(maxsize=4096)
def _unsplit(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, (None,) * len(shape))


def split_alike(shape: Sequence[int], layouts: Iterable[Layout]) -> Layout:
    """The layout of a tensor of ``shape`` to which those of ``layouts`` broadcast.

    Each dim is split as in the first of them that has all of it, if the axis splits no other dim.
    """
    splits: list[Split | None] = [None] * len(shape)
    for layout in layouts:
        for dim, split in enumerate(layout.splits, len(shape) - len(layout.shape)):
            taken = {chosen.axis for chosen in splits if chosen}
            whole = layout.shape[dim - len(shape)] == shape[dim]
            if split and whole and splits[dim] is None and split.axis not in taken:
                splits[dim] = split
    return Layout(tuple(shape), tuple(splits))


def split_over(
    shape: Sequence[int],
    grid: Grid,
    axes: Sequence[str | None] | None = None,
    cuts: Mapping[str, Sequence[int]] | None = None,
) -> Layout:
    """The layout of a tensor that enters the mesh: each dim cut along its axis.

    ``axes`` names the axis of each dim; by default it follows from the number of dims
    (``DIM_AXES``). ``cuts`` gives the bounds along some axes; the others are cut evenly. Channels
    are cut as weights are, in chunks; where they are few, some ranks hold none.

    Every rank calls this with the same arguments, so an error is raised on all of them, before any
    of them waits for another.
    """
    names = _check_axes(shape, axes)
    given = dict(cuts or {})
    cutting = [name for name in names if name]
    if unused := sorted(set(given) - set(cutting)):
        raise LayoutError(
            f"cuts are given for {unused}, but the axes that cut the tensor are {cutting}"
        )
    splits = [
        _split_dim(shape, dim, name, grid.size(name), given.get(name)) if name in cutting else None
        for dim, name in enumerate(names)
    ]
    return Layout(tuple(shape), tuple(splits))


@lru_cache(maxsize=4096)
def recut_over(source: Layout, grid: Grid, *, thin_ones_stay_whole: bool = False) -> Layout:
    """The layout on another ``grid`` of a tensor that lies under ``source``.

    Axes go on to cut the dims that they cut; others cut those that they usually do. Dims with fewer
    indices than ranks are refused, or stay whole.
    """
    usual = DIM_AXES.get(len(source.shape), (None,) * len(source.shape))
    names: list[str | None] = [split.axis if split else None for split in source.splits]
    for dim, axis in enumerate(usual):
        if names[dim] is None and axis not in names:
            names[dim] = axis
    splits: list[Split | None] = []
    for dim, axis in enumerate(names):
        split = source.splits[dim]
        if split is not None and split.cuts.num == grid.size(split.axis):
            splits.append(split)
        else:
            num = 1 if axis is None else grid.size(axis)
            num = 1 if thin_ones_stay_whole and source.shape[dim] < num else num
            splits.append(_split_dim(source.shape, dim, axis or "", num, None))
    return Layout(source.shape, tuple(splits))


def _split_dim(
    shape: Sequence[int], dim: int, axis: str, num: int, bounds: Sequence[int] | None
) -> Split | None:
    extent = shape[dim]
    if bounds is not None:
        cuts = cut_at(bounds, extent, num, axis)
    elif axis == "channel":
        cuts = cut_in_chunks(extent, num)
    elif num > 1 and extent < num:
        raise LayoutError(
            f"cannot split dim {dim} of a tensor of shape {tuple(shape)}, an extent of {extent}, "
            f"over {axis}={num}: every rank needs at least one index (use a smaller {axis}, or "
            "give cuts with empty pieces)"
        )
    else:
        cuts = cut_evenly(extent, num)
    return Split(axis, cuts) if num > 1 else None


def _check_axes(shape: Sequence[int], axes: Sequence[str | None] | None) -> tuple[str | None, ...]:
    if axes is None:
        if len(shape) not in DIM_AXES:
            raise LayoutError(
                f"a tensor of shape {tuple(shape)} has {len(shape)} dims, and the axes of at most "
                "5 are known: name them, such as "
                "axes=('sample', 'channel', None, 'depth', 'height', 'width')"
            )
        return DIM_AXES[len(shape)]
    named = [axis for axis in axes if axis]
    unknown = [axis for axis in named if axis not in DIM_AXES[5]]
    if len(axes) != len(shape) or len(set(named)) != len(named) or unknown:
        raise LayoutError(
            f"axes {tuple(axes)} do not fit a tensor of shape {tuple(shape)}: give one of "
            f"{DIM_AXES[5]} or None for each dim, each name once"
        )
    return tuple(axes)
