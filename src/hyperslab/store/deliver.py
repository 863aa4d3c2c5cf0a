"""Boxes in host memory become Slabs on the mesh's device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperslab.comm.device_spans import launched
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError, ConfigError, FormatError
from hyperslab.io import ArraySpec
from hyperslab.layout import Layout, Span
from hyperslab.nn.slab import Slab
from hyperslab.store.augment import Symmetry
from hyperslab.store.batches import LocalBatch, Rows
from hyperslab.store.normalize import Normalize, Values
from hyperslab.store.placement import Placement
from hyperslab.trace import Category

_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Not every torch mirrors unsigned numbers on a GPU."""


@dataclass(frozen=True)
class ReadyRows:
    """``memory`` is that of ``rows``, on the device."""

    rows: Rows
    memory: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def as_read(self) -> Tensor:
        """(samples, channels, ...), of which none is to be turned; its memory is the file's."""
        assert not self.rows.turns
        return self._laid_out(self.memory, self.rows.shape)

    def converted(self, dtype: torch.dtype, owned: bool = False) -> Tensor:
        """(samples, channels, ...) in ``dtype``, in that order in memory too; a copy if ``owned``.

        What is to be turned is. That takes one pass, and another over samples that are mirrored.
        """
        if not self.rows.turns and dtype == self.dtype and not owned:
            boxes = self.as_read()
            if boxes.is_contiguous():
                return boxes
        shape = (len(self.memory), *self.rows.shape)
        out = torch.empty(shape, dtype=dtype, device=self.memory.device)
        if not self.rows.turns:
            return out.copy_(self.as_read())
        for row, turn in enumerate(self.rows.turns):
            out[row].copy_(turned(self._source(row), turn))
        return out

    def _source(self, row: int) -> Tensor:
        """The box of a sample as it was read, channels first."""
        shape = self.rows.turns[row].source_shape(self.rows.shape)
        return self._laid_out(self.memory[row : row + 1], shape)[0]

    def _laid_out(self, memory: Tensor, shape: Sequence[int]) -> Tensor:
        axes = self.rows.spec.axes
        in_file = memory.reshape(len(memory), *axes.in_file_order(shape))
        return in_file.permute(0, *(1 + dim for dim in axes.order))


def turned(source: Tensor, turn: Symmetry) -> Tensor:
    """The box of the result that ``source`` becomes: a view, or a copy where it is mirrored."""
    box = source.permute(turn.forth(source.ndim))
    mirrored = turn.mirrored(source.ndim)
    if not mirrored:
        return box
    return box.view(_MOVED_AS.get(box.dtype, box.dtype)).flip(mirrored).view(box.dtype)


class SlabDelivery:
    """Copies, turns, converts, normalizes; on a GPU on a stream of its own, ahead of the step."""

    def __init__(
        self,
        mesh: Mesh,
        placement: Placement,
        normalize: Normalize,
        stats: str | None,
        dtype: torch.dtype | None,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype must be a torch.dtype, such as torch.float32, got {dtype!r}")
        if dtype is not None and not normalize.is_nothing and not dtype.is_floating_point:
            raise ConfigError(f"values are normalized to fractions, which {dtype} cannot hold")
        self._mesh, self._placement = mesh, placement
        self._normalize, self._stats, self._dtype = normalize, stats, dtype
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._copying: deque[tuple[torch.cuda.Event, LocalBatch]] = deque()

    @property
    def turns(self) -> bool:
        """On a GPU, at the speed of its memory; without one the copy into the batch does it."""
        return self._stream is not None

    def __call__(self, local: LocalBatch) -> dict[str, Slab]:
        """Called by the loader's thread."""
        nbytes = sum(rows.memory.nbytes for rows in local.rows.values())
        span = launched("gpu copy", Category.copy, "batch", self._mesh.device, nbytes)
        if self._stream is None:
            with span:
                return self._slabs(local)
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        with torch.cuda.stream(self._stream):
            with span:
                slabs = self._slabs(local)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copying.append((event, local))  # its buffers stay until they have been copied
        return slabs

    def hand_over(self, slabs: dict[str, Slab]) -> dict[str, Slab]:
        """Called by the thread that uses them, whose stream waits for the copies."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._mesh.device)
            current.wait_stream(self._stream)
            for slab in slabs.values():
                slab.local.record_stream(current)
        return slabs

    def _slabs(self, local: LocalBatch) -> dict[str, Slab]:
        sample = next(iter(self._placement.arrays))
        for name, rows in local.rows.items():
            _check_range(name, rows.memory)
        on_device = {name: self._moved(rows) for name, rows in local.rows.items()}
        stats = on_device.pop(self._stats).as_read() if self._stats else None
        return {
            name: self._slab(
                local, name, self._sample(x, stats) if name == sample else self._target(x)
            )
            for name, x in on_device.items()
        }

    def _moved(self, rows: Rows) -> ReadyRows:
        memory = torch.from_numpy(rows.memory)
        if self._stream is not None:
            memory = memory.to(self._mesh.device, non_blocking=True)
        return ReadyRows(rows, memory)

    def _sample(self, x: ReadyRows, stats: Tensor | None) -> Tensor:
        dtype = self._dtype or (x.dtype if x.dtype.is_complex else torch.get_default_dtype())
        if self._normalize.is_nothing:
            return x.converted(dtype)
        exact = _exact(torch.promote_types(dtype, torch.float32), x.dtype)
        y = x.converted(exact, owned=True)
        return normalized(y, self._normalize, stats, self._channels).to(dtype)

    @property
    def _channels(self) -> Span | None:
        """Of a sample, those that this rank holds; None if it has none."""
        if "C" not in self._spec.axes.letters:
            return None
        return self._placement.box(self._spec.name).spans[0]

    def _target(self, x: ReadyRows) -> Tensor:
        """Whole numbers as torch's losses want them, others in float32 or the sample's float64."""
        if x.dtype.is_floating_point:
            model = self._dtype or torch.get_default_dtype()
            return x.converted(torch.promote_types(model, torch.float32))
        keeps = x.dtype.is_complex or x.dtype == torch.bool
        return x.converted(x.dtype if keeps else torch.int64)

    @property
    def _spec(self) -> ArraySpec:
        return next(iter(self._placement.arrays.values()))

    def _slab(self, local: LocalBatch, name: str, x: Tensor) -> Slab:
        layout = self._placement.batch_layout(name, local.sizes)
        if name == self._spec.name and "C" not in self._spec.axes.letters:
            x = x.unsqueeze(1)
            layout = Layout(
                (layout.shape[0], 1, *layout.shape[1:]),
                (layout.splits[0], None, *layout.splits[1:]),
            )
        return Slab(x, layout, self._mesh)


def normalized(
    x: Tensor, how: Normalize, stats: Tensor | None, channels: Span | None = None
) -> Tensor:
    """``x`` (samples, channels, ...) changed in place; ``stats`` (samples, channels, columns).

    ``x`` has these ``channels`` of a sample, all others have those of the whole.
    """
    shape = [1, x.shape[1], *[1] * (x.ndim - 2)] if channels else [1] * x.ndim
    held = slice(channels.start, channels.stop) if channels else slice(None)

    def by_channel(values: Values) -> Tensor | float:
        if isinstance(values, int | float):
            return float(values)
        return torch.tensor(list(values)[held], dtype=x.dtype, device=x.device).reshape(shape)

    if how.from_file:
        assert stats is not None
        stats = stats[:, held]
        low, high, mean, std = (
            stats[:, :, min(column, stats.shape[2] - 1)].to(x.dtype).reshape(len(x), *shape[1:])
            for column in range(4)
        )
        shift, width = (low, high - low) if how.from_file == "minmax" else (mean, std)
        x.sub_(shift).div_(torch.where(width == 0, torch.ones_like(width), width))
    if how.scale != 1.0:
        x.mul_(by_channel(how.scale))
    if how.log1p:
        x.log1p_()
    if how.mean != 0.0:
        x.sub_(by_channel(how.mean))
    if how.std != 1.0:
        x.div_(by_channel(how.std))
    return x


def _check_range(name: str, array: NDArray[Any]) -> None:
    """Raises for numbers that torch's largest whole numbers cannot hold."""
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise FormatError(
            f"array {name!r} has a value of {array.max()}, and torch's whole numbers end at 2**63"
        )


def _exact(dtype: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """``dtype``, or float64 where that cannot hold what a file can: an offset may be subtracted."""
    has_more = stored == torch.float64 or (not stored.is_floating_point and stored.itemsize > 2)
    return torch.float64 if has_more and not stored.is_complex else dtype


def pin(memory: NDArray[np.uint8]) -> None:
    """Locks a buffer into memory, so that a GPU reads it by itself."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if code:
        raise CommError(f"{memory.nbytes} bytes cannot be pinned for the GPU (CUDA error {code})")


def unpin(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
