"""HDF5 files of every layout and filter do what all formats must."""

from typing import ClassVar

import h5py
import hdf5plugin
import pytest

from hyperslab.testing.reader_contract import ReaderContract


class Hdf5Contract(ReaderContract):
    format = "hdf5"
    file_name = "array.h5"
    num_damaged = 40

    def write(self, path, array, byte_order="<", libver="earliest", **how):
        if how.get("chunks"):
            how["chunks"] = tuple(min(max(1, n), 16) for n in array.shape)
        stored = array.astype(array.dtype.newbyteorder(byte_order))
        with h5py.File(path, "w", libver=libver) as file:
            file.create_dataset("group/x", data=stored, **how)
        return path


class TestContiguous(Hdf5Contract):
    ways: ClassVar = {
        "contiguous": {},
        "big-endian": {"byte_order": ">"},
        "latest": {"libver": "latest"},
    }


class TestChunked(Hdf5Contract):
    ways: ClassVar = {
        "chunks": {"chunks": True},
        "gzip": {"chunks": True, "compression": "gzip", "libver": "latest"},
        "shuffle + gzip": {"chunks": True, "compression": "gzip", "shuffle": True},
        "lzf": {"chunks": True, "compression": "lzf", "byte_order": ">"},
        "lz4": {"chunks": True, **hdf5plugin.LZ4(nbytes=1000)},
    }


class TestChecksummed(Hdf5Contract):
    dtypes = ("uint8", "int16")
    shapes = ((7,), (1, 1, 1))
    ways: ClassVar = {
        "fletcher32": {"chunks": True, "fletcher32": True},
        "gzip + fletcher32": {
            "chunks": True,
            "compression": "gzip",
            "shuffle": True,
            "fletcher32": True,
            "libver": "latest",
        },
    }


class TestPlugins(Hdf5Contract):
    dtypes = ("uint8", "float64")
    shapes = ((7,), (1, 1, 1))
    num_damaged = 25
    ways: ClassVar = {
        "bitshuffle": {"chunks": True, **hdf5plugin.Bitshuffle(cname="none")},
        "bitshuffle + lz4": {"chunks": True, **hdf5plugin.Bitshuffle()},
        "bitshuffle + zstd": {"chunks": True, **hdf5plugin.Bitshuffle(cname="zstd")},
        "blosc": {"chunks": True, **hdf5plugin.Blosc()},
        "zstd": {"chunks": True, **hdf5plugin.Zstd()},
        "bzip2": {"chunks": True, **hdf5plugin.BZip2()},
    }


@pytest.mark.filterwarnings("ignore:.*which only the HDF5 library can undo")
class TestThroughTheLibrary(Hdf5Contract):
    dtypes = ("int16", "int32")
    shapes = ((7,), (1, 1, 1))
    num_damaged = 15
    ways: ClassVar = {
        "scaleoffset": {"chunks": True, "scaleoffset": 0},
        "blosc2": {"chunks": True, **hdf5plugin.Blosc2()},
    }
