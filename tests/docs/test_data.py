"""The programs and commands of the page run, in their order, in an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
HYPERSLAB = Path(sys.executable).with_name("hyperslab")


def blocks():
    return re.findall(r"```(python|console)\n(.*?)```", PAGE.read_text(), re.S)


def run_console(text, folder):
    for line in text.splitlines():
        command = line.removeprefix("$ ").replace("hyperslab", str(HYPERSLAB), 1)
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def test_the_page_runs(tmp_path):
    """Commands first, then the programs as one: no program makes what a command reads."""
    program = []
    for kind, text in blocks():
        if kind == "python":
            program.append(text)
        else:
            run_console(text, tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n".join(program))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "slice.png").exists()


def test_the_page_has_commands_and_programs():
    kinds = [kind for kind, _ in blocks()]
    assert kinds.count("console") >= 4
    assert kinds.count("python") >= 4
