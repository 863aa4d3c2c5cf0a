from hyperslab.testing import ReaderContract


class TestRaw(ReaderContract):
    format = "raw"
    file_name = "array.raw"
    dtypes = ("uint8", "int16", "bool", "float64")

    def write(self, path, array):
        array.tofile(path)
        return path

    def options(self, array):
        return {"dtype": array.dtype.str, "shape": array.shape}
