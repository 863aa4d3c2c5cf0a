"""NIfTI files of both versions, plain and compressed, to be damaged."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray

from hyperslab.testing.fuzz_readers import Specimen
from hyperslab.testing.specimens import numbered

NAMES = {
    "Nifti1Image": ("array.nii", "array.nii.gz"),
    "Nifti2Image": ("array.nii", "array.nii.gz"),
    "Nifti1Pair": ("array.img",),
}


def specimens() -> list[Specimen]:
    array = numbered((9, 12, 14, 3), "int16")
    return [
        Specimen(
            label=f"{kind}, {order} {Path(name).suffix}",
            write=partial(_write, array=array, kind=kind, name=name, order=order),
            array=array,
            marks=(b"n+1", b"n+2", b"\x1f\x8b"),
            guarded=_guarded,
            is_length_guarded=name.endswith(".gz"),
        )
        for kind, names in NAMES.items()
        for name in names
        for order in ("<", ">")
    ]


def _write(folder: Path, array: NDArray[Any], kind: str, name: str, order: str) -> Path:
    cls = getattr(nibabel, kind)
    header = cls.header_class(endianness=order)
    header.set_data_dtype(np.dtype(order + "i2"))
    nibabel.save(cls(array, np.eye(4), header), folder / name)
    return folder / name


def _guarded(path: Path) -> Iterable[range]:
    """All that gzip has summed."""
    return [range(path.stat().st_size)] if path.suffix == ".gz" else []
