"""``make bench``, on benchmarks that measure nothing."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import json, pathlib, sys
times = pathlib.Path(__file__).with_suffix(".txt")
if __name__ == "__main__":
    assert sys.argv[1:] == ["--quick", "--json"]
    first, *rest = times.read_text().split()
    times.write_text(" ".join(rest))
    print(json.dumps({{"value": float(first)}}))

def bars(report):
    return [("a ratio", report["value"], "{sign}", 1.1)]
"""


@pytest.fixture
def bars(tmp_path, monkeypatch):
    """``bars(sign, values)`` runs a benchmark that measures one value after another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bars as module

    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "SCRIPTS", ("fake",))

    def run(sign, *values):
        (tmp_path / "fake.py").write_text(SCRIPT.format(sign=sign))
        (tmp_path / "fake.txt").write_text(" ".join(map(str, values)))
        done = CliRunner().invoke(module.main, ["--json"])
        return done.exit_code, json.loads(done.stdout)[0]

    yield run
    sys.modules.pop("bars")


@pytest.mark.parametrize(("sign", "value"), [("<=", 1.05), (">=", 1.2)])
def test_a_bar_that_is_met_is_measured_once(bars, sign, value):
    code, row = bars(sign, value)
    assert (code, row["met"], row["measured"]) == (0, True, value)


@pytest.mark.parametrize(("sign", "first", "second"), [("<=", 1.2, 1.0), (">=", 1.0, 1.2)])
def test_the_better_of_two_measurements_counts(bars, sign, first, second):
    assert bars(sign, first, second)[1]["measured"] == second
    assert bars(sign, first, second)[0] == 0


@pytest.mark.parametrize(("sign", "values"), [("<=", (1.3, 1.2)), (">=", (0.9, 1.0))])
def test_a_bar_that_is_missed_twice_fails(bars, sign, values):
    code, row = bars(sign, *values)
    assert (code, row["met"], row["measured"]) == (1, False, values[1])
