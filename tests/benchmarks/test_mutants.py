import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "cli comm dist_ops io kernels layout models nn partial.py planner store synth testing train "
    "trace"
)


@pytest.fixture(autouse=True)
def mutation(monkeypatch):
    """Has the modules of benchmarks/mutation found."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mutation"]:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path):
    """A checkout of one function and a test that looks at one of its values."""
    source, tests = tmp_path / "src" / "hyperslab", tmp_path / "tests"
    source.mkdir(parents=True)
    tests.mkdir()
    (source / "__init__.py").touch()
    (source / "sums.py").write_text("def total(values):\n    return sum(values) + 0\n")
    (tests / "test_sums.py").write_text(
        "from hyperslab.sums import total\n\n\n"
        "def test_two():\n    assert total([1, 2]) == 3\n\n\n"
        "def test_none():\n    assert total([]) == 0\n"
    )
    return tmp_path


def test_every_mutant_fits_the_source_and_its_tests_are_there():
    from mutation import MUTANTS

    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.package for mutant in MUTANTS} == set(PACKAGES.split())
    for mutant in MUTANTS:
        text = mutant.mutated(ROOT)
        if mutant.file.endswith(".py"):
            compile(text, mutant.file, "exec")
        for path in mutant.test_paths:
            file, _, test = path.partition("::")
            assert f"def {test}" in (ROOT / file).read_text(), mutant.name


@pytest.mark.parametrize(("old", "count"), [("minus", 0), ("t", 3)])
def test_a_mutant_whose_text_is_not_there_once_is_stale(project, old, count):
    from mutation.mutant import Mutant, StaleError

    mutant = Mutant("sums.py", old, "", "test_sums.py", "nothing")
    with pytest.raises(StaleError, match=f"sums.py: nothing: '{old}' occurs {count} times"):
        mutant.mutated(project)


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_or_survives(project):
    from mutation.mutant import Mutant
    from mutation.trial import judge

    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    seen, unseen = (
        judge(Mutant("sums.py", "+ 0", new, "test_sums.py", "wrong"), project)
        for new in ("+ len(values)", "- 0")
    )
    assert (seen.killed, seen.by) == (True, "tests/test_sums.py::test_two")
    assert not unseen.killed
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


def test_a_mutant_that_hangs_is_killed_and_said_to_hang(project):
    from mutation.mutant import Mutant
    from mutation.trial import judge

    hanging = "    while True:\n        pass\n"
    mutant = Mutant("sums.py", "    return sum(values) + 0\n", hanging, "test_sums.py", "endless")
    verdict = judge(mutant, project, timeout_seconds=1)
    assert (verdict.killed, verdict.by) == (True, "nothing: it hung for 1 s")


@pytest.mark.slow
def test_a_mutant_whose_tests_are_all_slow_is_judged_by_these(project):
    from mutation.mutant import Mutant
    from mutation.trial import judge

    file = project / "tests" / "test_sums.py"
    file.write_text(f"import pytest\n\npytestmark = pytest.mark.slow\n{file.read_text()}")
    (project / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    verdict = judge(Mutant("sums.py", "+ 0", "+ len(values)", "test_sums.py", "wrong"), project)
    assert (verdict.killed, verdict.by) == (True, "tests/test_sums.py::test_two")


@pytest.mark.slow
def test_a_mutant_without_tests_is_an_error(project):
    from mutation.mutant import Mutant
    from mutation.trial import judge

    (project / "tests" / "test_sums.py").write_text("")
    with pytest.raises(SystemExit, match="none of the tests is there"):
        judge(Mutant("sums.py", "+ 0", "- 0", "test_sums.py", "nothing"), project)
