"""The metadata of version 3: ``zarr.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.formats.zarr.codecs import UnknownPart, step_v3
from hyperslab.io.formats.zarr.documents import Json
from hyperslab.io.formats.zarr.fill import fill_value
from hyperslab.io.formats.zarr.metadata import (
    ArrayMetadata,
    KeyEncoding,
    Sharding,
    axes_hint,
    check_size,
    extents,
)
from hyperslab.io.formats.zarr.pipeline import Pipeline

DTYPES = {
    "bool": "b1",
    **{f"int{8 * n}": f"i{n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"u{n}" for n in (1, 2, 4, 8)},
    **{f"float{8 * n}": f"f{n}" for n in (2, 4, 8)},
    **{f"complex{8 * n}": f"c{n}" for n in (8, 16)},
}
KEYS = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding"),
    *("codecs", "fill_value", "attributes", "dimension_names", "storage_transformers"),
}


class Part(NamedTuple):
    """A part of the metadata that has a name, and a configuration of its own."""

    name: str
    config: Json


def parse_v3(metadata: Json) -> ArrayMetadata:
    """What ``metadata`` says; raises ``UnknownPart`` for extensions that are not read here."""
    _check_keys(metadata)
    dtype = _dtype(metadata["data_type"])
    shape = extents(metadata["shape"], "shape", least=0)
    chunk_shape = _grid(_part(metadata["chunk_grid"]), len(shape))
    check_size(shape, dtype, "shape")
    check_size(chunk_shape, dtype, "chunk shape")
    codecs = _parts(metadata["codecs"])
    sharding = None
    if codecs and codecs[0].name == "sharding_indexed":
        if len(codecs) > 1:
            raise UnknownPart("codecs around shards")
        sharding = _sharding(codecs[0].config, chunk_shape)
        codecs = _parts(codecs[0].config["codecs"])
    pipeline = _pipeline(codecs, dtype, sharding.chunk_shape if sharding else chunk_shape)
    return ArrayMetadata(
        shape=shape,
        dtype=pipeline.dtype,
        chunk_shape=chunk_shape,
        keys=_keys(_part(metadata["chunk_key_encoding"])),
        fill_value=fill_value(metadata["fill_value"], dtype),
        pipeline=pipeline,
        sharding=sharding,
        axes=axes_hint(metadata.get("dimension_names"), len(shape)),
    )


def _check_keys(metadata: Json) -> None:
    for key in metadata.keys() - KEYS:
        value = metadata[key]
        if not isinstance(value, dict) or value.get("must_understand") is not False:
            raise UnknownPart(f"extension {key!r:.80}")
    if metadata.get("storage_transformers"):
        raise UnknownPart("storage transformers")


def _part(value: object) -> Part:
    if isinstance(value, str):
        return Part(value, {})
    if isinstance(value, dict):
        name, config = value.get("name"), value.get("configuration", {})
        if isinstance(name, str) and isinstance(config, dict):
            return Part(name, config)
    raise FormatError(f"damaged: it has {value!r:.80} where something with a name was expected")


def _parts(value: object) -> list[Part]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"damaged: its codecs are {value!r:.80}")
    return [_part(item) for item in value]


def _dtype(value: object) -> np.dtype[Any]:
    name = _part(value).name
    if name not in DTYPES:
        raise FormatError(f"values of type {name!r:.80} are not read: numbers are")
    return np.dtype(DTYPES[name])


def _grid(grid: Part, ndim: int) -> tuple[int, ...]:
    if grid.name != "regular":
        raise UnknownPart(f"chunk grid {grid.name!r:.80}")
    return extents(grid.config["chunk_shape"], "chunk shape", least=1, ndim=ndim)


def _keys(encoding: Part) -> KeyEncoding:
    if encoding.name not in ("default", "v2"):
        raise UnknownPart(f"chunk key encoding {encoding.name!r:.80}")
    is_default = encoding.name == "default"
    separator = encoding.config.get("separator", "/" if is_default else ".")
    if separator not in (".", "/"):
        raise FormatError(f"damaged: the separator of its chunk keys is {separator!r:.80}")
    return KeyEncoding("c" if is_default else "", separator)


def _pipeline(codecs: Sequence[Part], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Pipeline:
    """First come codecs from arrays to arrays, then the one to bytes, then those from bytes."""
    order = tuple(range(len(shape)))
    rest = list(codecs)
    while rest and rest[0].name == "transpose":
        permuted = _order(rest.pop(0).config["order"], len(shape))
        order = tuple(order[dim] for dim in permuted)
    if not rest or rest[0].name not in ("bytes", "endian"):
        raise UnknownPart(f"codec {rest[0].name if rest else None!r:.80}")
    stored = _with_endian(dtype, rest.pop(0).config)
    steps = tuple(step_v3(codec.name, codec.config) for codec in reversed(rest))
    return Pipeline(steps=steps, dtype=stored, chunk_shape=shape, order=order)


def _order(value: object, ndim: int) -> tuple[int, ...]:
    if value in ("C", "F"):
        return tuple(range(ndim)) if value == "C" else tuple(range(ndim))[::-1]
    order = extents(value, "order of dims", least=0, ndim=ndim)
    if sorted(order) != list(range(ndim)):
        raise FormatError(f"damaged: its dims are transposed to {order}")
    return order


def _with_endian(dtype: np.dtype[Any], config: Json) -> np.dtype[Any]:
    endian = config.get("endian")
    if endian not in ("little", "big") and not (endian is None and dtype.itemsize == 1):
        raise FormatError(f"damaged: its values have the byte order {endian!r:.80}")
    return dtype.newbyteorder(">" if endian == "big" else "<")


def _sharding(config: Json, shard_shape: tuple[int, ...]) -> Sharding:
    chunk_shape = extents(config["chunk_shape"], "chunk shape", least=1, ndim=len(shard_shape))
    if any(shard % chunk for shard, chunk in zip(shard_shape, chunk_shape, strict=True)):
        raise FormatError(
            f"damaged: its shards of {shard_shape} are no whole number of chunks of {chunk_shape}"
        )
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise FormatError(f"damaged: the index of its shards is at the {location!r:.80}")
    codecs = _parts(config["index_codecs"])
    if [codec.name for codec in codecs[1:]] not in ([], ["crc32c"]) or codecs[0].name != "bytes":
        raise UnknownPart(f"codecs {[codec.name for codec in codecs]} of an index of shards")
    return Sharding(
        chunk_shape=chunk_shape,
        index_is_last=location == "end",
        index_dtype=_with_endian(np.dtype(np.uint64), codecs[0].config),
        index_has_crc=len(codecs) > 1,
    )
