"""The metadata of version 2: ``.zarray``."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.io.formats.zarr.codecs import step_v2
from hyperslab.io.formats.zarr.documents import Json
from hyperslab.io.formats.zarr.fill import fill_value
from hyperslab.io.formats.zarr.metadata import (
    ArrayMetadata,
    KeyEncoding,
    axes_hint,
    check_size,
    extents,
)
from hyperslab.io.formats.zarr.pipeline import Pipeline


def parse_v2(metadata: Json, dim_names: object) -> ArrayMetadata:
    """What ``metadata`` says; ``dim_names`` are those that xarray keeps among the attributes."""
    dtype = _dtype(metadata["dtype"])
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
        pipeline=_pipeline(metadata, dtype, chunk_shape),
        sharding=None,
        axes=axes_hint(dim_names, len(shape)),
    )


def _dtype(name: object) -> np.dtype[Any]:
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


def _pipeline(metadata: Json, dtype: np.dtype[Any], chunk_shape: tuple[int, ...]) -> Pipeline:
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
