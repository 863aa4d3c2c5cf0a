"""Damaged files of every format, read in processes that may die.

    python -m hyperslab.testing.fuzz_readers --format hdf5 --count 2000

A damaged file is refused, or read right, or read wrong where nothing in it could show that. All
else is a fault: a crash, a hang, an exception that is no ``HyperslabError``, and wrong data that a
checksum would have shown. The exit code is 1 if there was one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from numpy.typing import NDArray

FORMATS = {
    "hdf5": "hyperslab.testing.fuzz_hdf5:specimens",
    "nifti": "hyperslab.testing.fuzz_nifti:specimens",
    "npy": "hyperslab.testing.fuzz_npy:specimens",
    "tfrecord": "hyperslab.testing.fuzz_tfrecord:specimens",
    "zarr": "hyperslab.testing.fuzz_zarr:specimens",
}
"""Where the specimens of a format are made; add yours."""

REFUSED, RIGHT, WRONG_UNSEEN = "refused", "right", "wrong, and nothing could show it"
CRASH, HANG, EXCEPTION = "CRASH", "HANG", "OTHER EXCEPTION"
WRONG_SEEN = "WRONG THOUGH A CHECKSUM SHOWS IT"
FAULTS = (CRASH, HANG, EXCEPTION, WRONG_SEEN)
MAX_SHOWN = 20
OUTCOMES = (REFUSED, RIGHT, WRONG_UNSEEN, *FAULTS)


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A good file, to be damaged."""

    label: str
    write: Callable[[Path], Path]
    """Writes it into an empty folder, and says what to open: a file or a folder."""
    array: NDArray[Any]
    """What is to be read of it."""
    name: str | None = None
    """Of the array, where the file has several."""
    options: dict[str, Any] = field(default_factory=dict)
    """To open it with."""
    marks: Sequence[bytes] = ()
    """Byte strings near which the metadata lies."""
    guarded: Callable[[Path], Iterable[range]] | None = None
    """The bytes of one of its files that a checksum guards, of those that reading must check."""
    is_length_guarded: bool = False
    """Whether bytes that were cut out or put in must be noticed too."""


@dataclass
class Report:
    """How often each outcome came about, by specimen, and how to see each fault again."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, label: str, seed: str, outcome: str, detail: str) -> None:
        self.counts.setdefault(label, Counter())[outcome] += 1
        if outcome in FAULTS:
            self.faults.append(f"{outcome}: {label}, seed {seed}: {detail}")

    @property
    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())

    def to_table(self) -> str:
        width = max(map(len, [*self.counts, "all"])) + 2
        head = f"{'':{width}}" + "".join(f"{name.split(',')[0][:17]:>18}" for name in OUTCOMES)
        rows = [*sorted(self.counts.items()), ("all", self.total)]
        lines = [
            f"{label:{width}}" + "".join(f"{counts[name]:18d}" for name in OUTCOMES)
            for label, counts in rows
        ]
        return "\n".join([head, *lines, *self.faults[:MAX_SHOWN]])

    def to_json(self) -> str:
        counts = {label: dict(found) for label, found in self.counts.items()}
        return json.dumps({"counts": counts, "faults": self.faults}, indent=1)


def specimens_of(format: str) -> list[Specimen]:
    module, _, function = FORMATS[format].partition(":")
    found: list[Specimen] = getattr(import_module(module), function)()
    return found


def fuzz(
    format: str, count: int, *, seed: int = 0, limit_seconds: int = 90, only: str = ""
) -> Report:
    """Damages the format's specimens ``count`` times in all, and reads each damaged file."""
    from hyperslab.testing.fuzz_process import run

    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [specimen for specimen in specimens_of(format) if only in specimen.label]
        for number, specimen in enumerate(chosen):
            home = Path(folder) / str(number)
            home.mkdir()
            mine = range(number, count, len(chosen))
            run(format, specimen, home, [f"{seed}-{i}" for i in mine], limit_seconds, report.add)
    return report


@click.command()
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--count", default=2000, show_default=True, help="Damaged files a format.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", default="", help="Specimens whose label has this in it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def main(formats: Sequence[str], count: int, seed: int, only: str, as_json: bool) -> None:
    """Reads damaged files of the given formats, or of all."""
    found_faults = False
    for format in formats or FORMATS:
        report = fuzz(format, count, seed=seed, only=only)
        click.echo(report.to_json() if as_json else f"{format}\n{report.to_table()}")
        found_faults |= bool(report.faults)
    sys.exit(int(found_faults))


if __name__ == "__main__":
    main()
