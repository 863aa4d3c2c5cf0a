"""Memory that files are read into."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def empty_aligned(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An array whose memory begins on a page, as the kernel copies fastest into such."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + nbytes].view(dtype).reshape(shape)
