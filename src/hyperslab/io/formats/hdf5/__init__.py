"""HDF5 files: boxes read past the HDF5 library, by many threads."""

from hyperslab.io.formats.hdf5.format import Hdf5 as Hdf5
