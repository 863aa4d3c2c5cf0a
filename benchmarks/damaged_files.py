"""Damaged files of every format, read in processes that may die.

    python benchmarks/damaged_files.py --format hdf5 --count 2000

A damaged file is refused, or read right, or read wrong where nothing in it could show that. All
else is a fault: a crash, a hang, an exception that is no ``HyperslabError``, and wrong data that a
checksum would have shown. The exit code is 1 if there was one.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from fuzzing import good_files
from fuzzing.good_files import Specimen

from hyperslab.errors import HyperslabError
from hyperslab.io.reader import find_format
from hyperslab.layout import Box, Span
from hyperslab.testing.specimens import random_boxes, read, slices

FORMATS: dict[str, Callable[[], list[Specimen]]] = {
    "hdf5": good_files.hdf5,
    "nifti": good_files.nifti,
    "npy": good_files.npy,
    "tfrecord": good_files.tfrecord,
    "zarr": good_files.zarr_arrays,
}
"""What makes the specimens of a format."""

REFUSED, RIGHT, WRONG_UNSEEN = "refused", "right", "wrong, and nothing could show it"
CRASH, HANG, EXCEPTION = "CRASH", "HANG", "OTHER EXCEPTION"
WRONG_SEEN = "WRONG THOUGH A CHECKSUM SHOWS IT"
FAULTS = (CRASH, HANG, EXCEPTION, WRONG_SEEN)
MAX_SHOWN = 20
OUTCOMES = (REFUSED, RIGHT, WRONG_UNSEEN, *FAULTS)


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


def fuzz(
    format: str, count: int, *, seed: int = 0, limit_seconds: int = 90, only: str = ""
) -> Report:
    """Damages the format's specimens ``count`` times in all, and reads each damaged file."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [specimen for specimen in FORMATS[format]() if only in specimen.label]
        for number, specimen in enumerate(chosen):
            home = Path(folder) / str(number)
            home.mkdir()
            seeds = [f"{seed}-{i}" for i in range(number, count, len(chosen))]
            read_damaged(DamagedFile(format, specimen, home), seeds, limit_seconds, report)
    return report


# A process that may crash, hang, or want all memory

MAX_MEMORY = 8 * 2**30
MAX_READ = 2**20
"""Elements, of an array that damage has made large."""
NUM_BOXES = 3


def read_damaged(
    trial: DamagedFile, seeds: Sequence[str], limit_seconds: int, report: Report
) -> None:
    """Adds to ``report`` what comes of the damage that each of ``seeds`` does to the file."""
    left, label = list(seeds), trial.specimen.label
    while left:
        outcomes, status = _in_child(trial, left, limit_seconds)
        for seed, (outcome, detail) in zip(left, outcomes, strict=False):
            report.add(label, seed, outcome, detail)
        left = left[len(outcomes) :]
        if left:  # the process died of this one
            died = HANG if status == -signal.SIGALRM else CRASH
            report.add(label, left.pop(0), died, f"status {status}")


def _in_child(
    trial: DamagedFile, seeds: Sequence[str], limit_seconds: int
) -> tuple[list[tuple[str, str]], int]:
    """The outcomes of ``seeds``, up to the one that killed the process, and its status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        gc.freeze()  # to look through all that the parent has made would copy it
        os.close(reading)
        _limit_memory()
        with os.fdopen(writing, "w", buffering=1) as pipe:
            for seed in seeds:
                signal.alarm(limit_seconds)
                pipe.write(json.dumps(trial.outcome(seed)) + "\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        outcomes = [tuple(json.loads(line)) for line in pipe]
    _, status = os.waitpid(pid, 0)
    return outcomes, os.waitstatus_to_exitcode(status)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class DamagedFile:
    """One specimen, damaged again and again."""

    def __init__(self, format: str, specimen: Specimen, home: Path) -> None:
        self.specimen, self._path = specimen, specimen.write(home)
        self._cls = find_format(self._path, format)
        self._good = {p: p.read_bytes() for p in sorted(home.rglob("*")) if p.is_file()}
        self._name = specimen.name
        if self._name is None:
            (self._name,) = self._cls.names(self._path, **specimen.options)
        guarded = specimen.guarded
        self._guarded = {p: list(guarded(p)) if guarded else [] for p in self._good}

    def outcome(self, seed: str) -> tuple[str, str]:
        """What comes of the damage that ``seed`` does, and a word on it."""
        dice = random.Random(seed)
        for path, content in self._good.items():
            path.write_bytes(content)
        path = dice.choice(list(self._good))
        bad = mutated(self._good[path], dice, self.specimen.marks)
        path.write_bytes(bad)
        try:
            wrong = self._read_wrong(dice)
        except HyperslabError as error:
            return REFUSED, str(error)
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            return EXCEPTION, f"{type(error).__name__}: {error}"
        if not wrong:
            return RIGHT, ""
        return (WRONG_SEEN if self._is_guarded(path, bad) else WRONG_UNSEEN), wrong

    def _read_wrong(self, dice: random.Random) -> str:
        """What is wrong with the data read, if anything is."""
        expected = self.specimen.array
        assert self._name is not None
        self._cls.names(self._path, **self.specimen.options)
        (reader,) = self._cls.open(self._path, [self._name], **self.specimen.options)
        if reader.shape != expected.shape or reader.dtype != expected.dtype:
            size = max(1, int(MAX_READ ** (1 / max(1, len(reader.shape)))))
            read(reader, Box(tuple(Span(0, min(size, n)) for n in reader.shape)))
            return f"{reader.dtype} {reader.shape}"
        boxes = [
            *random_boxes(expected.shape, dice.randrange(NUM_BOXES)),
            Box.whole(expected.shape),
        ]
        for box in boxes:
            if not np.array_equal(read(reader, box), expected[slices(box)]):
                return f"wrong in {box.spans}"
        return ""

    def _is_guarded(self, path: Path, bad: bytes) -> bool:
        """Whether all that was damaged is guarded by a checksum."""
        good = self._good[path]
        if len(bad) != len(good):
            return self.specimen.is_length_guarded
        places = np.flatnonzero(np.frombuffer(good, np.uint8) != np.frombuffer(bad, np.uint8))
        return all(any(p in span for span in self._guarded[path]) for p in places.tolist())


# Ways to damage a file

REACH = 200
"""How far from a mark the things that it marks may lie."""


def mutated(content: bytes, dice: random.Random, marks: Sequence[bytes] = ()) -> bytes:
    """``content`` with some damage: to its metadata, which ``marks`` begin, or anywhere."""
    found = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        dice.choice(_KINDS)(found, _place(found, dice, marks), dice)
    return bytes(found)


def _place(content: bytearray, dice: random.Random, marks: Sequence[bytes]) -> int:
    """Half of all places lie behind a mark, a quarter near the beginning."""
    size = max(1, len(content))
    near = [at for mark in marks for at in _occurrences(content, mark)]
    if near and dice.random() < 0.5:
        return min(size - 1, dice.choice(near) + dice.randrange(REACH))
    return dice.randrange(min(size, 2048) if dice.random() < 0.5 else size)


def _occurrences(content: bytearray, mark: bytes) -> list[int]:
    found: list[int] = []
    at = content.find(mark)
    while at >= 0 and len(found) < 100:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


def _flip(content: bytearray, place: int, dice: random.Random) -> None:
    if place < len(content):
        content[place] ^= 1 << dice.randrange(8)


def _overwrite(content: bytearray, place: int, dice: random.Random) -> None:
    content[place : place + 1] = dice.randbytes(1)


def _zero(content: bytearray, place: int, dice: random.Random) -> None:
    count = min(dice.choice([1, 4, 8, 64, 512, 4096]), len(content) - place)
    content[place : place + count] = bytes(max(0, count))


def _extreme(content: bytearray, place: int, dice: random.Random) -> None:
    """A number of 1 to 8 bytes becomes its largest, the largest signed, or one near."""
    size = dice.choice([1, 2, 4, 8])
    bits = dice.choice([8 * size, 8 * size - 1, 8 * size - 2])
    number = (2**bits - dice.choice([1, 1, 2, 8])) % 256**size
    stored = number.to_bytes(size, "little")[:: dice.choice([1, -1])]
    content[place : place + size] = stored[: max(0, len(content) - place)]


def _truncate(content: bytearray, place: int, dice: random.Random) -> None:
    del content[dice.choice([place, len(content) - dice.randint(1, 64)]) :]


def _duplicate(content: bytearray, place: int, dice: random.Random) -> None:
    """A block from elsewhere lies here too."""
    source, size = dice.randrange(len(content) or 1), dice.choice([4, 8, 64, 512])
    block = content[source : source + size][: len(content) - place]
    content[place : place + len(block)] = block


def _remove(content: bytearray, place: int, dice: random.Random) -> None:
    del content[place : place + dice.randint(1, 16)]


def _insert(content: bytearray, place: int, dice: random.Random) -> None:
    content[place:place] = dice.randbytes(dice.randint(1, 16))


_KINDS: Sequence[Callable[[bytearray, int, random.Random], None]] = (
    *(_flip, _flip, _flip, _overwrite, _overwrite, _zero, _zero, _extreme, _extreme),
    *(_truncate, _duplicate, _duplicate, _remove, _insert),
)


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
