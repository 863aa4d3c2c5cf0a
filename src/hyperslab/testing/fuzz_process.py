"""Reads damaged files in a process that may crash, hang, or want all memory."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hyperslab.errors import HyperslabError
from hyperslab.io.reader import find_format
from hyperslab.layout import Box, Span
from hyperslab.testing.fuzz_readers import (
    CRASH,
    EXCEPTION,
    HANG,
    REFUSED,
    RIGHT,
    WRONG_SEEN,
    WRONG_UNSEEN,
    Specimen,
)
from hyperslab.testing.mutations import mutated
from hyperslab.testing.specimens import random_boxes, read, slices

MAX_MEMORY = 8 * 2**30
MAX_READ = 2**20
"""Elements, of an array that damage has made large."""
NUM_BOXES = 3

Add = Callable[[str, str, str, str], None]


def run(
    format: str,
    specimen: Specimen,
    home: Path,
    seeds: Sequence[str],
    limit_seconds: int,
    add: Add,
) -> None:
    """Tells ``add`` what comes of the damage that each of ``seeds`` does to the specimen."""
    trial = Trial(format, specimen, specimen.write(home), home)
    left = list(seeds)
    while left:
        outcomes, status = _in_child(trial, left, limit_seconds)
        for seed, (outcome, detail) in zip(left, outcomes, strict=False):
            add(specimen.label, seed, outcome, detail)
        left = left[len(outcomes) :]
        if left:  # the process died of this one
            died = HANG if status == -signal.SIGALRM else CRASH
            add(specimen.label, left.pop(0), died, f"status {status}")


def _in_child(
    trial: Trial, seeds: Sequence[str], limit_seconds: int
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


class Trial:
    """One specimen, damaged again and again."""

    def __init__(self, format: str, specimen: Specimen, path: Path, home: Path) -> None:
        self._cls = find_format(path, format)
        self._specimen, self._path = specimen, path
        self._good = {p: p.read_bytes() for p in sorted(home.rglob("*")) if p.is_file()}
        self._name = specimen.name
        if self._name is None:
            (self._name,) = self._cls.names(path, **specimen.options)
        guarded = specimen.guarded
        self._guarded = {p: list(guarded(p)) if guarded else [] for p in self._good}

    def outcome(self, seed: str) -> tuple[str, str]:
        """What comes of the damage that ``seed`` does, and a word on it."""
        dice = random.Random(seed)
        for path, content in self._good.items():
            path.write_bytes(content)
        path = dice.choice(list(self._good))
        bad = mutated(self._good[path], dice, self._specimen.marks)
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
        expected = self._specimen.array
        assert self._name is not None
        self._cls.names(self._path, **self._specimen.options)
        (reader,) = self._cls.open(self._path, [self._name], **self._specimen.options)
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
            return self._specimen.is_length_guarded
        places = np.flatnonzero(np.frombuffer(good, np.uint8) != np.frombuffer(bad, np.uint8))
        return all(any(p in span for span in self._guarded[path]) for p in places.tolist())
