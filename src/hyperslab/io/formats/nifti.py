"""NIfTI images: .nii, .nii.gz, and pairs of .hdr and .img."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import FormatError
from hyperslab.io.engine.contiguous import ContiguousArray
from hyperslab.io.engine.files import DataFile
from hyperslab.io.engine.inflated import StreamedArray, inflated
from hyperslab.io.formats.npy import NAME, check_names
from hyperslab.io.reader import ArrayReader, Format, Storage
from hyperslab.layout import Box

AXES = {1: "W", 2: "HW", 3: "DHW", 4: "DHWC"}
HEADER_NBYTES = 540
"""Of a NIfTI-2 file; that of NIfTI-1 is shorter."""

_DTYPES = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 32: "c8", 64: "f8",
    256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8", 1792: "c16",
}  # fmt: skip
_REFUSED = {
    1: "single bits", 128: "RGB colours", 2304: "RGBA colours",
    1536: "128-bit floats", 2048: "256-bit complex numbers",
}  # fmt: skip


class Nifti(Format):
    """One image a file, called ``data``, its dims in the order of nibabel's arrays: i, j, k, t.

    They are taken for depth, height, width and channels. Of more than four dims, all but one beyond
    the third must be of extent 1, and those are dropped. Where the file gives a slope and an
    intercept, values are scaled in float64 (complex128), as nibabel does; ``scaled=False`` gives
    them as stored.
    """

    @classmethod
    def names(cls, path: Path, **_: Any) -> Sequence[str]:
        for file in set(_pair(path)):
            DataFile.look_at(file)
        return [NAME]

    @classmethod
    def open(  # type: ignore[override]
        cls, path: Path, names: Sequence[str], *, scaled: bool = True
    ) -> list[ArrayReader]:
        check_names(path, names)
        reader = _open_image(path, scaled)
        return [reader for _ in names]


class _Layout(NamedTuple):
    """Where the fields of a header lie, and of what type they are."""

    magic: int
    magic_nbytes: int
    dim: tuple[int, str]
    datatype: int
    bitpix: int
    vox_offset: tuple[int, str]
    scale: tuple[int, str]
    """The slope, and the intercept after it."""
    pixdim: tuple[int, str]
    codes: tuple[int, str]
    """Of the quaternion and of the affine: which of them are given."""
    quatern: tuple[int, str]
    """Its parts b, c, d, and the offsets along x, y, z."""
    srow: tuple[int, str]
    """Three rows of the affine."""
    end: int
    """Where data may begin at the earliest, when it is in the same file."""


_LAYOUTS = {
    348: _Layout(
        *(344, 4, (40, "8h"), 70, 72, (108, "f"), (112, "2f")),
        *((76, "8f"), (252, "2h"), (256, "6f"), (280, "12f"), 352),
    ),
    540: _Layout(
        *(4, 8, (16, "8q"), 12, 14, (168, "q"), (176, "2d")),
        *((104, "8d"), (344, "2i"), (352, "6d"), (400, "12d"), 544),
    ),
}
_MAGIC = {b"n+1\0": True, b"ni1\0": False, b"n+2\0\r\n\x1a\n": True, b"ni2\0\r\n\x1a\n": False}
"""Whether header and data are in one file."""


Affine = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Header:
    """What a NIfTI header says about the data."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """As stored, of either byte order."""
    offset: int
    slope: float
    inter: float
    is_single: bool
    """Whether the data is in the header's file."""
    spacing: tuple[float, ...] | None
    affine: Affine | None


def parse_header(raw: bytes, path: Path) -> Header:
    """The header in the first bytes of a file; ``path`` is for errors."""
    order, layout = _order_and_layout(raw, path)

    def field(place: int, code: str) -> tuple[Any, ...]:
        return struct.unpack_from(order + code, raw, place)

    magic = raw[layout.magic : layout.magic + layout.magic_nbytes]
    if magic not in _MAGIC:
        raise FormatError(
            f"{path} is not a NIfTI file, or is damaged: its header has the magic {magic!r} "
            "(Analyze 7.5 files have none: convert them to .nii)"
        )
    (datatype,), (bitpix,) = field(layout.datatype, "h"), field(layout.bitpix, "h")
    slope, inter = _scale(path, *field(*layout.scale))
    return Header(
        shape=_shape(field(*layout.dim), path),
        dtype=_dtype(order, datatype, bitpix, path),
        offset=_offset(path, layout.end if _MAGIC[magic] else 0, *field(*layout.vox_offset)),
        slope=slope,
        inter=inter,
        is_single=_MAGIC[magic],
        spacing=_spacing(field(*layout.pixdim)),
        affine=_affine(
            field(*layout.codes),
            field(*layout.pixdim),
            field(*layout.quatern),
            field(*layout.srow),
        ),
    )


def _spacing(pixdim: Sequence[float]) -> tuple[float, ...] | None:
    """The size of a cell along the first three dims."""
    sizes = tuple(abs(float(size)) for size in pixdim[1:4])
    return sizes if all(0 < size < np.inf for size in sizes) else None


def _affine(
    codes: tuple[int, int],
    pixdim: Sequence[float],
    quatern: Sequence[float],
    srow: Sequence[float],
) -> Affine | None:
    """Three rows from indices to millimetres: those given, or by the quaternion; None if neither.

    As nibabel chooses.
    """
    qform, sform = codes
    if sform:
        rows = np.array(srow, np.float64).reshape(3, 4)
    elif qform:
        b, c, d, *offset = quatern
        a = np.sqrt(max(0.0, 1 - b * b - c * c - d * d))
        turn = np.array(
            [
                [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
                [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
                [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
            ]
        )
        sizes = np.array(pixdim[1:4]) * (1, 1, -1 if pixdim[0] < 0 else 1)
        rows = np.column_stack([turn * sizes, offset])
    else:
        return None
    if not np.isfinite(rows).all():
        return None
    return tuple(tuple(row) for row in rows.tolist())


def _order_and_layout(raw: bytes, path: Path) -> tuple[str, _Layout]:
    for order in "<>":
        size = struct.unpack_from(order + "i", raw)[0] if len(raw) >= 4 else 0
        if size in _LAYOUTS and len(raw) >= size:
            return order, _LAYOUTS[size]
    raise FormatError(
        f"{path} is not a NIfTI file, or is truncated: a header begins with its size, 348 or 540, "
        f"and this one with {raw[:4].hex(' ')}, {len(raw)} bytes long"
    )


def _shape(dim: tuple[int, ...], path: Path) -> tuple[int, ...]:
    ndim, extents = dim[0], dim[1 : 1 + max(0, dim[0])]
    if not 1 <= ndim <= 7 or min(extents) < 0:
        raise FormatError(f"{path} is damaged: its header gives the dims {list(dim)}")
    return extents


def _dtype(order: str, datatype: int, bitpix: int, path: Path) -> np.dtype[Any]:
    if datatype in _REFUSED:
        raise FormatError(f"{path} holds {_REFUSED[datatype]}, which are not read: convert it")
    if datatype not in _DTYPES:
        raise FormatError(f"{path} is damaged: no NIfTI data type has the code {datatype}")
    dtype = np.dtype(order + _DTYPES[datatype])
    if bitpix != dtype.itemsize * 8:
        raise FormatError(
            f"{path} is damaged: its header gives {bitpix} bits a value, and its data type {dtype} "
            f"has {dtype.itemsize * 8}"
        )
    return dtype


def _offset(path: Path, least: int, value: float) -> int:
    if not least <= value < 2**63 or value != int(value):
        raise FormatError(
            f"{path} is damaged: its header says that data begins at byte {value}, and {least} is "
            "the first where it can"
        )
    return int(value)


def _scale(path: Path, slope: float, inter: float) -> tuple[float, float]:
    """A slope of 0, or one that is no number, means that values are as stored."""
    if slope == 0 or not np.isfinite(slope):
        return 1.0, 0.0
    if not np.isfinite(inter):
        raise FormatError(f"{path} is damaged: its header gives the intercept {inter}")
    return slope, inter


def _open_image(path: Path, scaled: bool) -> ArrayReader:
    header_path, data_path = _pair(path)
    header_file = DataFile.look_at(header_path)
    header = parse_header(_first_bytes(header_file), header_path)
    if header.is_single != (header_path == data_path):
        where = "in the same file" if header.is_single else "in an .img file"
        raise FormatError(f"{path}: its header says that the data is {where}; rename the files")
    file = header_file if header.is_single else DataFile.look_at(data_path)
    shape = _without_singletons(header.shape, path)
    # The bytes of an image of its own may be any; a header's are not those of gzip.
    is_gzip = _is_gzip(file) if header.is_single else data_path.suffix == ".gz"
    cls = StreamedArray if is_gzip else ContiguousArray
    stored = cls(file, header.offset, shape, header.dtype, fortran=True, axes=AXES[len(shape)])
    is_scaled = scaled and (header.slope, header.inter) != (1.0, 0.0)
    image = ScaledArray(stored, header.slope, header.inter) if is_scaled else stored
    image.spacing = header.spacing and header.spacing[: len(shape)]
    image.affine = header.affine if len(shape) >= 3 else None
    image.sources = tuple(part for part in {header_path, data_path} if part != path)
    return image


def _pair(path: Path) -> tuple[Path, Path]:
    """The files of the header and of the data; for most images they are one."""
    stem, _, ending = path.name.removesuffix(".gz").rpartition(".")
    if ending.lower() not in ("hdr", "img"):
        return path, path
    packed = ".gz" if path.name.endswith(".gz") else ""
    hdr, img = ("HDR", "IMG") if ending.isupper() else ("hdr", "img")
    return path.with_name(f"{stem}.{hdr}{packed}"), path.with_name(f"{stem}.{img}{packed}")


def _is_gzip(file: DataFile) -> bool:
    return file.size >= 2 and file.read(0, 2) == b"\x1f\x8b"


def _first_bytes(file: DataFile) -> bytes:
    if _is_gzip(file):
        with inflated(file).opened(check=False) as stream:
            return stream.read_up_to(HEADER_NBYTES)
    return bytes(file.read(0, min(file.size, HEADER_NBYTES)))


def _without_singletons(shape: tuple[int, ...], path: Path) -> tuple[int, ...]:
    if len(shape) <= 4:
        return shape
    channels = [extent for extent in shape[3:] if extent != 1] or [1]
    if len(channels) > 1:
        raise FormatError(
            f"{path} has the shape {shape}: of the dims after the third, only one may have an "
            "extent other than 1; split the image"
        )
    return (*shape[:3], *channels)


class ScaledArray(ArrayReader):
    """The values of ``stored``, times ``slope``, plus ``inter``, in double precision."""

    def __init__(self, stored: ArrayReader, slope: float, inter: float) -> None:
        self._stored, self._slope, self._inter = stored, slope, inter
        self.shape, self.axes = stored.shape, stored.axes
        self.dtype = np.result_type(stored.dtype, np.float64)

    def storage(self) -> Storage:
        return self._stored.storage()

    def read(self, box: Box, out: NDArray[Any]) -> None:
        # In the order of dims in the file, which is the reverse of ours.
        values = np.empty(box.shape, self._stored.dtype, order="F")
        self._stored.read(box, values)
        with np.errstate(all="ignore"):  # what does not fit is infinite, as in nibabel
            np.multiply(values, self._slope, out=out, dtype=self.dtype)
            np.add(out, self._inter, out=out)
