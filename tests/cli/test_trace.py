import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.testing.traces import MadeRun, write_trace

RUN = MadeRun()


@pytest.fixture
def run(tmp_path):
    write_trace(tmp_path / "run" / "trace", RUN.spans())
    return tmp_path / "run"


def trace(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_the_verdict_is_what_comes_first(run):
    result = trace("report", run)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.startswith("Ranks waited 74% of epoch 0 for reads")
    words = "\n".join(rest)
    for each in ("exposed", "hidden", "all-reduce", "what if", "slowest files", "data/f0.h5"):
        assert each.replace("f0", "0") in words
    assert "reader-0" not in words
    assert "reader-0" in trace("report", run, "--ranks").stdout


def test_json_of_a_run_and_of_several(run, tmp_path):
    told = json.loads(trace("report", run, "--json").stdout)
    assert [each["epoch"] for each in told["epochs"]] == [0, 1, 2]
    write_trace(tmp_path / "more", replace(RUN, num_ranks=4).spans())
    several = json.loads(trace("report", run, tmp_path / "more", "--json").stdout)
    assert [each["num_ranks"] for each in several["runs"]] == [2, 4]
    assert "on 2 ranks" in several["verdict"]


def test_files_of_one_folder_are_one_run(run):
    files = sorted((run / "trace").iterdir())
    told = json.loads(trace("report", *files, "--json").stdout)
    assert told["num_ranks"] == 2


def test_a_page_and_a_picture_are_written(run, tmp_path):
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    result = trace("report", run, "--html", page, "--png", picture)
    assert result.exit_code == 0
    assert f"Page: {page}" in result.stderr
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_tells_what_changed(run, tmp_path):
    write_trace(tmp_path / "fast", replace(RUN, read=0.01).spans())
    result = trace("compare", run, tmp_path / "fast")
    assert result.stdout.startswith("fast is faster than run by a factor of 1.37")
    told = json.loads(trace("compare", run, tmp_path / "fast", "--json").stdout)
    assert told["runs"] == ["run", "fast"]


def test_what_is_not_there_is_one_line(tmp_path):
    for arguments in (["report", tmp_path / "no"], ["compare", tmp_path, tmp_path / "no"]):
        result = trace(*arguments)
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1
        assert "trace" in result.stderr


def test_a_trace_with_nothing_in_it_is_one_line(tmp_path):
    write_trace(tmp_path / "run" / "trace", [[]])
    result = trace("report", tmp_path / "run")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].startswith("Error: run: nothing was recorded")
    assert len(result.stderr.splitlines()) == 1


def test_pictures_of_other_kinds_are_refused_before_anything_is_shown(run, tmp_path):
    result = trace("report", run, "--png", tmp_path / "t.foo")
    assert result.exit_code == 1
    assert not result.stdout
    assert "--png writes .png" in result.stderr
