"""What every format gives: arrays of which any box can be read into a given buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError, FormatError
from hyperslab.layout import Box


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How an array lies on disk, for people and for those who choose how to read it."""

    kind: str
    """``contiguous``, ``chunked``, or another word for it."""
    nbytes: int
    """On disk, compressed."""
    chunks: tuple[int, ...] | None = None
    """The shape of a chunk, in the file's order of dims."""
    compression: str | None = None
    """The filters in words, such as ``shuffle + gzip(4)``."""
    fortran: bool = False
    """Whether the first dim varies fastest, where the array lies in one piece."""
    note: str | None = None
    """What else a reader of the report should know, such as why reads are slow."""

    @property
    def is_seekable(self) -> bool:
        """Whether a box is read without all that comes before it."""
        return self.chunks is not None or self.compression is None


STACKED = "N"
"""The letter of a dim that counts samples."""


class ArrayReader(ABC):
    """One array of one file, in the file's own order of dims.

    It holds what it needs to know of the file, and no open handle: there may be a million of them.
    Reads come from many threads at once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In this machine's byte order, whatever the file's."""
    axes: str | None = None
    """The order of dims where the format knows it, such as ``NDHWC``; ``STACKED`` where it knows no
    more than that the first dim counts samples."""
    sources: tuple[Path, ...] = ()
    """The files beside the one named that hold its data, by a link or otherwise."""
    affine: tuple[tuple[float, ...], ...] | None = None
    """Three rows of four: from indices along the first three dims to millimetres, where the format
    has it."""
    spacing: tuple[float, ...] | None = None
    """The size of a cell along the same dims."""

    @abstractmethod
    def read(self, box: Box, out: NDArray[Any]) -> None:
        """Fills ``out`` with ``box``.

        ``box`` lies inside the array; ``out`` has its shape, our dtype and any strides. Raises
        ``FormatError``, naming the file, if the data is damaged or not there.
        """

    @abstractmethod
    def storage(self) -> Storage: ...


OpenFile = Callable[[Path], list[ArrayReader]]
"""Gives the readers of a file, one an array."""


class Format(ABC):
    """A file format: which arrays a file has, and a reader for each.

    Subclass it, and tell ``register_format`` where it is.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """How names of its files end, such as ``(".h5", ".hdf5")``, for ``register_format``."""

    reads_other_files: ClassVar[bool] = False
    """Whether a file may take data from others that it names; the option ``external`` is then
    False if it shall not."""

    @classmethod
    @abstractmethod
    def names(cls, path: Path, **options: Any) -> Sequence[str]:
        """The arrays in the file, with their full names."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, names: Sequence[str], **options: Any) -> list[ArrayReader]:
        """A reader for each of ``names``; raises ``FormatError`` for a file that is not right.

        ``options`` are what the user gave to ``hyperslab.open`` beyond its own arguments; one that
        the format does not know is a ``TypeError`` by itself.
        """


T = TypeVar("T")


@dataclass(frozen=True)
class Opening:
    """How files are opened, and which of their arrays: the readers of a file, one an array."""

    format: str
    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, path: Path) -> list[ArrayReader]:
        cls = find_format(path, self.format)
        return self.explained(path, lambda: cls.open(path, self.names, **self.options))

    def explained(self, path: Path, call: Callable[[], T]) -> T:
        """What ``call`` gives, which hands the options to the format."""
        try:
            return call()
        except TypeError as error:
            if "keyword argument" not in str(error) and "required" not in str(error):
                raise
            given = f"options {sorted(self.options)}" if self.options else "no options"
            raise ConfigError(f"{path} cannot be opened with {given}: {error}") from error


_FORMATS: dict[str, tuple[tuple[str, ...], str]] = {
    "hdf5": ((".h5", ".hdf5", ".hdf", ".nc", ".he5"), "hyperslab.io.formats.hdf5:Hdf5"),
    "npy": ((".npy",), "hyperslab.io.formats.npy:Npy"),
    "raw": ((".raw", ".bin", ".dat"), "hyperslab.io.formats.raw:Raw"),
    "zarr": ((".zarr",), "hyperslab.io.formats.zarr:Zarr"),
    "nifti": (
        (".nii", ".nii.gz", ".hdr", ".img", ".hdr.gz", ".img.gz"),
        "hyperslab.io.formats.nifti:Nifti",
    ),
    "csv": ((".csv", ".tsv"), "hyperslab.io.formats.csv_table:CsvTable"),
    "hdf5-attributes": ((), "hyperslab.io.formats.hdf5.attributes:Hdf5Attributes"),
    "tfrecord": (
        (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz"),
        "hyperslab.io.formats.tfrecord:TFRecord",
    ),
}
"""Suffixes, and where the class is: imported when a file of the format is opened."""

_REGISTERED: dict[str, type[Format]] = {}


def register_format(name: str, cls: type[Format]) -> None:
    """Makes files with ``cls.suffixes`` open with ``cls``; a known name or suffix is taken over."""
    _REGISTERED[name] = cls


def known_formats() -> Mapping[str, tuple[str, ...]]:
    """The suffixes of every format, by its name."""
    builtin = {name: suffixes for name, (suffixes, _) in _FORMATS.items()}
    return {**builtin, **{name: cls.suffixes for name, cls in _REGISTERED.items()}}


def find_format(path: Path, name: str | None = None) -> type[Format]:
    """The format called ``name``, or the one that files named like ``path`` have."""
    name = name or format_of(path)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name not in _FORMATS:
        raise ConfigError(f"no format {name!r}: known are {', '.join(known_formats())}")
    module, _, cls = _FORMATS[name][1].partition(":")
    found = getattr(import_module(module), cls)
    assert isinstance(found, type)
    assert issubclass(found, Format)
    return found


def suffix_of(path: Path) -> str:
    """The longest suffix of a known format that the name of ``path`` ends with, or nothing."""
    name = path.name.lower()
    return next((suffix for suffix in _formats_by_suffix() if name.endswith(suffix)), "")


def _formats_by_suffix() -> Mapping[str, str]:
    """The longest suffix first."""
    return _sorted_suffixes(tuple(_REGISTERED.items()))


@lru_cache(1)
def _sorted_suffixes(registered: tuple[tuple[str, type[Format]], ...]) -> Mapping[str, str]:
    """Made once: there may be many files to look at."""
    del registered  # what is known depends on it
    pairs = [(suffix, name) for name, suffixes in known_formats().items() for suffix in suffixes]
    return dict(sorted(pairs, key=lambda pair: -len(pair[0])))


def format_of(path: Path) -> str:
    """The name of the format that files named like ``path`` have."""
    known = _formats_by_suffix()
    if not (suffix := suffix_of(path)):
        raise FormatError(
            f"{path} has no suffix that tells its format (known: {', '.join(sorted(known))}): "
            "name it, such as format='hdf5'"
        )
    return known[suffix]
