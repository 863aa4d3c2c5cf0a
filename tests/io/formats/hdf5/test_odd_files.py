"""HDF5 files as other people's tools write them: read right, or refused in words."""

import ctypes
import os
import warnings
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

import hyperslab as hs
from hyperslab.io import ArrayReader
from hyperslab.io.formats.hdf5 import Hdf5, format
from hyperslab.layout import Box
from hyperslab.testing.specimens import numbered, random_boxes, read, slices

LIBVERS = pytest.mark.parametrize("libver", ["earliest", "latest"])


def opened(path, name="x") -> ArrayReader:
    (reader,) = Hdf5.open(Path(path), [name])
    return reader


def check(path, array, name="x"):
    reader = opened(path, name)
    assert reader.shape == array.shape
    for box in [*random_boxes(array.shape, 4), Box.whole(array.shape)]:
        np.testing.assert_array_equal(read(reader, box), array[slices(box)])
    return reader


def created(path, array, dcpl=None, dtype=None, libver="earliest"):
    """A dataset made by the low-level interface."""
    with h5py.File(path, "w", libver=libver) as file:
        kind = h5t.py_create(array.dtype) if dtype is None else dtype
        dataset = h5d.create(file.id, b"x", kind, h5s.create_simple(array.shape), dcpl)
        dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(array))
    return path


# Where the data lies.


@LIBVERS
@pytest.mark.parametrize("how", [{}, {"chunks": (2, 3)}, {"chunks": (2, 3), "compression": 1}])
def test_a_user_block_before_the_file_is_skipped(tmp_path, libver, how):
    array = numbered((5, 7), "int16")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=1024, libver=libver) as file:
        file.create_dataset("x", data=array, **how)
    check(path, array)


def test_compact_data_is_read_from_the_header(tmp_path):
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_layout(h5d.COMPACT)
    array = numbered((5, 7), "int16")
    reader = check(created(tmp_path / "a.h5", array, dcpl), array)
    assert reader.storage().kind == "compact"


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_external_data_is_found_from_the_working_folder_or_beside_the_file(
    tmp_path, monkeypatch, folder
):
    (tmp_path / "elsewhere").mkdir()
    array = numbered((6, 7), "float32")
    monkeypatch.chdir(tmp_path)
    with h5py.File("a.h5", "w") as file:
        pieces = [("one.bin", 16, 84), ("two.bin", 0, 84)]
        file.create_dataset("x", array.shape, array.dtype, external=pieces)[...] = array
    monkeypatch.chdir(folder)
    check(tmp_path / "a.h5", array)


def test_external_data_that_is_cut_off_or_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = numbered((6, 7), "float32")
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("x", array.shape, array.dtype, external=[("one.bin", 0, 168)])
        file["x"][...] = array
    os.truncate("one.bin", 100)
    with pytest.raises(hs.FormatError, match=r"one\.bin, which is truncated.*100 .*168"):
        opened("a.h5")
    Path("one.bin").unlink()
    with pytest.raises(hs.FormatError, match=r"one\.bin, which does not exist"):
        opened("a.h5")


def virtual(path, sources, shape):
    layout = h5py.VirtualLayout((len(sources), *shape), "int16")
    for number, source in enumerate(sources):
        layout[number] = h5py.VirtualSource(source, "y", shape)
    with h5py.File(path, "w", libver="latest") as file:
        file.create_virtual_dataset("x", layout, fillvalue=7)


def test_a_virtual_dataset_takes_its_data_from_other_files(tmp_path):
    array = numbered((3, 4, 5), "int16")
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["y"] = array[number]
    virtual(tmp_path / "a.h5", [f"{number}.h5" for number in range(3)], (4, 5))
    reader = check(tmp_path / "a.h5", array)
    with h5py.File(tmp_path / "1.h5", "a") as file:
        file["y"][...] = 0
    os.utime(tmp_path / "1.h5", ns=(0, 0))
    with pytest.raises(hs.FormatError, match=r"1\.h5 has changed"):
        read(reader)


def test_a_virtual_dataset_with_a_missing_source_is_refused(tmp_path):
    virtual(tmp_path / "a.h5", ["gone.h5"], (4, 5))
    with pytest.raises(hs.FormatError, match=r"takes data from gone\.h5, which does not exist"):
        opened(tmp_path / "a.h5")


@LIBVERS
@pytest.mark.parametrize("how", [{}, {"chunks": (2, 2)}, {"chunks": (2, 2), "compression": 1}])
def test_data_that_was_never_written_is_the_fill_value(tmp_path, libver, how):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file.create_dataset("x", (3, 5), ">f4", fillvalue=2.5, **how)
        file.create_dataset("y", (3, 5), "<f4", **how)
    check(tmp_path / "a.h5", np.full((3, 5), 2.5, "float32"))
    check(tmp_path / "a.h5", np.zeros((3, 5), "float32"), "y")


@LIBVERS
def test_missing_chunks_are_the_fill_value(tmp_path, libver):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dataset = file.create_dataset("x", (9, 10), "int16", chunks=(4, 4), fillvalue=-3)
        dataset[5:6, 3:7] = 8
        array = dataset[...]
    check(tmp_path / "a.h5", array)


def test_links_lead_to_the_data(tmp_path):
    array, other = numbered((4, 5), "int16"), numbered((6, 5), "float32")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("deep/y", data=other, chunks=(4, 4))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = array
        file["hard"] = file["x"]
        file["group/soft"] = h5py.SoftLink("/x")
        file["outside"] = h5py.ExternalLink("b.h5", "/deep/y")
        file["group/round"] = h5py.SoftLink("/")
        file["nowhere"] = h5py.SoftLink("/gone")
    for name in ("x", "/x", "hard", "group/soft", "group/round/x"):
        check(tmp_path / "a.h5", array, name)
    check(tmp_path / "a.h5", other, "outside")
    names = Hdf5.names(tmp_path / "a.h5")
    assert sorted(names) == ["group/soft", "hard", "outside", "x"]
    with pytest.raises(hs.FormatError, match="'nowhere' as a link to '/gone', which cannot be"):
        opened(tmp_path / "a.h5", "nowhere")


def test_a_missing_name_is_told_with_those_near(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["climate/data"] = np.arange(3)
        file["climate/labels"] = np.arange(3)
        file["other"] = np.arange(3)
    with pytest.raises(hs.FormatError, match=r"no dataset 'data': it has 'climate/data'$"):
        opened(tmp_path / "a.h5", "data")
    with pytest.raises(hs.FormatError, match="it is a group with 'data', 'labels'"):
        opened(tmp_path / "a.h5", "climate")


# How chunks are found and stored.


@LIBVERS
@pytest.mark.parametrize(
    ("shape", "maxshape", "chunks"),
    [
        ((6, 7), None, (6, 7)),
        ((6, 7), None, (4, 3)),
        ((6, 7), (None, 7), (4, 3)),
        ((6, 7), (None, None), (4, 3)),
        ((700, 3), (None, 3), (1, 3)),
        ((700, 3), None, (1, 2)),
        ((1,), (None,), (64,)),
    ],
)
def test_every_kind_of_chunk_index(tmp_path, libver, shape, maxshape, chunks):
    array = numbered(shape, "int32")
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        for name, how in {"x": {}, "z": {"compression": 1}}.items():
            file.create_dataset(name, data=array, maxshape=maxshape, chunks=chunks, **how)
    check(tmp_path / "a.h5", array)
    check(tmp_path / "a.h5", array, "z")


def test_an_implicit_chunk_index(tmp_path):
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_chunk((4, 3))
    dcpl.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    array = numbered((9, 10), "int16")
    check(created(tmp_path / "a.h5", array, dcpl, libver="latest"), array)


def test_chunks_at_the_edge_may_be_left_unfiltered(tmp_path):
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_chunk((4, 4))
    dcpl.set_shuffle()
    dcpl.set_deflate(6)
    library = ctypes.CDLL(h5p.__file__)
    assert library.H5Pset_chunk_opts(ctypes.c_int64(dcpl.id), 2) >= 0
    array = numbered((10, 9), "int32")
    check(created(tmp_path / "a.h5", array, dcpl, libver="latest"), array)


def test_filters_that_were_skipped_for_a_chunk(tmp_path):
    array = numbered((4, 8), "int16")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", (4, 8), "int16", chunks=(2, 8), compression=1)
        dataset[:2] = array[:2]
        dataset.id.write_direct_chunk((2, 0), array[2:].tobytes(), filter_mask=1)
    check(tmp_path / "a.h5", array)


def test_a_dataset_that_grew_and_shrank(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", (4, 8), "int16", maxshape=(None, None), chunks=(3, 3))
        dataset[...] = numbered((4, 8), "int16")
        dataset.resize((11, 5))
        dataset[10] = 9
        array = dataset[...]
    check(tmp_path / "a.h5", array)


def test_more_elements_than_32_bits_can_count(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        dataset = file.create_dataset("x", (3, 2**31), "uint8", chunks=(1, 2**20))
        dataset[2, -5:] = 8
    reader = opened(tmp_path / "a.h5")
    assert reader.shape == (3, 2**31)
    box = Box.of((1, 3), (2**31 - 7, 2**31))
    np.testing.assert_array_equal(read(reader, box), [[0] * 7, [0, 0, 8, 8, 8, 8, 8]])


# What the elements are.


@pytest.mark.parametrize(
    "dtype", ["bool", "float16", ">f2", "complex64", ">c16", "longdouble", ">u8", "int8"]
)
def test_numbers_of_every_kind(tmp_path, dtype):
    array = numbered((4, 5), "int8").astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = array
        file.create_dataset("y", data=array, chunks=(2, 2), compression=1)
    assert check(tmp_path / "a.h5", array).dtype == array.dtype.newbyteorder("=")
    check(tmp_path / "a.h5", array, "y")


def test_an_enumeration_is_its_numbers(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        kind = h5py.enum_dtype({"SEA": 0, "LAND": 1}, "uint8")
        file.create_dataset("x", data=np.uint8([0, 1, 1]), dtype=kind)
    check(tmp_path / "a.h5", np.uint8([0, 1, 1]))


def bfloat16():
    kind = h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


def int24():
    kind = h5t.STD_I32BE.copy()
    kind.set_precision(24)
    kind.set_offset(4)
    return kind


@pytest.mark.parametrize(
    ("kind", "array"),
    [(bfloat16(), np.float32([[1, -2.5], [0, 3]])), (int24(), np.int32([[1, -2], [70000, 0]]))],
    ids=["bfloat16", "24 bits"],
)
def test_numbers_that_numpy_does_not_have_are_converted(tmp_path, kind, array):
    check(created(tmp_path / "a.h5", array, dtype=kind), array)


@pytest.mark.parametrize(
    "data",
    [
        "words",
        np.array([b"ab", b"c"]),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]),
        np.array(["a", "bc"], h5py.string_dtype()),
        np.zeros(3, "V4"),
    ],
    ids=["text", "bytes", "records", "texts", "opaque"],
)
def test_what_is_no_number_is_refused(tmp_path, data):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = data
    with pytest.raises(hs.FormatError, match=r"a\.h5 has elements of type .* numbers were"):
        opened(tmp_path / "a.h5")


def test_spaces_without_dims_without_elements_and_without_anything(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["scalar"] = 3.5
        file["empty"] = np.zeros((0, 4))
        file.create_dataset("growing", (0, 4), "f4", maxshape=(None, 4), chunks=(2, 4))
        file["null"] = h5py.Empty("f4")
    assert read(opened(tmp_path / "a.h5", "scalar")) == 3.5
    assert read(opened(tmp_path / "a.h5", "empty")).shape == (0, 4)
    assert read(opened(tmp_path / "a.h5", "growing")).shape == (0, 4)
    with pytest.raises(hs.FormatError, match="no data in '/null'"):
        opened(tmp_path / "a.h5", "null")


# Files in a state.


def test_a_file_that_was_not_closed_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", data=np.arange(10))
        file.swmr_mode = True
        file.flush()
        copy = path.read_bytes()
    (tmp_path / "open.h5").write_bytes(copy)
    with pytest.raises(hs.FormatError, match=r"open\.h5 cannot be read as HDF5: .*open"):
        opened(tmp_path / "open.h5")


def test_a_file_of_a_family_is_refused(tmp_path):
    with h5py.File(tmp_path / "a%d.h5", "w", driver="family", memb_size=2000) as file:
        file["x"] = np.arange(1000)
    with pytest.raises(hs.FormatError, match="cannot be read as HDF5"):
        opened(tmp_path / "a0.h5")


def test_an_unknown_filter_warns_once_and_is_undone_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(format, "_has_warned", False)
    array = numbered((10, 9), "int32")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("x", "y"):
            file.create_dataset(name, data=array, chunks=(4, 4), scaleoffset=0)
    with pytest.warns(UserWarning, match=r"a\.h5: dataset 'x' has the filter scaleoffset"):
        reader = check(tmp_path / "a.h5", array)
    assert "slow" in reader.storage().note
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(tmp_path / "a.h5", array, "y")


@pytest.mark.filterwarnings("ignore:.*which only the HDF5 library can undo")
def test_two_compressors_one_upon_the_other(tmp_path):
    dcpl = h5p.create(h5p.DATASET_CREATE)
    dcpl.set_chunk((4, 4))
    dcpl.set_deflate(1)
    dcpl.set_filter(hdf5plugin.LZ4.filter_id, h5py.h5z.FLAG_OPTIONAL, (0,))
    array = numbered((10, 9), "int32")
    check(created(tmp_path / "a.h5", array, dcpl), array)


def test_storage_tells_chunks_and_filters(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        how = {"chunks": (4, 4), "compression": 5, "shuffle": True, "fletcher32": True}
        stored = file.create_dataset("x", data=numbered((9, 9), "int16"), **how)
        nbytes = stored.id.get_storage_size()
    storage = opened(tmp_path / "a.h5").storage()
    assert (storage.kind, storage.chunks, storage.nbytes) == ("chunked", (4, 4), nbytes)
    assert storage.compression == "shuffle + gzip(5) + fletcher32"


def test_samples_in_files_and_along_the_first_dim(tmp_path):
    array = numbered((3, 4, 5, 6), "int16")
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("full", data=array[number], chunks=(2, 2, 2))
            file["unitPar"] = np.float32([number, 1])
    with h5py.File(tmp_path / "many.hdf5", "w") as file:
        file["data"] = array
    one = hs.open(f"{tmp_path}/*.h5", sample="full", target="unitPar", axes="DHW")
    many = hs.open(tmp_path / "many.hdf5", axes="NDHW")
    box = (slice(1, 3), slice(0, 5), slice(2, 3))
    for number in range(3):
        np.testing.assert_array_equal(one.read(number, box), array[(number, *box)])
        np.testing.assert_array_equal(many.read(number, box), array[(number, *box)])
        np.testing.assert_array_equal(one.read(number, array="unitPar"), [number, 1])
