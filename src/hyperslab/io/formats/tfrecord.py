"""TFRecord files of ``tf.train.Example``, such as MLPerf's CosmoFlow records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.streamed import StreamedArray
from hyperslab.io.formats.example import Extent, Feature, NotAnExample, decode_list
from hyperslab.io.formats.records import RecordFile
from hyperslab.io.reader import STACKED, ArrayReader, Format, Storage
from hyperslab.layout import Box, Span

LIST_DTYPES: dict[str, np.dtype[Any]] = {"float": np.dtype(np.float32), "int64": np.dtype(np.int64)}
DESCRIPTIONS = {"bytes": "several strings of bytes", "empty": "empty", "missing": "missing"}
MISSING = Feature("missing", Extent(0, 0), None)
Shapes = Mapping[str, Sequence[int]]
DTypes = Mapping[str, DTypeLike]


class TFRecord(Format):
    """Records with named features, plain or compressed with gzip as a whole.

    Options of ``hyperslab.open``:
        shape: Of each array in one record, by its name. Needed for features that are strings of
            bytes; for others it is that of a vector if it is left out.
        dtype: Of features that are strings of bytes, by name. Floats are float32, ints int64.
        stacked: Whether arrays have a dim of records before all others. With ``stacked=False`` a
            file must hold one record alone, and files need not be looked into to count samples.
        verify: Whether a record's checksum is checked before it is first read from. This reads the
            whole record once, where a box may be a small part of it.
    """

    suffixes = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")

    @classmethod
    def names(cls, path: Path, *, verify: bool = True, **_: Any) -> Sequence[str]:
        features = RecordFile(DataFile.look_at(path), verify=verify).first_features()
        return sorted(features)

    @classmethod
    def open(  # type: ignore[override]
        cls,
        path: Path,
        names: Sequence[str],
        *,
        shape: Shapes | None = None,
        dtype: DTypes | None = None,
        stacked: bool = True,
        verify: bool = True,
    ) -> list[ArrayReader]:
        file = RecordFile(DataFile.look_at(path), verify=verify)
        shapes, dtypes = _by_name("shape", shape, names), _by_name("dtype", dtype, names)
        return [
            RecordArray(file, name, *_type_of(file, name, shapes, dtypes), stacked=stacked)
            for name in names
        ]


class RecordArray(ArrayReader):
    """The feature ``name`` of every record, each of ``shape``; ``dtype`` is that of its bytes."""

    def __init__(
        self,
        file: RecordFile,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        stacked: bool,
    ) -> None:
        self._file, self._name, self._stacked = file, name, stacked
        self._record_shape, self._stored = shape, dtype
        self.shape = (len(file), *shape) if stacked else shape
        self.dtype = dtype.newbyteorder("=")
        self.axes = STACKED if stacked else None

    def storage(self) -> Storage:
        size = self._file.file.size
        if self._file.is_gzip:
            note = "gzip around the whole file, whose size this is, with all its features"
            return Storage(kind="records", nbytes=size, compression="gzip", note=note)
        nbytes = math.prod(self.shape) * self.dtype.itemsize  # ints are stored in fewer
        return Storage(kind="records", nbytes=min(size, nbytes))

    def read(self, box: Box, out: NDArray[Any]) -> None:
        if not self._stacked:
            self._check_single()
            box, out = Box((Span(0, 1), *box.spans)), out[None]
        numbers, part = box.spans[0], Box(box.spans[1:])
        for number in range(*numbers) if part else ():
            self._read_record(number, part, out[number - numbers.start, ...])

    def _check_single(self) -> None:
        if len(self._file) != 1:
            raise FormatError(
                f"{self._file.file.path} has {len(self._file)} records, and one was expected: open "
                "it with stacked=True"
            )

    def _read_record(self, number: int, part: Box, out: NDArray[Any]) -> None:
        feature = self._file.features(number).get(self._name, MISSING)
        what = f"feature {self._name!r} in record {number} of {self._file.file.path}"
        if feature.kind in LIST_DTYPES and self.dtype != LIST_DTYPES[feature.kind]:
            raise FormatError(
                f"{what} is a list of {LIST_DTYPES[feature.kind]}, and {self.dtype} was expected"
            )
        if feature.values is not None:
            self._read_values(feature.values, part, out, what)
        elif feature.kind in LIST_DTYPES:
            values = _decoded(self._file, feature, what)
            self._check_nbytes(values.nbytes, what)
            out[...] = values.reshape(self._record_shape)[tuple(slice(*s) for s in part.spans)]
        else:
            raise FormatError(f"{what} is {DESCRIPTIONS[feature.kind]}, and one was expected")

    def _read_values(self, values: Extent, part: Box, out: NDArray[Any], what: str) -> None:
        self._check_nbytes(values.nbytes, what)
        cls = StreamedArray if self._file.is_gzip else ContiguousArray
        array = cls(self._file.file, values.offset, self._record_shape, self._stored)
        array.read(part, out)

    def _check_nbytes(self, nbytes: int, what: str) -> None:
        expected = math.prod(self._record_shape) * self._stored.itemsize
        if nbytes != expected:
            raise FormatError(
                f"{what} has {nbytes} bytes, and {self.dtype} {self._record_shape} has {expected}"
            )


def _by_name(option: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if len(names) != 1:
        raise ConfigError(
            f"{option}={given!r} is given for {len(names)} arrays: give one for each, such as "
            f"{option}={{{names[0]!r}: {given!r}}}"
        )
    return {names[0]: given}


def _type_of(
    file: RecordFile, name: str, shapes: Mapping[str, Any], dtypes: Mapping[str, Any]
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape of one record's array, and the dtype of its bytes.

    The file is looked into only for what was not given.
    """
    shape = _checked_shape(name, shapes[name]) if name in shapes else None
    dtype = _checked_dtype(name, dtypes[name]) if name in dtypes else None
    if shape is None or dtype is None:
        return _type_in(file, name, shape, dtype)
    return shape, dtype


def _type_in(
    file: RecordFile, name: str, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    features = file.first_features()
    if name not in features:
        raise FormatError(f"{file.file.path} has no feature {name!r}; it has {sorted(features)}")
    feature = features[name]
    what = f"feature {name!r} of {file.file.path}"
    if feature.kind == "empty":
        raise FormatError(f"{what} has no values")
    if feature.kind == "bytes":
        nbytes = (feature.values or feature.list).nbytes
        raise ConfigError(
            f"{what} is {nbytes} bytes of any kind: give its shape and dtype, such as "
            f"shape={{{name!r}: (128, 128, 128, 4)}}, dtype={{{name!r}: 'int16'}}"
        )
    if shape is None:
        shape = (len(_decoded(file, feature, what)),)
    return shape, LIST_DTYPES[feature.kind] if dtype is None else dtype


def _checked_shape(name: str, given: Any) -> tuple[int, ...]:
    try:
        shape = tuple(index(extent) for extent in given)
    except TypeError:
        shape = (-1,)
    if any(extent < 0 for extent in shape):
        raise ConfigError(f"shape {given!r} of {name!r} is not a tuple of extents, such as (4,)")
    return shape


def _checked_dtype(name: str, given: DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise ConfigError(f"dtype {given!r} of {name!r} is not one of numbers, such as 'int16'")
    return dtype


def _decoded(file: RecordFile, feature: Feature, what: str) -> NDArray[Any]:
    try:
        return decode_list(feature.kind, file.read(feature.list))
    except NotAnExample as error:
        raise FormatError(f"{what}: {error}") from error
