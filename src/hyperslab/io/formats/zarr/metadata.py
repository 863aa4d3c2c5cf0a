"""What the metadata of a Zarr array says, in one form for versions 2 and 3."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.formats.zarr.codecs import Pipeline, UnknownPart, step_v2, step_v3
from hyperslab.io.formats.zarr.documents import Json

MAX_EXTENT = 2**63 - 1

AXES = {
    **dict.fromkeys(("n", "sample", "samples", "batch"), "N"),
    **dict.fromkeys(("c", "channel", "channels"), "C"),
    **dict.fromkeys(("z", "d", "depth"), "D"),
    **dict.fromkeys(("y", "h", "height"), "H"),
    **dict.fromkeys(("x", "w", "width"), "W"),
}
"""The letters of dims, by the names that people give them."""


@dataclass(frozen=True)
class KeyEncoding:
    """How the file of a chunk is called."""

    prefix: str
    separator: str

    def path(self, position: Sequence[int]) -> str:
        """Relative to the array's directory.

        >>> KeyEncoding("c", "/").path((1, 0)), KeyEncoding("", ".").path((1, 0))
        ('c/1/0', '1.0')
        """
        parts = [self.prefix] if self.prefix else []
        return self.separator.join([*parts, *map(str, position)]) or "0"


@dataclass(frozen=True)
class Sharding:
    """Files that hold many chunks and, at one end, an index of them."""

    chunk_shape: tuple[int, ...]
    """Of the chunks inside; it divides that of the shard."""
    index_is_last: bool
    index_dtype: np.dtype[Any]
    index_has_crc: bool


@dataclass(frozen=True)
class ArrayMetadata:
    """All that is needed to read an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """As stored."""
    chunk_shape: tuple[int, ...]
    """Of what a file holds."""
    keys: KeyEncoding
    fill_value: Any
    pipeline: Pipeline
    """For a chunk; with shards, for one inside."""
    sharding: Sharding | None
    axes: str | None


def extents(value: object, what: str, *, least: int, ndim: int | None = None) -> tuple[int, ...]:
    """``value`` as a tuple of extents, once it is sure that it is one."""
    if not isinstance(value, list) or not all(
        type(item) is int and least <= item <= MAX_EXTENT for item in value
    ):
        raise FormatError(f"damaged: its {what} is {value!r:.80}")
    if ndim not in (None, len(value)):
        raise FormatError(f"damaged: its {what} is {value!r:.80}, and it has {ndim} dims")
    return tuple(value)


def check_size(shape: Sequence[int], dtype: np.dtype[Any], what: str) -> None:
    """Raises unless so many bytes can be counted, at least."""
    if math.prod(shape) * dtype.itemsize > MAX_EXTENT:
        raise FormatError(f"damaged: its {what} is {list(shape)!r:.80}")


def axes_hint(names: object, ndim: int) -> str | None:
    """The letters of dims called ``names``, where all of them are known."""
    if not isinstance(names, Iterable):
        return None
    letters = [AXES.get(name.lower(), "") if isinstance(name, str) else "" for name in names]
    whole = len(letters) == ndim == len(set(letters)) and "" not in letters
    if not whole or "N" in letters[1:] or letters == ["N"]:
        return None
    return "".join(letters)


def parse_v2(metadata: Json, dim_names: object) -> ArrayMetadata:
    """What ``metadata`` says; ``dim_names`` are those that xarray keeps among the attributes."""
    dtype = _dtype_v2(metadata["dtype"])
    shape = extents(metadata["shape"], "shape", least=0)
    chunk_shape = extents(metadata["chunks"], "chunk shape", least=1, ndim=len(shape))
    check_size(shape, dtype, "shape")
    check_size(chunk_shape, dtype, "chunk shape")
    return ArrayMetadata(
        shape=shape,
        dtype=dtype,
        chunk_shape=chunk_shape,
        keys=KeyEncoding("", _separator(metadata.get("dimension_separator", "."))),
        fill_value=fill_value(metadata.get("fill_value"), dtype),
        pipeline=_pipeline_v2(metadata, dtype, chunk_shape),
        sharding=None,
        axes=axes_hint(dim_names, len(shape)),
    )


def _dtype_v2(name: object) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in "biufc":
        raise FormatError(f"values of type {name!r:.80} are not read: numbers are")
    return dtype


def _separator(value: object) -> str:
    if value not in (".", "/"):
        raise FormatError(f"damaged: its dimension_separator is {value!r:.80}")
    return str(value)


def _pipeline_v2(metadata: Json, dtype: np.dtype[Any], chunk_shape: tuple[int, ...]) -> Pipeline:
    filters, compressor = metadata.get("filters") or [], metadata.get("compressor")
    if not isinstance(filters, list):
        raise FormatError(f"damaged: its filters are {filters!r:.80}")
    configs = [*filters, *([compressor] if compressor is not None else [])]
    order = metadata.get("order", "C")
    if order not in ("C", "F"):
        raise FormatError(f"damaged: its order is {order!r:.80}")
    dims = tuple(range(len(chunk_shape)))
    return Pipeline(
        steps=tuple(step_v2(config) for config in reversed(configs)),
        dtype=dtype,
        chunk_shape=chunk_shape,
        order=dims if order == "C" else dims[::-1],
    )


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
    dtype = _dtype_v3(metadata["data_type"])
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
    pipeline = _pipeline_v3(codecs, dtype, sharding.chunk_shape if sharding else chunk_shape)
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


def _dtype_v3(value: object) -> np.dtype[Any]:
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


def _pipeline_v3(codecs: Sequence[Part], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Pipeline:
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


_SPECIAL = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


def fill_value(value: object, dtype: np.dtype[Any]) -> Any:
    """``value``, as JSON has it, as one of ``dtype``.

    >>> fill_value("-Infinity", np.dtype("f4")), fill_value("0x7fc00000", np.dtype("f4"))
    (np.float32(-inf), np.float32(nan))
    """
    native = dtype.newbyteorder("=")
    try:
        with np.errstate(over="raise"):
            return _parsed(value, native)
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise FormatError(f"damaged: its fill value {value!r:.80} is no {dtype}") from error


def _parsed(value: object, dtype: np.dtype[Any]) -> Any:
    if value is None:  # anything would do
        return dtype.type(0)
    if isinstance(value, str):
        return _spelled(value, dtype)
    if isinstance(value, list):
        return _complex(value, dtype)
    if dtype.kind in "iub" and value != int(value):  # type: ignore[call-overload]
        raise ValueError
    if dtype.kind in "iu":
        return dtype.type(int(value))  # type: ignore[call-overload]
    if dtype.kind == "b" and value not in (0, 1):
        raise ValueError
    return dtype.type(value)


def _spelled(text: str, dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "fc" and text in _SPECIAL:
        return dtype.type(_SPECIAL[text])
    if dtype.kind == "f" and text.startswith("0x"):
        bits = int(text, 16).to_bytes(dtype.itemsize, "big")
        return np.frombuffer(bits, dtype.newbyteorder(">")).astype(dtype)[0]
    raw = base64.b64decode(text, validate=True)  # the bytes as stored, in some of version 2
    if len(raw) != dtype.itemsize:
        raise ValueError
    return np.frombuffer(raw, dtype)[0]


def _complex(parts: list[object], dtype: np.dtype[Any]) -> Any:
    if dtype.kind != "c" or len(parts) != 2:
        raise ValueError
    half = np.dtype(f"f{dtype.itemsize // 2}")
    real, imag = (_parsed(part, half) for part in parts)
    return np.array([real, imag], half).view(dtype)[0]
