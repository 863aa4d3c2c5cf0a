"""Damaged HDF5 files; `benchmarks/damaged_files.py` tries as many as you like."""

import pytest
from damaged_files import fuzz


@pytest.mark.filterwarnings("ignore:.*which only the HDF5 library can undo")
@pytest.mark.slow
def test_damaged_files_are_refused_or_read():
    report = fuzz("hdf5", 300)
    assert sum(report.total.values()) == 300
    assert report.total["refused"] > 100
    assert not report.faults, report.to_table()
