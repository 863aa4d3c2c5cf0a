"""Zarr arrays of both versions, with many codecs, to be damaged."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import zarr
from numpy.typing import NDArray
from zarr import codecs

from hyperslab.testing.fuzz_readers import Specimen
from hyperslab.testing.specimens import numbered

CHUNKS = (3, 12, 8, 9)
DOCUMENTS = (".zarray", ".zattrs", "zarr.json")
SUMMED = ("zlib", "bz2", "lzma", "crc", "shards")
"""Words in the labels of those whose chunks have sums."""


def specimens() -> list[Specimen]:
    array = numbered((5, 12, 14, 9), "int16")
    return [
        Specimen(
            label=label,
            write=partial(_write, array=array, how=how),
            array=array,
            marks=(b'"shape"', b'"chunk', b'"codecs"', b'"compressor"'),
            guarded=_guarded if any(word in label for word in SUMMED) else None,
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


def _write(folder: Path, array: NDArray[Any], how: dict[str, Any]) -> Path:
    path = folder / "array.zarr"
    created = zarr.create_array(
        path, shape=array.shape, dtype=array.dtype, chunks=CHUNKS, fill_value=0, **how
    )
    created[...] = array
    return path


def _guarded(path: Path) -> Iterable[range]:
    return [] if path.name in DOCUMENTS else [range(path.stat().st_size)]
