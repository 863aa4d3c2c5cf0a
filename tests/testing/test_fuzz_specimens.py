import pytest

from hyperslab.testing.fuzz_readers import RIGHT, fuzz, specimens_of

FORMATS = ["npy", "nifti", "tfrecord", "zarr"]


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused_or_read(format):
    report = fuzz(format, 40)
    assert report.faults == []
    assert report.total.total() == 40


@pytest.mark.parametrize("format", FORMATS)
def test_specimens_are_read_right_before_they_are_damaged(format, tmp_path, monkeypatch):
    monkeypatch.setattr("hyperslab.testing.fuzz_process.mutated", lambda content, *_: content)
    report = fuzz(format, len(specimens_of(format)))
    assert set(report.total) == {RIGHT}
