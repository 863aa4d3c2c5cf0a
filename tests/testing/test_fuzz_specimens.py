import pytest

from hyperslab.testing.fuzz_readers import RIGHT, fuzz, specimens_of

FORMATS = ["npy", "nifti", "tfrecord", "zarr"]


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_are_refused_or_read(format, count):
    report = fuzz(format, count)
    assert report.faults == []
    assert report.total.total() == count


@pytest.mark.parametrize("format", FORMATS)
def test_specimens_are_read_right_before_they_are_damaged(format, tmp_path, monkeypatch):
    monkeypatch.setattr("hyperslab.testing.fuzz_process.mutated", lambda content, *_: content)
    report = fuzz(format, len(specimens_of(format)))
    assert set(report.total) == {RIGHT}
