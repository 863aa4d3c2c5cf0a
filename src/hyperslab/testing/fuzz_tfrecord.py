"""TFRecord files, plain and compressed, to be damaged."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.testing.fuzz_readers import Specimen
from hyperslab.testing.specimens import numbered
from hyperslab.testing.tfrecords import Value, write_records

ARRAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bytes": (
        numbered((6, 9, 8, 4), "int16"),
        {"shape": {"x": (9, 8, 4)}, "dtype": {"x": "int16"}},
    ),
    "floats": (numbered((6, 50), "float32"), {}),
    "ints": (numbered((6, 50), "int64") - 99, {}),
}
"""What is in feature ``x``, and how it is opened."""


def specimens() -> list[Specimen]:
    return [
        Specimen(
            label=f"{label}, {'packed' if packed else 'unpacked'}{', gzip' if gz else ''}"
            f"{'' if verify else ', unverified'}",
            write=partial(_write, label=label, packed=packed, gz=gz),
            array=array,
            name="x",
            options={**options, "verify": verify},
            marks=(b"\x01x", b"\x01y"),
            guarded=_guarded if verify or gz else None,
            is_length_guarded=gz,  # a plain file may be cut between two records
        )
        for label, (array, options) in ARRAYS.items()
        for packed in (True, False)
        for gz in (True, False)
        for verify in (True, False)
    ]


def _write(folder: Path, label: str, packed: bool, gz: bool) -> Path:
    array, _ = ARRAYS[label]
    rows: list[dict[str, Value]] = [
        {"x": one.tobytes() if label == "bytes" else one, "y": np.ones(4, np.float32)}
        for one in array
    ]
    return write_records(folder / "array.tfrecord", rows, packed=packed, gz=gz)


def _guarded(path: Path) -> Iterable[range]:
    """Lengths and records all have sums."""
    return [range(path.stat().st_size)]
