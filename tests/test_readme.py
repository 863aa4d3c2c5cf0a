import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def example() -> str:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.S)[0]


def run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_prints_the_same_loss_on_two_processes_and_on_one(tmp_path, run_python):
    split, alone = tmp_path / "split.py", tmp_path / "alone.py"
    split.write_text(example())
    alone.write_text(example().replace("depth=2", "depth=1"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = run([*torchrun, str(split)])
    assert two.count("dim 2 split over depth=2") == 2
    losses = re.findall(r"loss (\d\.\d+)", two + run_python(alone, cwd=tmp_path).stdout)
    assert len(losses) == 3
    assert max(map(float, losses)) - min(map(float, losses)) < 1e-6


def test_the_example_is_short():
    lines = [
        line for line in example().splitlines() if line and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 15
