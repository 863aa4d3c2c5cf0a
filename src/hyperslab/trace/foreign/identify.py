"""Reads a file of whatever tool wrote it, which is told by what is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyperslab.errors import FormatError
from hyperslab.trace.file import MAGIC, SUFFIX, FileContent, read_trace_file
from hyperslab.trace.foreign import csv_table, darshan, dftracer, posix_file, torch_profiler
from hyperslab.trace.foreign.texts import TextFile


class Tool(NamedTuple):
    """A tool whose files can be read."""

    name: str
    fits: Callable[[str], bool]
    """Whether a file that begins with such a text is one of its."""
    read: Callable[[TextFile], list[FileContent]]


TOOLS = (
    Tool(
        "PyTorch profiler trace (json)",
        torch_profiler.is_torch_profiler,
        torch_profiler.read_torch_profiler,
    ),
    Tool("dftracer trace (pfw)", dftracer.is_dftracer, dftracer.read_dftracer),
    Tool(
        "output of darshan-parser or darshan-dxt-parser", darshan.is_darshan, darshan.read_darshan
    ),
    Tool("table of spans (csv)", csv_table.is_csv_table, csv_table.read_csv_table),
)


def read_contents(path: Path) -> list[FileContent]:
    """What a trace file tells, ours or another tool's; a content for each process in it."""
    try:
        with path.open("rb") as file:
            first = file.read(len(MAGIC))
    except OSError:
        return [read_trace_file(path)]
    if first == posix_file.MAGIC:
        return [posix_file.read_posix_file(path, np.fromfile(path, np.uint8))]
    if first == MAGIC or not first or path.suffix == SUFFIX:
        return [read_trace_file(path)]
    text = TextFile(path)
    start = text.start()
    tool = next((tool for tool in TOOLS if tool.fits(start)), None)
    if tool is None:
        raise FormatError(f"{path} is no trace that can be read: {_what_it_is(start)}")
    contents = tool.read(text) or [FileContent(path)]
    if not any(content.blocks for content in contents):
        text.notes.append(f"{path}, a {tool.name}, has no spans: it is left out")
    contents[0].notes += text.notes
    return contents


def _what_it_is(start: str) -> str:
    if '"traceEvents"' in start:
        return (
            "a Chrome trace, but nothing in it says that PyTorch's profiler wrote it "
            "(schemaVersion, deviceProperties, baseTimeNanoseconds or distributedInfo)"
        )
    names = ", ".join(tool.name for tool in TOOLS)
    return f"it is neither a *{SUFFIX} file nor a {names}; {csv_table.WANTED}"
