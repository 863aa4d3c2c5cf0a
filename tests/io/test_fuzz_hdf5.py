"""Damaged HDF5 files; `python -m hyperslab.testing.fuzz_readers` tries as many as you like."""

import pytest

from hyperslab.testing.fuzz_readers import fuzz


@pytest.mark.filterwarnings("ignore:.*which only the HDF5 library can undo")
def test_damaged_files_are_refused_or_read():
    report = fuzz("hdf5", 160)
    assert sum(report.total.values()) == 160
    assert report.total["refused"] > 50
    assert not report.faults, report.to_table()
