import os
import signal
import time

import damaged_files
import numpy as np
import pytest
from damaged_files import OUTCOMES, RIGHT, Specimen, fuzz

from hyperslab.errors import FormatError
from hyperslab.io import ArrayReader, Format, Storage, register_format
from hyperslab.io.reader import _REGISTERED

GOOD = b"\1" * 64


class Whole(ArrayReader):
    shape, dtype = (64,), np.dtype("u1")

    def __init__(self, content):
        self.content = content

    def read(self, box, out):
        out[...] = np.frombuffer(self.content, np.uint8)[slice(*box.spans[0])]

    def storage(self):
        return Storage(kind="contiguous", nbytes=64)


class Careless(Format):
    """Does something else for every kind of damage to the first byte."""

    @classmethod
    def names(cls, path):
        return ["x"]

    @classmethod
    def open(cls, path, names):
        content = path.read_bytes()
        if len(content) != 64:
            raise FormatError(f"{path} has {len(content)} bytes")
        if content[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if content[0] == 255:
            time.sleep(100)
        if content[0] > 1:
            raise ZeroDivisionError
        return [Whole(content)]


def write(folder):
    (folder / "a.careless").write_bytes(GOOD)
    return folder / "a.careless"


def specimens():
    array = np.frombuffer(GOOD, np.uint8)
    return [Specimen(label="x", write=write, array=array, guarded=lambda path: [range(32, 64)])]


@pytest.fixture
def careless(monkeypatch):
    register_format("careless", Careless)
    monkeypatch.setitem(damaged_files.FORMATS, "careless", specimens)
    yield
    del _REGISTERED["careless"]


def test_every_outcome_is_told_apart(careless):
    report = fuzz("careless", 600, limit_seconds=1)
    assert sum(report.total.values()) == 600
    assert set(report.total) == set(OUTCOMES)
    assert len(report.faults) == sum(report.total[name] for name in damaged_files.FAULTS)
    assert "CRASH: x, seed 0-" in report.to_table() + "\n".join(report.faults)


FORMATS = ["npy", "nifti", "tfrecord", "zarr"]


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused_or_read(format, count):
    report = fuzz(format, count)
    assert report.faults == []
    assert report.total.total() == count


@pytest.mark.every(3)
@pytest.mark.parametrize("format", FORMATS)
def test_specimens_are_read_right_before_they_are_damaged(format, tmp_path, monkeypatch):
    monkeypatch.setattr("damaged_files.mutated", lambda content, *_: content)
    report = fuzz(format, len(damaged_files.FORMATS[format]()))
    assert set(report.total) == {RIGHT}
