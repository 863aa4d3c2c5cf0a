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
    print(json.dumps({{"values": list(map(float, first.split("/")))}}))

def bars(report):
    value, *limit = report["values"]
    return [("a ratio", value, "{sign}", 1.1, *limit)]
"""


@pytest.fixture
def bars(tmp_path, monkeypatch):
    """``bars(sign, values)`` runs a benchmark that measures one value after another.

    A value may have a limit: ``"1.2/1.15"``.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bars as module

    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "SCRIPTS", ("fake",))

    def run(sign, *values, as_table=False):
        (tmp_path / "fake.py").write_text(SCRIPT.format(sign=sign))
        (tmp_path / "fake.txt").write_text(" ".join(map(str, values)))
        done = CliRunner().invoke(module.main, [] if as_table else ["--json"])
        return done.exit_code, done.stdout if as_table else json.loads(done.stdout)[0]

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


@pytest.mark.parametrize(
    ("sign", "values", "verdict", "is_beyond"),
    [
        ("<=", ("1.05/1.2",), "met", True),
        ("<=", ("1.3/1.0", "1.3/1.2"), "MISSED", False),
        ("<=", ("1.3/1.25", "1.4/1.21"), "MISSED, limit 1.21", True),
        (">=", ("0.9/1.2", "0.9/0.95"), "MISSED", False),
        (">=", ("0.8/1.0", "0.9/0.95"), "MISSED, limit 1", True),
        (">=", ("0.8", "0.9"), "MISSED", False),
    ],
)
def test_only_a_bar_beyond_its_limit_is_out_of_reach(bars, sign, values, verdict, is_beyond):
    code, row = bars(sign, *values)
    assert (row["verdict"], row["beyond_limit"]) == (verdict, is_beyond)
    assert code == (verdict != "met")


def test_the_table_shows_limits_and_says_which_bars_are_beyond_them(bars):
    code, table = bars("<=", "1.3/1.25", "1.4/1.21", as_table=True)
    assert code == 1
    assert "limit" in table.splitlines()[2]
    (row,) = [line for line in table.splitlines() if "a ratio" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "fake",
        "a ratio",
        "1.3",
        "<= 1.1",
        "1.21",
        "MISSED, limit 1.21",
    ]
