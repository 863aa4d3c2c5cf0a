"""``make fuzz``, on tests that fail when they should."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CONFTEST = """
import os
from hypothesis import settings
settings.register_profile("fuzz", database=None)
settings.load_profile(os.environ["HYPERSLAB_EXAMPLES"])
"""
TESTS = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**6))
def test_drawn(x):
    assert x < 10**6 - 1 {never}
"""


@pytest.fixture
def fuzz(tmp_path, monkeypatch):
    """``fuzz(text)`` looks for examples that fail in a project whose one test file is that."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fuzz as module

    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)

    def run(text, *arguments):
        (tmp_path / "tests" / "test_it.py").write_text(text)
        part = ["--only", "tests/test_it.py", "--json", *arguments]
        done = CliRunner().invoke(module.main, part)
        return done.exit_code, json.loads(done.stdout)

    yield run
    sys.modules.pop("fuzz")


@pytest.mark.slow
def test_what_fails_is_told_with_the_command_that_repeats_it(fuzz):
    code, report = fuzz(TESTS.format(never="and x != x"), "--seed", "5")
    assert code == 1
    again = "python benchmarks/fuzz.py --seed 5 --only 'tests/test_it.py'"
    assert report["failed"] == [{"part": "tests/test_it.py", "seed": 5, "again": again}]


@pytest.mark.slow
def test_what_holds_is_well(fuzz):
    assert fuzz(TESTS.format(never="or True")) == (0, {"well": 1, "failed": []})


def test_every_file_that_draws_examples_is_a_part(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fuzz as module

    parts = module.parts()
    sys.modules.pop("fuzz")
    assert {
        "tests/nn/ops/windows/test_pad.py",
        "tests/io/formats/test_npy.py",
        "networks",
        "zarr files",
    } <= {*parts}
    assert "tests/cli/test_main.py" not in parts
