import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_gets_the_same_losses_from_two_processes_and_from_one():
    command = [sys.executable, str(DEMO), "--steps", "12", "--size", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout
    assert "2 processes, split along depth" in done.stdout
