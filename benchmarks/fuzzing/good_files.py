"""Good files of every format in many layouts, to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
from fuzzing.tfrecords import Value, write_records
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from hyperslab.testing.specimens import numbered


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A good file, to be damaged."""

    label: str
    write: Callable[[Path], Path]
    """Writes it into an empty folder, and says what to open: a file or a folder."""
    array: NDArray[Any]
    """What is to be read of it."""
    name: str | None = None
    """Of the array, where the file has several."""
    options: dict[str, Any] = field(default_factory=dict)
    """To open it with."""
    marks: Sequence[bytes] = ()
    """Byte strings near which the metadata lies."""
    guarded: Callable[[Path], Iterable[range]] | None = None
    """The bytes of one of its files that a checksum guards, of those that reading must check."""
    is_length_guarded: bool = False
    """Whether bytes that were cut out or put in must be noticed too."""


def _all_bytes(path: Path) -> list[range]:
    return [range(path.stat().st_size)]


# HDF5

HDF5_MARKS = (
    *(b"\x89HDF", b"OHDR", b"OCHK", b"TREE", b"SNOD", b"HEAP", b"GCOL"),
    *(b"FAHD", b"FADB", b"EAHD", b"EAIB", b"EASB", b"EADB", b"BTHD", b"BTIN", b"BTLF"),
    *(b"FRHP", b"FHDB", b"FHIB", b"FSHD", b"FSSE"),
)
HDF5_SHAPE = (5, 12, 14, 9)
HDF5_CHUNKS = (2, 8, 8, 9)


def hdf5() -> list[Specimen]:
    # No word of it is 0, which Fletcher's checksum cannot tell from 0xffff.
    array = numbered(HDF5_SHAPE, "int16") + np.int16(1)
    gzip = {"chunks": HDF5_CHUNKS, "compression": "gzip", "shuffle": True}
    layouts: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "chunked": {"chunks": HDF5_CHUNKS},
        "resizable": {"chunks": HDF5_CHUNKS, "maxshape": (None, *HDF5_SHAPE[1:])},
        "resizable in 2 dims": {"chunks": HDF5_CHUNKS, "maxshape": (None, None, *HDF5_SHAPE[2:])},
        "gzip": gzip,
        "fletcher32": {"chunks": HDF5_CHUNKS, "fletcher32": True},
        "gzip + fletcher32": {**gzip, "fletcher32": True, "maxshape": (None, *HDF5_SHAPE[1:])},
        "lzf": {"chunks": HDF5_CHUNKS, "compression": "lzf"},
        "lz4": {"chunks": HDF5_CHUNKS, **hdf5plugin.LZ4(nbytes=500)},
        "bitshuffle": {"chunks": HDF5_CHUNKS, **hdf5plugin.Bitshuffle()},
        "bitshuffle + zstd": {"chunks": HDF5_CHUNKS, **hdf5plugin.Bitshuffle(cname="zstd")},
        "blosc": {"chunks": HDF5_CHUNKS, **hdf5plugin.Blosc()},
        "blosc2": {"chunks": HDF5_CHUNKS, **hdf5plugin.Blosc2()},
        "zstd": {"chunks": HDF5_CHUNKS, **hdf5plugin.Zstd()},
        "bzip2": {"chunks": HDF5_CHUNKS, **hdf5plugin.BZip2()},
        "by the library": {"chunks": HDF5_CHUNKS, "scaleoffset": 0},
    }
    return [
        Specimen(
            label=f"{label}, {libver}",
            write=partial(_write_hdf5, array=array, libver=libver, how=how),
            array=array,
            name="group/x",
            marks=HDF5_MARKS,
            guarded=partial(_guarded_hdf5, libver=libver),
        )
        for libver in ("earliest", "latest")
        for label, how in layouts.items()
    ]


def _write_hdf5(folder: Path, array: Any, libver: str, how: dict[str, Any]) -> Path:
    path = folder / "array.h5"
    with h5py.File(path, "w", libver=libver) as file:
        file["other"] = np.arange(3)
        dataset = file.create_dataset("group/x", data=array, **how)
        dataset.attrs["unit"] = "counts"
    return path


def _guarded_hdf5(path: Path, libver: str) -> Iterable[range]:
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


# NIfTI: both versions, plain and compressed

NIFTI_NAMES = {
    "Nifti1Image": ("array.nii", "array.nii.gz"),
    "Nifti2Image": ("array.nii", "array.nii.gz"),
    "Nifti1Pair": ("array.img",),
}


def nifti() -> list[Specimen]:
    array = numbered((9, 12, 14, 3), "int16")
    return [
        Specimen(
            label=f"{kind}, {order} {Path(name).suffix}",
            write=partial(_write_nifti, array=array, kind=kind, name=name, order=order),
            array=array,
            marks=(b"n+1", b"n+2", b"\x1f\x8b"),
            guarded=_all_bytes if name.endswith(".gz") else None,
            is_length_guarded=name.endswith(".gz"),
        )
        for kind, names in NIFTI_NAMES.items()
        for name in names
        for order in ("<", ">")
    ]


def _write_nifti(folder: Path, array: NDArray[Any], kind: str, name: str, order: str) -> Path:
    import nibabel

    cls = getattr(nibabel, kind)
    header = cls.header_class(endianness=order)
    header.set_data_dtype(np.dtype(order + "i2"))
    nibabel.save(cls(array, np.eye(4), header), folder / name)
    return folder / name


# NPY


def npy() -> list[Specimen]:
    array = numbered((5, 12, 14, 9), "int16")
    layouts = {
        "C order": array,
        "Fortran order": np.asfortranarray(array),
        "big-endian": array.astype(">i2"),
    }
    return [
        Specimen(
            label=f"{label}, version {version}",
            write=partial(_write_npy, stored=stored, version=version),
            array=array,
            marks=(b"'descr'", b"'shape'"),
        )
        for label, stored in layouts.items()
        for version in (1, 2)
    ]


def _write_npy(folder: Path, stored: NDArray[Any], version: int) -> Path:
    path = folder / "array.npy"
    with path.open("wb") as file:
        npy_format.write_array(file, stored, (version, 0))
    return path


# TFRecord, plain and compressed

TFRECORD_ARRAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bytes": (
        numbered((6, 9, 8, 4), "int16"),
        {"shape": {"x": (9, 8, 4)}, "dtype": {"x": "int16"}},
    ),
    "floats": (numbered((6, 50), "float32"), {}),
    "ints": (numbered((6, 50), "int64") - 99, {}),
}
"""What is in feature ``x``, and how it is opened."""


def tfrecord() -> list[Specimen]:
    return [
        Specimen(
            label=f"{label}, {'packed' if packed else 'unpacked'}{', gzip' if gz else ''}"
            f"{'' if verify else ', unverified'}",
            write=partial(_write_tfrecord, label=label, packed=packed, gz=gz),
            array=array,
            name="x",
            options={**options, "verify": verify},
            marks=(b"\x01x", b"\x01y"),
            guarded=_all_bytes if verify or gz else None,  # lengths and records have sums
            is_length_guarded=gz,  # a plain file may be cut between two records
        )
        for label, (array, options) in TFRECORD_ARRAYS.items()
        for packed in (True, False)
        for gz in (True, False)
        for verify in (True, False)
    ]


def _write_tfrecord(folder: Path, label: str, packed: bool, gz: bool) -> Path:
    array, _ = TFRECORD_ARRAYS[label]
    rows: list[dict[str, Value]] = [
        {"x": one.tobytes() if label == "bytes" else one, "y": np.ones(4, np.float32)}
        for one in array
    ]
    return write_records(folder / "array.tfrecord", rows, packed=packed, gz=gz)


# Zarr: both versions, with many codecs

ZARR_CHUNKS = (3, 12, 8, 9)
ZARR_DOCUMENTS = (".zarray", ".zattrs", "zarr.json")
ZARR_SUMMED = ("zlib", "bz2", "lzma", "crc", "shards")
"""Words in the labels of those whose chunks have sums."""


def zarr_arrays() -> list[Specimen]:
    array = numbered((5, 12, 14, 9), "int16")
    return [
        Specimen(
            label=label,
            write=partial(_write_zarr, array=array, how=how),
            array=array,
            marks=(b'"shape"', b'"chunk', b'"codecs"', b'"compressor"'),
            guarded=_guarded_zarr if any(word in label for word in ZARR_SUMMED) else None,
        )
        for label, how in {**_version_2(), **_version_3()}.items()
    ]


def _version_2() -> dict[str, dict[str, Any]]:
    compressors = {
        "raw": None,
        "blosc lz4": numcodecs.Blosc("lz4"),
        "blosc zstd": numcodecs.Blosc("zstd", shuffle=2),
        "blosc blosclz": numcodecs.Blosc("blosclz", clevel=9),
        "zlib": numcodecs.Zlib(),
        "bz2": numcodecs.BZ2(),
        "lzma": numcodecs.LZMA(),
        "lz4": numcodecs.LZ4(),
        "zstd": numcodecs.Zstd(),
    }
    filters = {
        "delta, crc32": [numcodecs.Delta("<i2"), numcodecs.CRC32()],
        "scale, shuffle": [
            numcodecs.FixedScaleOffset(0, 1, "<i2", "<i4"),
            numcodecs.Shuffle(4),
        ],
    }
    return {
        **{f"v2 {key}": {"zarr_format": 2, "compressors": c} for key, c in compressors.items()},
        **{f"v2 {key}": {"zarr_format": 2, "filters": f} for key, f in filters.items()},
        "v2 Fortran": {"zarr_format": 2, "order": "F"},
    }


def _version_3() -> dict[str, dict[str, Any]]:
    from zarr import codecs

    inner: list[Any] = [codecs.BytesCodec(), codecs.ZstdCodec(), codecs.Crc32cCodec()]
    shards = {
        f"v3 shards, index at the {place}": {
            "serializer": codecs.ShardingCodec(
                chunk_shape=(3, 6, 4, 9), codecs=inner, index_location=place
            ),
            "compressors": None,
        }
        for place in ("start", "end")
    }
    return {
        "v3 raw": {"compressors": None},
        "v3 zstd": {},
        "v3 blosc": {"compressors": [codecs.BloscCodec()]},
        "v3 transposed, gzip, crc32c": {
            "filters": [codecs.TransposeCodec(order=(2, 0, 3, 1))],
            "compressors": [codecs.GzipCodec(), codecs.Crc32cCodec()],
        },
        **shards,
    }


def _write_zarr(folder: Path, array: NDArray[Any], how: dict[str, Any]) -> Path:
    import zarr

    path = folder / "array.zarr"
    created = zarr.create_array(
        path, shape=array.shape, dtype=array.dtype, chunks=ZARR_CHUNKS, fill_value=0, **how
    )
    created[...] = array
    return path


def _guarded_zarr(path: Path) -> Iterable[range]:
    return [] if path.name in ZARR_DOCUMENTS else _all_bytes(path)
