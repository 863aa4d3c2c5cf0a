import gzip
import struct
from typing import ClassVar

import nibabel
import numpy as np
import pytest

import hyperslab.io
from hyperslab.errors import FormatError
from hyperslab.io.formats.nifti import Nifti
from hyperslab.io.index import save_manifest
from hyperslab.io.opening import looked_at
from hyperslab.layout import Box
from hyperslab.testing import ReaderContract
from hyperslab.testing.specimens import read


def save(path, array, version=1, order="<", pair=False):
    """A file written by nibabel."""
    names = {(1, False): "Nifti1Image", (1, True): "Nifti1Pair"}
    names |= {(2, False): "Nifti2Image", (2, True): "Nifti2Pair"}
    cls = getattr(nibabel, names[version, pair])
    header = cls.header_class(endianness=order)
    header.set_data_dtype(array.dtype.newbyteorder(order))
    nibabel.save(cls(array, np.eye(4), header), path)
    return path


def patch(path, offset, code, *values):
    """Writes over a part of the header."""
    is_gzip = path.suffix == ".gz"
    content = bytearray((gzip.decompress if is_gzip else bytes)(path.read_bytes()))
    struct.pack_into(code, content, offset, *values)
    path.write_bytes(gzip.compress(content) if is_gzip else content)


class TestNifti(ReaderContract):
    format = "nifti"
    file_name = "array.nii"
    dtypes = ("uint8", "int16", "int32", "float32", "float64", "complex64", "uint64")
    ways: ClassVar = {
        "version 1": {},
        "version 2": {"version": 2},
        "big-endian": {"order": ">"},
        "version 2 big-endian": {"version": 2, "order": ">"},
        "pair": {"pair": True},
    }

    def write(self, path, array, **how):
        return save(path.with_suffix(".img") if "pair" in how else path, array, **how)

    def parts(self, path):
        return [path.with_suffix(".hdr"), path] if path.suffix == ".img" else [path]


class TestNiftiGz(ReaderContract):
    format = "nifti"
    file_name = "array.nii.gz"
    dtypes = ("uint8", "int16", "float32")
    ways: ClassVar = {"gz": {}, "big-endian gz": {"order": ">"}}
    is_checksummed = True

    def write(self, path, array, **how):
        return save(path, array, **how)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "int64", "complex64"])
@pytest.mark.parametrize("scale", [(0.3, 0), (1, -7), (2.5, 11.125), (0, 5), (np.nan, 5), (1, 0)])
@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_scaled_values_are_those_of_nibabel(tmp_path, dtype, scale, suffix):
    array = (np.random.default_rng(0).random((4, 5, 6)) * 200).astype(dtype)
    path = save(tmp_path / f"a.{suffix}", array)
    patch(path, 112, "<2f", *scale)
    expected = np.asanyarray(nibabel.load(path).dataobj)
    (reader,) = Nifti.open(path, ["data"])
    assert reader.dtype == expected.dtype
    np.testing.assert_array_equal(read(reader), expected)
    (unscaled,) = Nifti.open(path, ["data"], scaled=False)
    assert unscaled.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read(unscaled), array)


def test_dims_beyond_the_fourth_are_dropped_where_they_have_one_index(tmp_path):
    array = np.arange(2 * 3 * 4 * 5, dtype=np.int16)
    expected = {(2, 3, 4, 1, 5): (2, 3, 4, 5), (2, 3, 4, 5, 1, 1): (2, 3, 4, 5)}
    expected |= {(2, 3, 20, 1, 1): (2, 3, 20, 1), (2, 3, 4, 5): (2, 3, 4, 5)}
    for given, shape in expected.items():
        path = save(tmp_path / "a.nii", array.reshape(given, order="F"))
        (reader,) = Nifti.open(path, ["data"])
        assert (reader.shape, reader.axes) == (shape, "DHWC")
        np.testing.assert_array_equal(read(reader), array.reshape(shape, order="F"))
    save(path, array.reshape(2, 3, 2, 2, 5))
    with pytest.raises(FormatError, match="only one may have"):
        Nifti.open(path, ["data"])


def test_an_image_of_several_volumes_has_them_as_channels(tmp_path):
    array = np.random.default_rng(0).integers(0, 99, (6, 5, 4, 3)).astype(np.int16)
    data = hyperslab.io.open(save(tmp_path / "a.nii.gz", array))
    assert data.shape == (3, 6, 5, 4)
    np.testing.assert_array_equal(data.read(0), array.transpose(3, 0, 1, 2))


def test_extensions_before_the_data_are_skipped(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    image = nibabel.Nifti1Image(array, np.eye(4))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"x" * 1000))
    nibabel.save(image, tmp_path / "a.nii")
    np.testing.assert_array_equal(read(*Nifti.open(tmp_path / "a.nii", ["data"])), array)


@pytest.mark.parametrize("suffix", ["hdr", "img"])
@pytest.mark.parametrize("gz", ["", ".gz"])
def test_a_pair_opens_by_either_of_its_files(tmp_path, suffix, gz):
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    save(tmp_path / f"a.img{gz}", array, pair=True)
    np.testing.assert_array_equal(read(*Nifti.open(tmp_path / f"a.{suffix}{gz}", ["data"])), array)
    (tmp_path / f"a.img{gz}").unlink()
    with pytest.raises(FormatError, match=r"a\.img.* does not exist"):
        Nifti.open(tmp_path / f"a.{suffix}{gz}", ["data"])


@pytest.mark.parametrize(
    ("code", "words"), [(1, "single bits"), (128, "RGB"), (2304, "RGBA"), (1536, "128-bit floats")]
)
def test_colours_and_types_that_numpy_lacks_are_refused(tmp_path, code, words):
    path = save(tmp_path / "a.nii", np.zeros((2, 3, 4), np.int16))
    patch(path, 70, "<h", code)
    with pytest.raises(FormatError, match=f"{words}.*not read"):
        Nifti.open(path, ["data"])


def test_a_header_without_the_magic_is_refused(tmp_path):
    path = save(tmp_path / "a.img", np.zeros((2, 3, 4), np.int16), pair=True)
    patch(path.with_suffix(".hdr"), 344, "4s", b"")
    with pytest.raises(FormatError, match=r"not a NIfTI file.*Analyze 7\.5"):
        Nifti.open(path, ["data"])


FIELDS = {
    "dims": (40, "<h", [-1, 0, 8, 30_000], "gives the dims"),
    "negative": (42, "<h", [-1, -30_000], "gives the dims"),
    "large": (42, "<h", [30_000], "truncated"),
    "type": (70, "<h", [3, -1, 9999], "data type"),
    "bits": (72, "<h", [8, 0], "bits a value"),
    "offset": (108, "<f", [0, 100, 352.5, np.inf, np.nan, -1e30], "data begins at byte"),
    "far": (108, "<f", [1e18], "truncated"),
    "intercept": (116, "<f", [np.nan, np.inf], "intercept"),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("suffix", ["nii", "nii.gz"])
def test_headers_that_make_no_sense_are_refused(tmp_path, name, suffix):
    offset, code, values, words = FIELDS[name]
    for value in values:
        path = save(tmp_path / f"a.{suffix}", np.ones((3, 4, 5), np.int16))
        patch(path, 112, "<2f", 2, 1)
        patch(path, offset, code, value)
        with pytest.raises(FormatError, match=words) as caught:
            read(Nifti.open(path, ["data"])[0], Box.of((0, 1), (0, 1), (0, 1)))
        assert str(path) in str(caught.value)


def test_an_image_that_begins_like_gzip_is_read_as_it_is(tmp_path):
    array = np.full((3, 4, 5), int.from_bytes(b"\x1f\x8b", "little", signed=True), np.int16)
    path = save(tmp_path / "a.img", array, pair=True)
    np.testing.assert_array_equal(read(*Nifti.open(path, ["data"])), array)


def test_a_single_file_and_a_pair_are_not_mixed_up(tmp_path):
    path = save(tmp_path / "a.nii", np.ones((3, 4, 5), np.int16))
    patch(path, 344, "4s", b"ni1")
    with pytest.raises(FormatError, match=r"data is in an \.img file"):
        Nifti.open(path, ["data"])


def oriented(path, version, sform, qform, shape=(3, 4, 5)):
    """An image with a tilted affine, or a mirrored quaternion."""
    cls = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    image = cls(np.zeros(shape, np.int16), None)
    turned = nibabel.eulerangles.euler2mat(0.3, -0.2, 1.1) @ np.diag([2.0, 0.7, -1.5])
    affine = nibabel.affines.from_matvec(turned, [-90, 12.5, 3])
    image.set_qform(affine, code=qform)
    image.set_sform(affine + (0.01 if sform else 0), code=sform)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("sform", "qform"), [(1, 1), (2, 0), (0, 1), (0, 0)])
def test_affine_and_spacing_are_those_of_nibabel(version, sform, qform, tmp_path):
    path = oriented(tmp_path / "a.nii.gz", version, sform, qform)
    (reader,) = Nifti.open(path, ["data"])
    expected = nibabel.load(path)
    np.testing.assert_allclose(reader.spacing, expected.header.get_zooms(), rtol=1e-6)
    if not sform and not qform:
        assert reader.affine is None
    else:
        np.testing.assert_allclose(reader.affine, expected.affine[:3], atol=1e-6)


def test_a_manifest_keeps_affine_and_spacing(tmp_path):
    oriented(tmp_path / "a.nii.gz", 1, 1, 1)
    data = hyperslab.io.open(tmp_path / "a.nii.gz")
    indexed = looked_at(data.manifest)
    where = indexed[0].arrays["data"]
    assert where.affine == data.reader(0, "data").affine
    assert where.spacing == data.reader(0, "data").spacing
    save_manifest(indexed, tmp_path / "a.json")
    assert hyperslab.io.open(tmp_path / "a.json").manifest[0] == indexed[0]
