import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "io_study.py"
ROW = re.compile(
    r"^(local|global) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)%$", re.M
)


@pytest.mark.slow
def test_the_study_reads_files_once_and_shows_local_beside_global_shuffling(run_python, tmp_path):
    small = ["--folder", "study", "--ranks", "1", "2", "--hep", "48", "--climate", "6"]
    done = run_python(EXAMPLE, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(done.stdout)
    assert [(shuffle, int(num)) for shuffle, num, *_ in rows] == [
        *(("local", 1), ("local", 2), ("global", 1), ("global", 2)),  # of particle physics
        *(("global", 1), ("global", 2)),  # of climate
    ]
    for _, _, first, later, _, seconds, share in rows:
        assert float(first) > 0 == float(later)
        assert float(seconds) > 0 <= float(share) <= 100
    assert "with local and" in done.stdout
    assert "on 1 rank" in done.stdout
    for name in ("hep.html", "hep.png", "climate.html", "climate.png"):
        assert (tmp_path / "study" / name).stat().st_size > 10_000
    again = run_python(EXAMPLE, *small, cwd=tmp_path)
    assert again.returncode == 2
    assert "study has a study already" in again.stderr
