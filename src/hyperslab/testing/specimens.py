"""Arrays, boxes, buffers and damaged files, for tests of readers."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.typing import NDArray

from hyperslab.io import ArrayReader
from hyperslab.layout import Box, Span

UNTOUCHED = 0xA5
"""The byte around and between the items of a buffer."""


def read(reader: ArrayReader, box: Box | None = None) -> NDArray[Any]:
    """``box`` of the array, or all of it, in a new buffer."""
    box = Box.whole(reader.shape) if box is None else box
    out = np.full(box.shape, 77, reader.dtype)
    reader.read(box, out)
    return out


def numbered(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """An array in which hardly two neighbours are alike, and runs repeat, as compressors like."""
    count = np.arange(math.prod(shape))
    values: NDArray[Any] = ((count * 7 + count // 13) % 251).astype(dtype)
    return values.reshape(shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box.spans)


def boxes(shape: Sequence[int]) -> SearchStrategy[Box]:
    """Boxes of an array of ``shape``, empty ones included."""
    spans = [
        st.one_of(
            st.just(Span(0, extent)),
            st.tuples(st.integers(0, extent), st.integers(0, extent)).map(
                lambda pair: Span(min(pair), max(pair))
            ),
        )
        for extent in shape
    ]
    return st.tuples(*spans).map(Box)


def random_boxes(shape: Sequence[int], num: int) -> list[Box]:
    dice = random.Random(num)

    def spans() -> Iterator[Span]:
        for extent in shape:
            start = dice.randrange(extent)
            yield dice.choice([Span(0, extent), Span(start, dice.randint(start + 1, extent))])

    return [Box(tuple(spans())) for _ in range(num)]


@st.composite
def buffers(
    draw: DrawFn, shape: Sequence[int], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """A buffer with dims in any order, gaps, backward dims, any alignment; and all bytes of it."""
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 2, -1, -3]) for _ in shape]))
    shift = draw(st.integers(0, 20))
    extents = [shape[dim] * abs(steps[dim]) for dim in order]
    nbytes = math.prod(extents) * dtype.itemsize
    around = np.full(nbytes + 40, UNTOUCHED, np.uint8)
    spread = around[shift : shift + nbytes].view(dtype).reshape(extents)
    out = spread[tuple(slice(None, None, steps[dim]) for dim in order)]
    return out.transpose(np.argsort(order)), around


def truncations(size: int) -> list[int]:
    """Lengths to cut a file of ``size`` bytes to: all kinds of places in it."""
    near_ends = {0, 1, 7, 8, 64, size // 2, size - 1, size - 2, size - 8, size - 64}
    spread = set(range(0, size, max(1, size // 24)))
    return sorted(cut for cut in near_ends | spread if 0 <= cut < size)


def damaged(content: bytes, dice: random.Random) -> bytes:
    """``content`` with a few bytes changed, cut out, or put in."""
    found = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 8])):
        place = dice.randrange(max(1, min(len(found), dice.choice([128, 1024, len(found) or 1]))))
        kind = dice.choice(["change", "change", "flip", "cut", "put"])
        if kind == "put":
            found[place:place] = dice.randbytes(dice.randint(1, 9))
        elif kind == "cut":
            del found[place : place + dice.randint(1, 9)]
        elif place < len(found):
            found[place] = dice.choice([0, 255, 128]) if kind == "change" else found[place] ^ 1
    return bytes(found)


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """The file ``path`` with another content, for a while."""
    whole = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(whole)


def copy_of(path: Path, name: str) -> Path:
    copied = path.with_name(name)
    if path.is_dir():
        shutil.copytree(path, copied)
    else:
        shutil.copy(path, copied)
    return copied


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
