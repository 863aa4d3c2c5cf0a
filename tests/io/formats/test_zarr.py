import json
import shutil
import sys
import warnings
from typing import ClassVar

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)

import hyperslab.io
from hyperslab.errors import FormatError, HyperslabError
from hyperslab.io.formats.zarr import Zarr, format
from hyperslab.io.formats.zarr.format import ZarrArray
from hyperslab.layout import Box
from hyperslab.testing import ReaderContract
from hyperslab.testing.specimens import read

SHARDED = ShardingCodec(chunk_shape=(1,), codecs=[BytesCodec(), ZstdCodec(), Crc32cCodec()])


def save(path, array, *, version=3, fill_value=0, chunks=None, **how):
    """An array written by zarr-python, cut along every dim."""
    chunks = chunks or tuple(max(1, extent * 2 // 3) for extent in array.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of things that are new in the format
        found = zarr.create_array(
            path,
            shape=array.shape,
            dtype=array.dtype,
            chunks=chunks,
            zarr_format=version,
            fill_value=fill_value,
            **how,
        )
        found[...] = array
    return path


def edit(path, **changes):
    """Changes the metadata; ``None`` takes a key away."""
    file = next(path / name for name in ("zarr.json", ".zarray") if (path / name).exists())
    found = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in found.items() if value != "gone"}))


def cut_once(shape):
    """Chunks of two thirds along the first dim, as few files are tried sooner."""
    return (max(1, shape[0] * 2 // 3), *(max(1, extent) for extent in shape[1:]))


class TestZarr2(ReaderContract):
    format = "zarr"
    file_name = "array.zarr"
    num_damaged = 40
    dtypes = ("uint8", "int16", "bool", "float16", "float32", "complex64")
    ways: ClassVar = {
        "raw": {"compressors": None},
        "blosc": {},
        "raw fortran": {"compressors": None, "order": "F"},
        "shuffle, zlib": {"filters": [numcodecs.Shuffle(2)], "compressors": numcodecs.Zlib()},
    }

    def write(self, path, array, **how):
        return save(path, array, version=2, chunks=cut_once(array.shape), **how)

    def test_an_empty_file_is_named(self, tmp_path):
        path = save(tmp_path / self.file_name, np.ones((4, 4)), version=2)
        (path / "0.0").write_bytes(b"")
        with pytest.raises(FormatError, match=r"0\.0 is empty"):
            read(*Zarr.open(path, ["data"]))


class TestZarr3(ReaderContract):
    format = "zarr"
    file_name = "array.zarr"
    num_damaged = 40
    dtypes = ("uint8", "int16", "bool", "float16", "float32", "complex128")
    ways: ClassVar = {
        "raw": {"compressors": None},
        "zstd": {},
        "big-endian, gzip": {"serializer": BytesCodec(endian="big"), "compressors": GzipCodec()},
    }

    def write(self, path, array, **how):
        return save(path, array, chunks=cut_once(array.shape), **how)


class TestShards(ReaderContract):
    format = "zarr"
    file_name = "array.zarr"
    num_damaged = 40
    dtypes = ("uint8", "int16", "float32")
    ways: ClassVar = {"at the end": {}, "at the start": {"index_location": "start"}}

    def write(self, path, array, **how):
        chunk_shape = tuple(max(1, extent // 2) for extent in array.shape)
        codec = ShardingCodec(
            chunk_shape=chunk_shape, codecs=[BytesCodec(), ZstdCodec(), Crc32cCodec()], **how
        )
        shards = (chunk_shape[0], *(2 * extent for extent in chunk_shape[1:]))
        return save(path, array, chunks=shards, serializer=codec, compressors=None)


@pytest.fixture
def array():
    return np.random.default_rng(0).integers(-99, 99, (7, 6, 5)).astype(np.int16)


def same(path, name="data"):
    """Reads by ourselves, and as zarr-python does."""
    (reader,) = Zarr.open(path, [name])
    theirs = zarr.open_array(path, path=None if name == "data" else name, mode="r")
    assert isinstance(reader, ZarrArray)
    assert reader.dtype == np.dtype(theirs.dtype).newbyteorder("=")
    np.testing.assert_array_equal(read(reader), theirs[...])


COMPRESSORS = [
    *[numcodecs.Blosc(name, shuffle=2) for name in ("lz4", "zstd", "blosclz", "zlib")],
    *[numcodecs.GZip(), numcodecs.BZ2(), numcodecs.LZMA(), numcodecs.LZ4(), numcodecs.Zstd()],
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda codec: codec.codec_id)
@pytest.mark.parametrize("order", ["C", "F"])
def test_version_2_with_compressors(tmp_path, array, compressor, order):
    save(tmp_path / "a.zarr", array, version=2, compressors=compressor, order=order)
    same(tmp_path / "a.zarr")


FILTERS = {
    "delta": [numcodecs.Delta("<i2")],
    "scale": [numcodecs.FixedScaleOffset(offset=3, scale=1, dtype="<i2", astype="<i4")],
    "wider": [numcodecs.AsType(encode_dtype="<f8", decode_dtype="<i2")],
    "sums": [numcodecs.CRC32(), numcodecs.Adler32(), numcodecs.Fletcher32()],
    "both": [numcodecs.Delta("<i2"), numcodecs.Shuffle(2)],
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("separator", [".", "/"])
def test_version_2_with_filters(tmp_path, array, name, separator):
    keys = {"name": "v2", "separator": separator}
    path = tmp_path / "a.zarr"
    save(path, array, version=2, filters=FILTERS[name], chunk_key_encoding=keys)
    same(path)


@pytest.mark.parametrize("dtype", [">i2", ">f4", "<f8", ">c16", "|b1", ">u8"])
def test_version_2_in_either_byte_order(tmp_path, array, dtype):
    same(save(tmp_path / "a.zarr", array.astype(dtype), version=2))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize(
    "compressors",
    [
        None,
        [BloscCodec(cname="lz4", shuffle="bitshuffle"), Crc32cCodec()],
        ZstdCodec(checksum=True),
    ],
    ids=["raw", "blosc, crc32c", "zstd"],
)
def test_version_3_with_codecs(tmp_path, array, order, endian, compressors):
    path = tmp_path / "a.zarr"
    save(
        path,
        array,
        filters=[TransposeCodec(order=order)],
        serializer=BytesCodec(endian=endian),
        compressors=compressors,
        chunk_key_encoding={"name": "v2" if endian == "big" else "default", "separator": "."},
    )
    same(path)


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("index", [[BytesCodec()], [BytesCodec(endian="big"), Crc32cCodec()]])
@pytest.mark.parametrize("order", [None, (2, 0, 1)])
def test_shards(tmp_path, array, location, index, order):
    inner = [*([TransposeCodec(order=order)] if order else []), BytesCodec(), GzipCodec()]
    codec = ShardingCodec(
        chunk_shape=(2, 3, 1), codecs=inner, index_codecs=index, index_location=location
    )
    path = tmp_path / "a.zarr"
    array[:2] = 5  # chunks of the fill value alone are left out
    save(path, array, chunks=(4, 6, 2), serializer=codec, compressors=None, fill_value=5)
    same(path)


FILL_VALUES = [
    *[(np.nan, "f4"), (np.inf, "f8"), (-np.inf, "f2"), (-7, "i8"), (2**64 - 1, "u8")],
    *[(True, "?"), (complex(1, np.nan), "c8"), (complex(-np.inf, 2), "c16"), (1e-3, "f4")],
]


@pytest.mark.parametrize(("value", "dtype"), FILL_VALUES, ids=str)
@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path, value, dtype, version):
    for shape in ((3, 4), ()):
        path = tmp_path / f"{len(shape)}.zarr"
        zarr.create_array(
            path,
            shape=shape,
            dtype=dtype,
            chunks=shape and (2, 2),
            fill_value=value,
            zarr_format=version,
        )
        same(path)


def test_fill_values_in_other_spellings(tmp_path):
    path = save(tmp_path / "a.zarr", np.zeros((2, 2), np.float32))  # a hole
    spellings = {"0x7fc00000": np.nan, "0x3f800000": 1.0, 3: 3.0, "-Infinity": -np.inf}
    for spelled, value in spellings.items():
        edit(path, fill_value=spelled)
        np.testing.assert_array_equal(read(*Zarr.open(path, ["data"])), np.full((2, 2), value))
    for wrong in ("0x7fc0000000", "zero", [1, 2], {}, "0xzz", 1e300):
        edit(path, fill_value=wrong)
        with pytest.raises(FormatError, match="fill value"):
            Zarr.open(path, ["data"])


def test_arrays_are_named_by_their_path_and_consolidated_metadata_is_used(tmp_path, array):
    for version in (2, 3):
        root = tmp_path / f"{version}.zarr"
        group = zarr.open_group(root, mode="w", zarr_format=version)
        for name in ("x", "deep/er/y", "deep/z"):
            group.create_array(name, data=array, chunks=(3, 3, 3))
        group.create_group("nothing")
        names = ["deep/er/y", "deep/z", "x"]
        assert Zarr.names(root) == names
        same(root, "deep/er/y")
        with pytest.raises(FormatError, match=r"no array 'deep'; it has \['deep/er/y'"):
            Zarr.open(root, ["deep"])
        with pytest.raises(FormatError, match=r"no array '\.\./x'"):
            Zarr.open(root, ["../x"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(root)
        shutil.move(root / "x", root / "moved")
        assert Zarr.names(root) == names, "as the consolidated metadata says"
    (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (root / "deep" / "loop").symlink_to(root)
    assert Zarr.names(root) == ["deep/er/y", "deep/z", "moved"]


def test_a_dataset_of_hierarchies(tmp_path, array):
    for number in range(3):
        group = zarr.open_group(tmp_path / f"{number}.zarr", mode="w")
        group.create_array("image", data=array + number, dimension_names=["x", "y", "z"])
        group.create_array("label", data=np.array([number], np.float32))
    data = hyperslab.io.open(tmp_path / "*.zarr", sample="image", target="label")
    assert (len(data), data.shape) == (3, (5, 6, 7))
    np.testing.assert_array_equal(data.read(2), (array + 2).transpose())
    assert data.read(1, array="label") == [1]


def test_names_of_dims_give_the_axes(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, dimension_names=["channel", "y", "x"])
    assert Zarr.open(path, ["data"])[0].axes == "CHW"
    path = save(tmp_path / "b.zarr", array, version=2)
    (path / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["sample", "c", "x"]}')
    assert Zarr.open(path, ["data"])[0].axes == "NCW"
    (path / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["time", "c", "x"]}')
    assert Zarr.open(path, ["data"])[0].axes is None


def test_a_missing_chunk_is_a_hole_unless_there_may_be_none(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, chunks=(4, 6, 5), fill_value=-5)
    (path / "c" / "1" / "0" / "0").unlink()
    expected = array.copy()
    expected[4:] = -5
    np.testing.assert_array_equal(read(*Zarr.open(path, ["data"])), expected)
    with pytest.raises(FormatError, match=r"c/1/0/0 does not exist.*holes=False"):
        read(*Zarr.open(path, ["data"], holes=False))


def test_an_array_that_is_gone_is_not_taken_for_holes(tmp_path, array):
    path = save(tmp_path / "a.zarr", array)
    (reader,) = Zarr.open(path, ["data"])
    shutil.rmtree(path)
    with pytest.raises(FormatError, match=r"zarr\.json does not exist"):
        read(reader)


def test_a_link_that_leads_nowhere_is_not_taken_for_a_hole(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, chunks=(4, 6, 5))
    chunk = path / "c" / "1" / "0" / "0"
    chunk.unlink()
    chunk.symlink_to(tmp_path / "lost")
    with pytest.raises(FormatError, match="does not exist"):
        read(*Zarr.open(path, ["data"]))


def test_opening_looks_at_no_chunks(tmp_path, array, monkeypatch):
    path = save(tmp_path / "a.zarr", array, chunks=(1, 1, 1))
    looked_at = []
    look_at = hyperslab.io.engine.files.DataFile.look_at
    monkeypatch.setattr(
        hyperslab.io.engine.files.DataFile,
        "look_at",
        lambda path: looked_at.append(path) or look_at(path),
    )
    (reader,) = Zarr.open(path, ["data"])
    assert len(looked_at) == 1
    read(reader, Box.of((0, 2), (0, 1), (0, 1)))
    read(reader, Box.of((0, 2), (0, 1), (0, 1)))
    chunks = [path for path in looked_at if path.name != "zarr.json"]
    assert len(chunks) == 2


def test_a_crc32c_that_does_not_fit_is_found(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, chunks=array.shape, compressors=[Crc32cCodec()])
    chunk = path / "c" / "0" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(FormatError, match=r"c/0/0/0.*checksum [0-9a-f]{8} does not fit"):
        read(*Zarr.open(path, ["data"]))


@pytest.mark.parametrize("where", [-1, -5, -20])
def test_a_damaged_index_of_a_shard_is_found(tmp_path, where):
    array = np.arange(24, dtype=np.int16)
    path = save(tmp_path / "a.zarr", array, chunks=(24,), serializer=SHARDED, compressors=None)
    content = bytearray((path / "c" / "0").read_bytes())
    content[where] ^= 1
    (path / "c" / "0").write_bytes(content)
    with pytest.raises(FormatError, match="checksum of its index does not fit"):
        read(*Zarr.open(path, ["data"]))


def test_codecs_that_only_zarr_python_knows_are_read_by_it_with_one_warning(tmp_path, array):
    format._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from zarr.codecs import numcodecs as theirs

        path = save(tmp_path / "a.zarr", array, compressors=[theirs.LZ4()])
        expected = zarr.open_array(path, mode="r")[...]
    with pytest.warns(UserWarning, match=r"codec 'numcodecs\.lz4' are read by zarr-python"):
        (reader,) = Zarr.open(path, ["data"])
    np.testing.assert_array_equal(read(reader), expected)
    np.testing.assert_array_equal(expected, array)
    Zarr.open(path, ["data"])  # warns no more, or this test would fail


@pytest.mark.parametrize("package", ["zarr", "numcodecs"])
def test_a_package_that_is_missing_is_named(tmp_path, array, package, monkeypatch):
    path = save(tmp_path / "a.zarr", array, version=2, compressors=numcodecs.Blosc())
    if package == "zarr":
        edit(path, compressor={"id": "zfpy"})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HyperslabError, match=f"pip install {package}"):
        Zarr.open(path, ["data"])


def test_codecs_that_nobody_knows_or_that_run_code_are_refused(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, version=2)
    edit(path, compressor={"id": "no-such-codec"})
    with pytest.raises(FormatError, match=r"no-such-codec.*neither hyperslab nor zarr-python"):
        Zarr.open(path, ["data"])
    edit(path, compressor=None, filters=[{"id": "pickle"}])
    with pytest.raises(FormatError, match="'pickle' runs code"):
        Zarr.open(path, ["data"])
    path = save(tmp_path / "b.zarr", array)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    edit(path, codecs=[*codecs, {"name": "numcodecs.pickle"}])
    with pytest.raises(FormatError, match="'pickle' runs code"):
        Zarr.open(path, ["data"])


PICKLE = {"id": "pickle"}


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (2, {"compressor": {"id": "zfpy"}, "filters": [PICKLE]}),
        (2, {"compressor": {"id": "zfpy", "inner": [PICKLE]}}),
        (3, {"codecs": [{"name": "zfpy"}, {"name": "numcodecs.pickle"}]}),
        (3, {"codecs": [{"name": "zfpy", "configuration": {"codecs": ["numcodecs/pickle"]}}]}),
    ],
)
def test_zarr_python_is_given_nothing_that_runs_code(tmp_path, array, version, changes):
    """A codec that is not read here takes an array there, with all its other codecs."""
    path = save(tmp_path / "a.zarr", array, version=version)
    edit(path, **changes)
    with pytest.raises(FormatError, match="'pickle' runs code"):
        Zarr.open(path, ["data"])


WRONG_V2 = {
    "shape": [None, [-1, 2, 3], [7, 6, True], "7", [2**70, 1, 1], [2**40] * 3],
    "chunks": [None, [0, 1, 1], [3, 3], [1.5, 1, 1], [2**62, 2**62, 1]],
    "dtype": [None, "", "<i3", "|O", "|S4", "<U7", "<M8[ns]", [["a", "<i2"]], 5, "i2,i4"],
    "zarr_format": [1, 3, None, "2"],
    "order": ["A", 0],
    "dimension_separator": ["-", None],
    "filters": [5, ["delta"], [{}]],
    "compressor": [5, {"id": 7}, {"id": "blosc", "cname": 5, "nonsense": 1}],
    "fill_value": ["x", [1], {}, 1e9, 2**40, 1.5],
}
WRONG_V3 = {
    "shape": [None, [-1, 2, 3], [7, 6, 5.0], {}],
    "data_type": [None, "int17", "string", "r16", {"name": "struct", "configuration": {}}, 7],
    "node_type": ["thing", None],
    "chunk_grid": [None, {}, {"name": "regular", "configuration": {"chunk_shape": [0, 1, 1]}}],
    "chunk_key_encoding": [None, {"name": "default", "configuration": {"separator": "-"}}],
    "codecs": [None, [], [5], {}, [{"name": 5}], [{"name": "bytes"}]],
    "fill_value": ["x", 70_000, {}],
}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_that_makes_no_sense_is_refused(tmp_path, array, version):
    path = save(tmp_path / "a.zarr", array, version=version)
    original = (path / ("zarr.json" if version == 3 else ".zarray")).read_text()
    for key, values in (WRONG_V2 if version == 2 else WRONG_V3).items():
        for value in [*values, "gone"] if key not in ("order", "filters", "fill_value") else values:
            if value == "gone" and key in ("dimension_separator", "compressor"):
                continue
            (path / ("zarr.json" if version == 3 else ".zarray")).write_text(original)
            edit(path, **{key: value})
            with pytest.raises(FormatError) as caught:
                Zarr.open(path, ["data"])
            assert "a.zarr" in str(caught.value), (key, value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\xff", "9" * 5000, "null"])
def test_documents_that_are_not_json_objects_are_refused(tmp_path, array, text):
    path = save(tmp_path / "a.zarr", array)
    (path / "zarr.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"zarr\.json is (damaged|empty)"):
        Zarr.open(path, ["data"])


def test_a_zipped_hierarchy_and_an_ordinary_directory_are_refused(tmp_path):
    (tmp_path / "a.zarr").write_bytes(b"PK\x03\x04")
    with pytest.raises(FormatError, match="unpack it first"):
        Zarr.names(tmp_path / "a.zarr")
    (tmp_path / "b.zarr").mkdir()
    with pytest.raises(FormatError, match=r"no zarr\.json, \.zgroup or \.zarray"):
        Zarr.names(tmp_path / "b.zarr")


def test_a_chunk_that_claims_or_holds_too_much_is_refused_before_it_is_unpacked(tmp_path):
    array = np.zeros((100, 100), np.uint8)
    for compressor in (numcodecs.Zlib(), numcodecs.BZ2(), numcodecs.Zstd(), numcodecs.LZ4()):
        path = tmp_path / f"{compressor.codec_id}.zarr"
        save(path, array, version=2, compressors=compressor, chunks=(100, 100))
        (path / "0.0").write_bytes(compressor.encode(bytes(50 << 20)))
        with pytest.raises(FormatError, match=r"0\.0.*(claims to hold|holds more than)"):
            read(*Zarr.open(path, ["data"], holes=False))


def test_a_store_that_was_written_anew_is_not_read_with_the_old_description(tmp_path, array):
    path = save(tmp_path / "a.zarr", array, chunks=(1, 1, 1))
    (reader,) = Zarr.open(path, ["data"])
    read(reader, Box.of((0, 1), (0, 1), (0, 1)))
    shutil.rmtree(path)
    save(tmp_path / "a.zarr", array.astype("f4"), chunks=(1, 1, 1))
    with pytest.raises(FormatError, match="has changed since it was opened"):
        read(reader, Box.of((1, 2), (0, 1), (0, 1)))
