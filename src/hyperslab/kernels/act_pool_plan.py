"""How the kernels of activation and pool cut their work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from hyperslab.kernels.fused import power_of_two

Triple = tuple[int, int, int]


class Tuning(NamedTuple):
    """What a benchmark may vary."""

    row_bytes: int = 2048
    """Of a block, along a row."""
    rows: int = 2
    """Of outputs, that a program of the forward pass holds at once."""
    planes: int = 16
    """Of outputs, that a program of the forward pass goes down."""
    warps: int = 4
    registers: int | None = None
    """That a thread may have; None leaves it to the compiler."""


TUNING = {
    ("avg", "forward"): Tuning(),
    ("avg", "backward"): Tuning(),
    ("max", "forward"): Tuning(),
    ("max", "backward"): Tuning(),
}
PROGRAMS = 1024
"""That keep a device busy: with fewer, each goes down fewer planes."""
BYTE = 8


class Pool(NamedTuple):
    """An average or maximum pool over two or three dims, with torch's arguments."""

    mode: Literal["avg", "max"]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    count_include_pad: bool = True
    extra: tuple[int, ...] = ()
    """By how much padding at the end of each dim is more, or less, than at its start."""

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the pool of a tensor of ``shape``."""
        extra = self.extra or (0,) * len(self.kernel)
        dims = zip(shape[2:], self.kernel, self.stride, self.padding, extra, strict=True)
        return (*shape[:2], *[1 + (n + 2 * p + more - k) // s for n, k, s, p, more in dims])


class Rows(NamedTuple):
    """A pool as its kernels see it: three dims, the last of them cells of ``channels`` numbers.

    A 2-d pool goes down its height as a 3-d one down its depth.
    """

    samples: int
    channels: int
    extent: Triple
    outputs: Triple
    kernel: Triple
    stride: Triple
    padding: Triple

    @property
    def bits(self) -> int:
        """How many bits the signs of a cell take: bytes begin where blocks of channels do."""
        if self.channels < BYTE:
            return power_of_two(self.channels)
        return math.ceil(self.channels / BYTE) * BYTE

    @property
    def sign_bytes(self) -> int:
        depth, height, width = self.extent
        return self.samples * depth * height * math.ceil(width * self.bits / BYTE)

    @property
    def owners(self) -> Triple:
        """Outputs, or more: each owns a stride of y, and what windows hold must have an owner.

        An output's stride begins where its window does, or later, so that it begins at y's first.
        """
        dims = zip(self.extent, self.outputs, self.kernel, self.stride, self.padding, strict=True)
        depth, height, width = (
            max(out, math.ceil((min(n, (out - 1) * step - pad + k) + pad - first) / step))
            for n, out, k, step, pad in dims
            for first in [min(pad, max(k - step, 0))]
        )
        return depth, height, width


@lru_cache(maxsize=1024)
def rows_of(shape: torch.Size, memory_format: torch.memory_format, pool: Pool) -> Rows:
    """The rows of a tensor and the pool over them."""
    samples, channels, *extent = shape
    if memory_format is torch.contiguous_format:
        samples, channels = samples * channels, 1
    outputs = pool.output_shape(shape)[2:]
    return Rows(
        samples, channels, _three(extent, 1), _three(outputs, 1),
        _three(pool.kernel, 1), _three(pool.stride, 1), _three(pool.padding, 0),
    )  # fmt: skip


class Cut(NamedTuple):
    """The grid of a kernel and the block of each program."""

    chunks: int
    groups: int
    cols: int
    programs: int
    block: dict[str, int]
    options: dict[str, int]


def forward_cut(rows: Rows, itemsize: int, tuning: Tuning) -> Cut:
    """Programs that go down planes of outputs, each a few rows by some cells by some channels."""
    owners = rows.owners
    lanes, cols = _block(rows.channels, rows.outputs[2], tuning.row_bytes // itemsize)
    held = min(tuning.rows, power_of_two(rows.outputs[1]))
    groups, blocks = math.ceil(owners[1] / held), math.ceil(owners[2] / cols)
    at_once = rows.samples * groups * blocks * math.ceil(rows.channels / lanes)
    planes = min(tuning.planes, power_of_two(rows.outputs[0]))
    while planes > 1 and at_once * math.ceil(rows.outputs[0] / planes) < PROGRAMS:
        planes //= 2
    chunks = math.ceil(rows.outputs[0] / planes)
    block = {"chunk": planes, "rows": held, "cols": cols, "lanes": lanes}
    options = _options(lanes, cols, itemsize, tuning)
    return Cut(chunks, groups, blocks, at_once * chunks, block, options)


def backward_cut(rows: Rows, itemsize: int, tuning: Tuning) -> Cut:
    """Programs that write a stride of planes by a stride of rows by some cells by some channels."""
    lanes, cols = _block(rows.channels, rows.extent[2], tuning.row_bytes // itemsize)
    chunks, groups = (
        math.ceil((n + pad) / step)
        for n, step, pad in zip(rows.extent[:2], rows.stride[:2], rows.padding[:2], strict=True)
    )
    blocks = math.ceil(rows.extent[2] / cols)
    programs = rows.samples * chunks * groups * blocks * math.ceil(rows.channels / lanes)
    block = {"cols": cols, "lanes": lanes}
    options = _options(lanes, cols, itemsize, tuning)
    return Cut(chunks, groups, blocks, programs, block, options)


def _block(channels: int, width: int, numbers: int) -> tuple[int, int]:
    """Channels and cells of a block: whole sectors of memory, and few of them outside."""
    lanes = math.gcd(channels, 64) if channels % 16 == 0 else min(64, power_of_two(channels))
    cols = min(power_of_two(width), numbers // lanes)
    return lanes, max(cols, BYTE // lanes, 1)


def _options(lanes: int, cols: int, itemsize: int, tuning: Tuning) -> dict[str, int]:
    """Options of the Triton compiler. A thread gets 16 bytes of a cell, or two cells."""
    numbers = 16 // itemsize if lanes >= BYTE else 2
    warps = max(1, min(tuning.warps, lanes * cols // numbers // 32))
    return {"num_warps": warps} | ({"maxnreg": tuning.registers} if tuning.registers else {})


def _three(sizes: list[int] | tuple[int, ...], between: int) -> Triple:
    first, *middle, last = sizes
    return first, middle[0] if middle else between, last
