"""How long programs lived that are not ours: their time is more than that of their reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperslab.trace.file import SUFFIX, FileContent, TraceFile
from hyperslab.trace.launcher import rank_of_launcher
from hyperslab.trace.recorder import Clock
from hyperslab.trace.span import Category, Thread, empty_spans

NAME = "program"
_RAN = "ran"
"""A fact: when a whole program was started, and when it had ended."""


def write_life(folder: Path, command: Sequence[str], ran: tuple[int, int]) -> None:
    """A file that tells when ``command`` was started and had ended, by the clock of ``Clock``."""
    clock = Clock.of_host()
    file = TraceFile(folder / f"program-{clock.host}-{os.getpid()}{SUFFIX}")
    try:
        file.facts(
            {
                _RAN: [*ran],
                "launched_as": rank_of_launcher(os.environ),
                "clock": clock.name,
                "program": " ".join(command),
            }
        )
    finally:
        file.close()


def add_lives(contents: Sequence[FileContent]) -> list[FileContent]:
    """``contents``, where each rank has a span of its program's life, of category ``other``.

    It lasts from the start of the first process to the end of what ``hyperslab trace run`` waited
    for; where that is not told, to the last record. Files that tell nothing else are gone.
    """
    lives = [content for content in contents if _is_life(content)]
    others = [content for content in contents if not _is_life(content)]
    alive: dict[tuple[Any, ...], list[FileContent]] = {}
    for content in others:
        if "begun" in content.facts and content.blocks:
            who = (content.facts["clock"], content.facts["rank"])
            alive.setdefault(who, []).append(content)
    for of_rank in alive.values():
        _add(of_rank, [life.facts[_RAN] for life in lives if _is_of(life, of_rank[0])])
        for content in of_rank:
            del content.facts["begun"]  # or files that are written of it would be given another
    return others or list(contents)


def _is_of(life: FileContent, content: FileContent) -> bool:
    """Whether it is of all ranks of a launcher within it, or of just this one."""
    is_near = life.facts.get("clock") == content.facts["clock"]
    return is_near and life.facts.get("launched_as") in (None, content.facts["launched_as"])


def _is_life(content: FileContent) -> bool:
    told = content.facts.get(_RAN)
    return isinstance(told, list) and len(told) == 2 and all(type(each) is int for each in told)


def _add(of_rank: Sequence[FileContent], ran: Sequence[Sequence[int]]) -> None:
    blocks = [block for content in of_rank for block in content.blocks]
    starts = [content.facts["begun"] for content in of_rank if content.facts["begun"]]
    starts += [int(each["start"].min()) for each in blocks]
    stops = [int((each["start"] + each["duration"]).max()) for each in blocks]
    if not ran:
        of_rank[0].notes.append(
            f"when the program of rank {of_rank[0].facts['rank']} ended is not known: its time is "
            "counted to its last record"
        )
    start = min([*starts, *(told[0] for told in ran)])
    span = empty_spans(1)
    span["start"], span["duration"] = start, max([*stops, *(told[1] for told in ran)]) - start
    first = of_rank[0]
    span["category"], span["thread"] = Category.other, len(first.threads)
    span["name"] = len(first.strings)
    first.strings.append(NAME)
    first.threads.append(Thread(name=NAME))
    first.blocks.append(span)
