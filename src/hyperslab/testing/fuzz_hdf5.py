"""HDF5 files of many layouts, to be damaged."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np

from hyperslab.testing.fuzz_readers import Specimen
from hyperslab.testing.specimens import numbered

MARKS = (
    *(b"\x89HDF", b"OHDR", b"OCHK", b"TREE", b"SNOD", b"HEAP", b"GCOL"),
    *(b"FAHD", b"FADB", b"EAHD", b"EAIB", b"EASB", b"EADB", b"BTHD", b"BTIN", b"BTLF"),
    *(b"FRHP", b"FHDB", b"FHIB", b"FSHD", b"FSSE"),
)
SHAPE = (5, 12, 14, 9)
CHUNKS = (2, 8, 8, 9)


def specimens() -> list[Specimen]:
    # No word of it is 0, which Fletcher's checksum cannot tell from 0xffff.
    array = numbered(SHAPE, "int16") + np.int16(1)
    gzip = {"chunks": CHUNKS, "compression": "gzip", "shuffle": True}
    layouts: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "chunked": {"chunks": CHUNKS},
        "resizable": {"chunks": CHUNKS, "maxshape": (None, *SHAPE[1:])},
        "resizable in 2 dims": {"chunks": CHUNKS, "maxshape": (None, None, *SHAPE[2:])},
        "gzip": gzip,
        "fletcher32": {"chunks": CHUNKS, "fletcher32": True},
        "gzip + fletcher32": {**gzip, "fletcher32": True, "maxshape": (None, *SHAPE[1:])},
        "lzf": {"chunks": CHUNKS, "compression": "lzf"},
        "lz4": {"chunks": CHUNKS, **hdf5plugin.LZ4(nbytes=500)},
        "bitshuffle": {"chunks": CHUNKS, **hdf5plugin.Bitshuffle()},
        "bitshuffle + zstd": {"chunks": CHUNKS, **hdf5plugin.Bitshuffle(cname="zstd")},
        "blosc": {"chunks": CHUNKS, **hdf5plugin.Blosc()},
        "blosc2": {"chunks": CHUNKS, **hdf5plugin.Blosc2()},
        "zstd": {"chunks": CHUNKS, **hdf5plugin.Zstd()},
        "bzip2": {"chunks": CHUNKS, **hdf5plugin.BZip2()},
        "by the library": {"chunks": CHUNKS, "scaleoffset": 0},
    }
    return [
        Specimen(
            label=f"{label}, {libver}",
            write=partial(_write, array=array, libver=libver, how=how),
            array=array,
            name="group/x",
            marks=MARKS,
            guarded=partial(_guarded, libver=libver),
        )
        for libver in ("earliest", "latest")
        for label, how in layouts.items()
    ]


def _write(folder: Path, array: Any, libver: str, how: dict[str, Any]) -> Path:
    path = folder / "array.h5"
    with h5py.File(path, "w", libver=libver) as file:
        file["other"] = np.arange(3)
        dataset = file.create_dataset("group/x", data=array, **how)
        dataset.attrs["unit"] = "counts"
    return path


def _guarded(path: Path, libver: str) -> Iterable[range]:
    """The chunks with a Fletcher32 checksum.

    That of gzip is not counted: a changed byte may make data with the same (1 of 20,000 did).
    """
    with h5py.File(path, "r") as file:
        dataset = file["group/x"]
        if not dataset.fletcher32:
            return
        chunks: list[Any] = []
        dataset.id.chunk_iter(chunks.append)
    for chunk in chunks:
        yield range(chunk.byte_offset, chunk.byte_offset + chunk.size)
    if libver == "latest":  # where metadata has checksums as well: all before and after the chunks
        yield range(min(c.byte_offset for c in chunks))
        yield range(max(c.byte_offset + c.size for c in chunks), path.stat().st_size)
