"""The program of docs/tournaments.md."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tournaments.md"


def test_the_program_of_the_page_runs_on_four_ranks(tmp_path, run_python):
    program = tmp_path / "blur.py"
    program.write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    done = run_python(program, cwd=tmp_path, num_ranks=4)
    assert not any(each.returncode for each in done), done[0].stderr
    lines = sorted(line for each in done for line in each.stdout.splitlines())
    assert [line[:18] for line in lines] == [
        f"trainer {trainer}, match {number}" for trainer in (0, 1) for number in (1, 2, 3)
    ]
    first = [line for line in lines if "match 1:" in line]
    assert sum("loses" in line for line in first) <= 2
    assert all(1e-4 <= float(line.rpartition("lr ")[2]) <= 1e-1 for line in lines)


def test_the_page_names_every_setting():
    from dataclasses import fields

    from hyperslab.train.config import TournamentConfig

    text = PAGE.read_text()
    assert all(f"{setting.name}" in text for setting in fields(TournamentConfig))
