import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str, text: str | None = None) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text or README.read_text(), re.S)


def example() -> str:
    return blocks("python")[0]


def test_the_example_prints_the_same_loss_on_two_processes_and_on_one(tmp_path, run_python):
    split, alone = tmp_path / "split.py", tmp_path / "alone.py"
    split.write_text(example())
    alone.write_text(example().replace("depth=2", "depth=1"))
    two = "".join(done.stdout for done in run_python(split, cwd=tmp_path, num_ranks=2))
    assert two.count("dim 2 split over depth=2") == 2
    losses = re.findall(r"loss (\d\.\d+)", two + run_python(alone, cwd=tmp_path).stdout)
    assert len(losses) == 3
    assert max(map(float, losses)) - min(map(float, losses)) < 1e-6


@pytest.mark.slow
def test_torchrun_starts_the_example(tmp_path):
    (tmp_path / "split.py").write_text(example())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "split.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dim 2 split over depth=2") == 2


def test_the_example_is_short():
    lines = [
        line for line in example().splitlines() if line and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 15


def test_the_example_goes_on_with_data_that_the_commands_before_make(tmp_path, run_python):
    text = README.read_text().partition("## Data, a box at a time")[2]
    (commands,), (loop,) = blocks("console", text), blocks("python", text)
    made, told = re.findall(r"^\$ hyperslab (.*)$", small(commands), re.M)
    for command in (made, told):
        words = [word for each in command.split() for word in expanded(each, tmp_path)]
        done = run_python("-m", "hyperslab", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    program = tmp_path / "train.py"
    program.write_text(example() + loop + 'print(tuple(x.shape), f"{loss.item():.7f}")\n')
    two = run_python(program, cwd=tmp_path, num_ranks=2)
    assert not any(done.returncode for done in two), two[0].stderr
    losses = [re.search(r"\(4, 4, 16, 16, 16\) (\d.\d+)\n", done.stdout)[1] for done in two]
    assert losses[0] == losses[1]


def small(commands: str) -> str:
    found = commands.replace("--size 64 --count 16", "--size 16 --count 4")
    assert found != commands
    return found


def expanded(word: str, folder: Path) -> list[str]:
    """What a shell makes of a word."""
    if "*" not in word:
        return [word]
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word))
