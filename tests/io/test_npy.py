from typing import ClassVar

import numpy as np

from hyperslab.testing import ReaderContract


class TestNpy(ReaderContract):
    format = "npy"
    file_name = "array.npy"
    dtypes = ("uint8", "int16", "bool", "float16", "float32", "int64", "complex64")
    ways: ClassVar = {
        "little-endian": {},
        "big-endian": {"order": ">"},
        "fortran": {"fortran": True},
        "big-endian-fortran": {"order": ">", "fortran": True},
    }

    def write(self, path, array, *, order="<", fortran=False):
        stored = array.astype(array.dtype.newbyteorder(order))
        np.save(path, np.asfortranarray(stored) if fortran else stored)
        return path
