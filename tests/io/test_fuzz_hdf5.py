"""Damaged HDF5 files; `python -m hyperslab.testing.fuzz_readers` tries as many as you like."""

import pytest

from hyperslab.testing.fuzz_readers import fuzz


@pytest.mark.filterwarnings("ignore:.*which only the HDF5 library can undo")
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_read(count):
    report = fuzz("hdf5", count)
    assert sum(report.total.values()) == count
    assert report.total["refused"] > count // 4
    assert not report.faults, report.to_table()
