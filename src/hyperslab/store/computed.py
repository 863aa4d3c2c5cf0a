"""Samples that ranks have computed rather than read, such as codes: they stay where they are.

Each rank gives what it holds of every sample, and a loader serves it like that of a file: from the
memory of the ranks, in any order, cut as it was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import ArrayReader, ArraySpec, Dataset
from hyperslab.io.manifest import Manifest, Source, SourceFile
from hyperslab.io.reader import Opening, Storage
from hyperslab.io.spec import SampleAxes, shown_shape
from hyperslab.layout import Box, Layout, Split, cut_evenly, recut_over
from hyperslab.nn.placement import move, recut
from hyperslab.nn.slab import Slab

LETTERS = {1: "C", 2: "CW", 3: "CHW", 4: "CDHW"}
"""Of a sample's dims, by their number."""


class Computed:
    """Collects ``num_samples`` of one array, of which each rank has computed its own box.

    Nothing moves when it is kept: a rank adds those samples that its share of the ranks is to own.
    """

    def __init__(self, name: str, num_samples: int, mesh: Mesh) -> None:
        self._name, self._num_samples, self._mesh = name, num_samples, mesh
        self._pieces: dict[int, NDArray[Any]] = {}
        self._layout: Layout | None = None
        self._dtype: np.dtype[Any] | None = None

    def add(self, x: Slab, samples: Sequence[int]) -> None:
        """Keeps this rank's piece of ``x`` (N, C, ...), whose rows are ``samples``.

        Collective over the mesh where ``x`` has to be cut otherwise than it is: along the sample
        axis samples are cut, and nothing else.
        """
        if x.ndim - 1 not in LETTERS:
            raise ConfigError(
                f"{self._name} of shape {shown_shape(x.shape[1:])} cannot be kept: samples of 1 to "
                "4 dims, channels first, were expected"
            )
        x = _with_samples_cut(x.detach(), self._mesh)
        self._layout = Layout(x.layout.shape[1:], x.layout.splits[1:])
        values = x.local if x.dtype == torch.float64 else x.local.float()
        pieces = values.cpu().numpy()
        self._dtype = pieces.dtype
        span = x.layout.span(0, x.mesh.coords)
        for row, sample in enumerate(samples[span.start : span.stop]):
            self._pieces[sample] = pieces[row].copy()

    def dataset(self, epoch: int) -> Dataset:
        """All samples, for a ``Loader`` with ``store="memory"``, which takes them over.

        Ranks have added what comes to them in ``epoch``.
        """
        assert self._layout is not None
        assert self._dtype is not None
        letters = LETTERS[len(self._layout.shape)]
        axes = SampleAxes(letters, True, len(letters))
        spec = ArraySpec(self._name, axes, self._layout.shape, self._dtype, True)
        reader = _Pieces(self._pieces, spec, self._num_samples)
        file = SourceFile(Path(f"{self._name} in memory"), num_rows=self._num_samples)
        opening = Opening("memory", (self._name,))
        source = Source(opening, (spec,), (file,), staged=lambda path: [reader])
        found = Dataset(Manifest.of_files(source))
        found.layouts, found.owned_in = {self._name: self._layout}, epoch
        return found


def _with_samples_cut(x: Slab, mesh: Mesh) -> Slab:
    """``x`` on ``mesh``; its samples, and nothing else, are cut along the sample axis, evenly.

    Other dims stay as they are cut, unless they are along that axis or on another mesh.
    """
    layout = x.layout
    if x.mesh.grid != mesh.grid:
        layout = recut_over(layout, mesh.grid, thin_ones_stay_whole=True)
    if any(split and split.axis == "sample" for split in layout.splits[1:]):
        layout = recut_over(Layout.unsplit(layout.shape), mesh.grid, thin_ones_stay_whole=True)
    num = mesh.grid.size("sample")
    first = Split("sample", cut_evenly(x.shape[0], num)) if num > 1 else None
    target = Layout(layout.shape, (first, *layout.splits[1:]))
    if x.mesh.grid != mesh.grid:
        return move(x, mesh, target)
    return recut(x, target)


class _Pieces(ArrayReader):
    """What this rank holds of every sample; each is read once, by the store that then keeps it."""

    def __init__(self, pieces: dict[int, NDArray[Any]], spec: ArraySpec, num_samples: int) -> None:
        self._pieces, self._name = pieces, spec.name
        self.shape, self.dtype = (num_samples, *spec.shape), spec.dtype
        self.axes = f"N{spec.axes.letters}"

    def read(self, box: Box, out: NDArray[Any]) -> None:
        piece = self._pieces.pop(box.spans[0].start, None)
        if piece is None or piece.shape != out.shape[1:]:
            raise FormatError(
                f"this rank does not hold it: {self._name} must fit into the store; raise "
                "data.memory_budget, or name a folder with room in data.spill_dir"
            )
        out[0] = piece

    def storage(self) -> Storage:
        return Storage(kind="memory", nbytes=sum(each.nbytes for each in self._pieces.values()))
