import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from hyperslab.testing.traces import Made, write_trace
from hyperslab.trace import Category, report
from hyperslab.trace.analysis.tables import to_parts

FILE = "data/a-rather-long-folder-name/and-another-one/run-000012345678/sample.h5"
CATEGORIES = [each for each in Category if each not in (Category.step, Category.epoch)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    spans, at = [], 0.0
    for epoch in range(3):
        for number, category in enumerate(CATEGORIES):
            stop = at + 0.2 + 0.05 * number
            spans.append(Made(category, at, stop, FILE, nbytes=5_000_000, epoch=epoch))
            at = stop
    folder = Path(tmp_path_factory.mktemp("many"))
    write_trace(folder / "trace", [spans, spans])
    return report(folder)


def drawn(reports, width):
    told = io.StringIO()
    console = Console(file=told, width=width)
    for part in to_parts(reports, ranks=True):
        if not isinstance(part, Text):
            console.print(part)
    return told.getvalue().split("\n")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 300])
def test_names_of_rows_are_whole_on_every_screen(found, width):
    lines = drawn([found], width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    firsts = {line.split()[0] for line in lines if line.strip()}
    assert {"epoch", "rank", "read", "all-reduce", "evaluation", "all", "slowest"} <= firsts
    assert {"0", "1", "2"} <= firsts


def test_what_has_no_column_is_put_together(found):
    lines = drawn([found], 80)
    head = next(line for line in lines if line.startswith(" epoch")).split()
    row = lines[lines.index(next(line for line in lines if line.startswith(" epoch"))) + 2].split()
    shares = [int(each.removesuffix("%")) for each in row if each.endswith("%")]
    assert head[-1] == "rest"
    assert len(shares) == len(head) - 2
    assert abs(sum(shares) - 100) <= len(shares)
    assert "rest" not in " ".join(drawn([found], 300))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_several_runs_have_their_names(found, width):
    lines = drawn([found, found], width)
    assert sum(line.startswith(f" {found.name} ") for line in lines) >= 2
    assert max(map(len, lines)) <= width
