"""The rule, the format and the mutant of CONTRIBUTING.md do what it says."""

import re
import textwrap
from pathlib import Path

import pytest

from hyperslab.testing import Team
from hyperslab.testing.sweep import Effort, sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    return (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(scope="module")
def files(page):
    """Its programs, by the file that each belongs in."""
    return dict(re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.S))


def run_tests(rule, code):
    """Runs each test for all values of its one parameter, where the rule is registered."""
    exec(rule, {})
    names = {}
    exec(code, names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))
    (values,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")
    for value in values:
        test(value)


def test_the_test_of_the_rule_passes(files):
    rule, code = (
        files["src/hyperslab/nn/ops/reduce/trace.py"],
        files["tests/nn/ops/reduce/test_trace.py"],
    )
    with Team(2) as team:
        team.run(run_tests, rule, code)


def test_the_sweep_finds_the_rule_right_on_every_split(page, files, tmp_path, monkeypatch):
    assert "`python -m hyperslab.testing.sweep trace`" in page
    (tmp_path / "my_rules.py").write_text(files["src/hyperslab/nn/ops/reduce/trace.py"])
    monkeypatch.syspath_prepend(tmp_path)
    findings = sweep(["trace"], Effort(samples=3, trials=6), modules=["my_rules"])
    assert findings.of("right")
    assert not findings.of("refused") + findings.of("wrong")


def test_the_format_passes_the_tests_that_it_inherits(page, files, tmp_path, run_python):
    assert '`"nrrd": ((".nrrd",), "hyperslab.io.formats.nrrd:Nrrd")`' in page
    (tmp_path / "nrrd.py").write_text(files["src/hyperslab/io/formats/nrrd.py"])
    (tmp_path / "test_nrrd.py").write_text(
        "import hyperslab.io, nrrd\n"
        "hyperslab.io.register_format('nrrd', nrrd.Nrrd)\n" + files["tests/io/formats/test_nrrd.py"]
    )
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_the_mutant_is_one_of_ours(page):
    (mutant,) = re.findall(r"```python\n(Mutant\(.*?\n\))\n```", page, re.S)
    assert (
        textwrap.indent(mutant, "    ")
        in (ROOT / "benchmarks" / "mutation" / "arithmetic.py").read_text()
    )
