"""Trace files from those of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import ConfigError
from hyperslab.partial import explained_writing, make_folder
from hyperslab.trace.file import SUFFIX, FileContent, TraceFile
from hyperslab.trace.merge import find_contents

_SPANS_A_CHUNK = 1 << 16


class Imported(NamedTuple):
    num_files: int
    num_spans: int
    notes: list[str]


def import_traces(paths: Sequence[Path], folder: Path) -> Imported:
    """Writes a trace file to ``folder`` for each process that ``paths`` tell of."""
    if there := list(folder.glob(f"*{SUFFIX}")):
        raise ConfigError(
            f"{folder} has {len(there)} trace files already: give a folder that has none"
        )
    contents = find_contents(paths)
    make_folder(folder)
    told = [content for content in contents if content.blocks]
    for number, content in enumerate(told):
        rank = content.facts.get("rank", 0)
        _write(content, folder / f"rank{rank:05}-{number:05}{SUFFIX}")
    notes = [note for content in contents for note in content.notes]
    return Imported(len(told), sum(content.num_spans for content in told), notes)


def _write(content: FileContent, target: Path) -> None:
    """The file takes its name when it is whole."""
    partial = target.with_suffix(".part")
    with explained_writing(target):
        partial.unlink(missing_ok=True)
        file = TraceFile(partial)
        try:
            file.facts(content.facts)
            file.strings(content.strings[1:])
            file.threads(content.threads)
            for spans in content.blocks:
                for at in range(0, len(spans), _SPANS_A_CHUNK):
                    file.spans(spans[at : at + _SPANS_A_CHUNK])
            partial.replace(target)
        finally:
            file.close()
            partial.unlink(missing_ok=True)
