"""NPY files, to be damaged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from hyperslab.testing.fuzz_readers import Specimen
from hyperslab.testing.specimens import numbered


def specimens() -> list[Specimen]:
    array = numbered((5, 12, 14, 9), "int16")
    layouts = {
        "C order": array,
        "Fortran order": np.asfortranarray(array),
        "big-endian": array.astype(">i2"),
    }
    return [
        Specimen(
            label=f"{label}, version {version}",
            write=partial(_write, stored=stored, version=version),
            array=array,
            marks=(b"'descr'", b"'shape'"),
        )
        for label, stored in layouts.items()
        for version in (1, 2)
    ]


def _write(folder: Path, stored: NDArray[Any], version: int) -> Path:
    path = folder / "array.npy"
    with path.open("wb") as file:
        npy_format.write_array(file, stored, (version, 0))
    return path
