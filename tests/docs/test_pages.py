"""The files, commands and programs of the pages, in their order, in an empty folder.

A block that begins with a comment that is a file's name is written to that file. Lines that begin
with ``$`` are run; one that is followed by a line ``Error: ...`` must fail with it. Programs
without a name are run last, as one.
"""

import re
import subprocess
from pathlib import Path

import pytest

from hyperslab.trace import report
from hyperslab.trace.analysis.compare import Comparison
from hyperslab.train.preset_list import PRESETS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "data.md": ["slice.png"],
    "few-labels.md": ["runs/collisions/figures/filters.png", "runs/few/model.safetensors"],
    "plan.md": ["curves.png", "plan.html"],
    "quickstart.md": ["runs/quick/figures/predictions.png", "quick.safetensors"],
    "security.md": [],
    "speed.md": [],
    "trace.md": [
        *(f"runs/{run}/trace/rank00000.hstrace" for run in ("traced", "mine", "spans", "others")),
        *("slow.html", "slow.png", "both.html", "mine.json"),
    ],
    "your-own.md": ["runs/drops/figures/predictions.png", "runs/split/model.safetensors"],
}
"""What running each of them leaves behind."""


def blocks(page):
    return re.findall(r"```(python|toml|console)\n(.*?)```", (DOCS / page).read_text(), re.S)


def file_name(text):
    """The file that a block belongs in, if its first line says so."""
    found = re.match(r"# ([\w.]+\.(?:py|toml))\n", text)
    return found and found[1]


def commands(text):
    """Each command of a console block, and the error that it must end with, if any."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, *output = re.sub(r"\\\n\s*", "", part).splitlines()
        yield command, next((line for line in output if line.startswith("Error: ")), None)


def words_of(command, folder):
    """The words of a command as a shell in ``folder`` passes them on."""
    printed = subprocess.check_output(
        f"printf '%s\\0' {command}", shell=True, cwd=folder, text=True
    )
    return printed.split("\0")[:-1]


def run_console(run_python, text, folder):
    for command, error in commands(text):
        program, *arguments = words_of(command, folder)
        start = {"hyperslab": ["-m", "hyperslab"], "python": []}[program]
        done = run_python(*start, *arguments, cwd=folder)
        if error is None:
            assert done.returncode == 0, f"{command}: {done.stderr}"
        else:
            assert done.returncode == 1
            assert error in done.stderr.splitlines()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("data.md", marks=pytest.mark.slow),
        pytest.param("few-labels.md", marks=pytest.mark.slow),
        "plan.md",
        "security.md",
        "speed.md",
        pytest.param("trace.md", marks=pytest.mark.slow),
        pytest.param("quickstart.md", marks=pytest.mark.slow),
        pytest.param("your-own.md", marks=pytest.mark.slow),
    ],
)
def test_the_page_runs(page, tmp_path, run_python):
    program = []
    for kind, text in blocks(page):
        if kind == "console":
            run_console(run_python, text, tmp_path)
        elif name := file_name(text):
            (tmp_path / name).write_text(text)
        else:
            program.append(text)
    (tmp_path / "page.py").write_text("\n".join(program))
    done = run_python("page.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for left_behind in PAGES[page]:
        assert (tmp_path / left_behind).exists()


def test_the_planned_program_shows_its_parts_on_four_ranks(tmp_path, run_python):
    (text,) = [t for _, t in blocks("your-own.md") if file_name(t) == "planned.py"]
    (tmp_path / "planned.py").write_text(text)
    done = run_python("planned.py", cwd=tmp_path, num_ranks=4)
    assert all(each.returncode == 0 for each in done), done[0].stderr
    rows = [line for line in done[0].stdout.splitlines() if line.startswith("│")]
    cuts = [row.split("│")[3].strip() for row in rows]
    assert cuts == ["depth=4"] * 3 + ["channel=2 x depth=2"] * 3 + ["channel=4"]


def test_the_page_of_traces_shows_what_is_printed(tmp_path, monkeypatch):
    (text,) = [text for _, text in blocks("trace.md") if file_name(text) == "make_runs.py"]
    monkeypatch.chdir(tmp_path)
    exec(text, {})
    slow, fast = (report(tmp_path / "runs" / name) for name in ("slow", "fast"))
    page = (DOCS / "trace.md").read_text()
    assert slow.verdict in page
    assert Comparison(slow, fast).verdict in page


def test_every_page_is_run_but_those_with_tests_of_their_own():
    others = {"architecture.md", "operators.md", "tournaments.md"}
    assert {path.name for path in DOCS.glob("*.md")} == {*PAGES, *others}


def test_the_quick_start_lists_every_preset():
    page = (DOCS / "quickstart.md").read_text()
    for preset in PRESETS.values():
        row = f"| `{preset.name}` | {preset.about} | {preset.input} | {preset.num_parameters:,} |"
        assert f"{row} {preset.gflop:,} |" in page
