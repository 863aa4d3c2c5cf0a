"""Runs tests on copies of a checkout, with and without a mistake in the source."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mutation.mutant import Mutant

NOT_COPIED = (".*", "build", "dist", "results", "*.egg-info", "runs")
QUICK = "not gpu and not slow"
SLOW = "not gpu"
NO_TESTS = 5
"""How pytest ends where all tests are left out."""
TIMEOUT_SECONDS = 180
"""Far above what the tests of an area take; those that wait for another rank give up after 60."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed: bool
    by: str
    """The first test that failed, or that it hung."""
    seconds: float


@dataclass(frozen=True)
class Tests:
    """How a run of pytest ended."""

    passed: bool
    first_failure: str
    output: str


class Copy:
    """A copy of the checkout ``root`` in ``folder``, to which all that is run in it is confined."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))

    def check(self) -> None:
        """Raises unless Python finds the package here, and not where it may be installed."""
        command = [sys.executable, "-c", "import hyperslab; print(hyperslab.__file__)"]
        found = subprocess.run(
            command, cwd=self.root, env=self._env, capture_output=True, text=True, check=True
        ).stdout.strip()
        if Path(found).resolve() != (self.root / "src/hyperslab/__init__.py").resolve():
            raise SystemExit(f"the tests would run on {found}, not on the copy in {self.root}")

    def run_tests(self, paths: Sequence[str], timeout_seconds: float) -> Tests:
        """Runs those of the tests ``paths`` that ``make test`` runs, up to the first that fails.

        Where all of them are slow, these.
        """
        code, output = self._run_pytest(paths, QUICK, timeout_seconds)
        if code == NO_TESTS:
            code, output = self._run_pytest(paths, SLOW, timeout_seconds)
        return _ended(code, output, timeout_seconds)

    def _run_pytest(
        self, paths: Sequence[str], marked: str, timeout_seconds: float
    ) -> tuple[int | None, str]:
        """Its exit status, None if it hung, and what it printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marked, "--tb=line"]
        same_each_time = ["-p", "no:cacheprovider", "--hypothesis-seed=0"]
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for all who inherit it
            process = subprocess.Popen(
                [*command, *same_each_time, *paths],
                cwd=self.root,
                env=self._env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # what it has started, and left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()

    @property
    def _env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(self.root / "src")}


def _ended(code: int | None, output: str, timeout_seconds: float) -> Tests:
    if code == NO_TESTS:
        raise SystemExit(f"none of the tests is there: {output}")
    if code is None:
        return Tests(False, f"nothing: it hung for {timeout_seconds:g} s", output)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    first = failed[0].split(" ", 1)[1].split(" - ")[0] if failed else "pytest itself"
    return Tests(code == 0, first, output)


@contextmanager
def scratch_copy(root: Path) -> Iterator[Copy]:
    """A copy that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        yield Copy(root, Path(folder) / "checkout")


def judge(mutant: Mutant, root: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> Verdict:
    """Whether the tests of its area notice ``mutant`` in a copy of ``root``."""
    start = time.monotonic()
    with scratch_copy(root) as copy:
        mutant.apply(copy.root)
        tests = copy.run_tests(mutant.test_paths, timeout_seconds)
    return Verdict(mutant, not tests.passed, tests.first_failure, time.monotonic() - start)
