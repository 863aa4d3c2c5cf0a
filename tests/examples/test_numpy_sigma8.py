import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_sigma8.py"


@pytest.mark.slow
def test_plain_numpy_learns_from_the_loader_without_torch():
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "torch was not imported" in done.stdout
    assert float(re.search(r"correlation (-?\d\.\d+)", done.stdout)[1]) > 0.3
