import json

import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.trace import load_trace


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(
        "rank,epoch,category,start,duration,bytes\n0,0,io,1,2,100\n1,0,forward,3,1,0\n1,x\n"
    )
    return path


def trace(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_traces_of_other_tools_become_trace_files_and_these_files_for_other_tools(tmp_path, table):
    result = trace("import", table, "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert "2 spans of 2 processes" in result.stdout
    assert "has 1 lines that cannot be understood" in result.stderr
    assert len(load_trace(tmp_path / "mine")) == 2
    result = trace("export", tmp_path / "mine", "-o", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert [each["cat"] for each in events if each["ph"] == "X"] == ["read", "compute"]
    result = trace("report", table, "--json")
    assert json.loads(result.stdout)["epochs"][0]["categories"]["read"]["bytes"] == 100


def test_what_cannot_be_read_or_written_is_one_line(tmp_path, table):
    (tmp_path / "notes.txt").write_text("hello\n")
    result = trace("export", tmp_path / "notes.txt", "-o", tmp_path / "out.json")
    assert result.exit_code == 1
    assert "is no trace that can be read" in result.stderr
    result = trace("export", table, "-o", tmp_path / "out.xml")
    assert "does not say by its suffix what to write" in result.stderr
    assert trace("import", table, "-o", tmp_path / "mine").exit_code == 0
    result = trace("import", table, "-o", tmp_path / "mine")
    assert "has 2 trace files already" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt", "times.csv"]
