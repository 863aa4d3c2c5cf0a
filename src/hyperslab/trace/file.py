"""Trace files: one a process, appended to while it runs, readable up to the last whole chunk.

A file is ``MAGIC`` and chunks: type, number of bytes, crc32 of these and of the payload, payload.
``FACT`` is JSON about the process and its clock, ``STRS`` a JSON list of strings and ``THRD`` one
of threads, which go on where the last such chunk ended; ``SPAN`` holds records of dtype ``SPAN``.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.span import SPAN, Category, Thread, Tier

MAGIC = b"hstrace1"
SUFFIX = ".hstrace"
_HEAD = struct.Struct("<4sQI")
_TYPE_AND_NBYTES = 12
_MOST_NBYTES = 1 << 31


class TraceFile:
    """Appends chunks to a new file at ``path``; a file that is there is an error.

    Every chunk is handed to the system at once, so a killed process loses nothing of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._write(MAGIC)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Later facts of a name replace earlier ones; those of lists are added."""
        self._chunk(b"FACT", json.dumps(facts).encode())

    def strings(self, strings: Sequence[str]) -> None:
        """The next strings, from number 1."""
        self._chunk(b"STRS", json.dumps(list(strings)).encode())

    def threads(self, threads: Sequence[Thread]) -> None:
        """The next threads, from number 0."""
        self._chunk(b"THRD", json.dumps([[each.tid, each.name] for each in threads]).encode())

    def spans(self, spans: NDArray[Any]) -> None:
        """Records of dtype ``SPAN`` of this process; ``process`` is 0."""
        self._chunk(b"SPAN", np.ascontiguousarray(spans, SPAN).tobytes())

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _chunk(self, chunk_type: bytes, payload: bytes) -> None:
        head = _HEAD.pack(chunk_type, len(payload), 0)
        crc = zlib.crc32(payload, zlib.crc32(head[:_TYPE_AND_NBYTES]))
        self._write(_HEAD.pack(chunk_type, len(payload), crc) + payload)

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._descriptor, view) :]


def printable(text: str) -> str:
    """``text``; bytes that are no UTF-8, as names of files may have, are escapes in it."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


@dataclass
class FileContent:
    """What a trace file holds, up to its first damaged chunk."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    strings: list[str] = field(default_factory=lambda: [""])
    threads: list[Thread] = field(default_factory=list)
    blocks: list[NDArray[Any]] = field(default_factory=list)
    """Spans, as they were written."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_spans(self) -> int:
        return sum(map(len, self.blocks))


def read_trace_file(path: Path) -> FileContent:
    """What can be read of a trace file; ``notes`` tell what cannot."""
    content = FileContent(path)
    try:
        size = path.stat().st_size
        raw: NDArray[np.uint8] = np.fromfile(path, np.uint8)
    except OSError as error:
        content.notes.append(f"{path} cannot be read ({error.strerror}): it is left out")
        return content
    if not size:
        content.notes.append(f"{path} is empty: its process wrote nothing, and is left out")
        return content
    data = raw.data
    if bytes(data[: len(MAGIC)]) != MAGIC:
        content.notes.append(f"{path} is no trace file, or its start is damaged: it is left out")
        return content
    at = len(MAGIC)
    while at < size:
        wrong = "ends within a chunk"
        if at + _HEAD.size <= size:
            chunk_type, nbytes, crc = _HEAD.unpack_from(data, at)
            stop = at + _HEAD.size + nbytes
            if nbytes <= _MOST_NBYTES and stop <= size:
                payload = data[at + _HEAD.size : stop]
                found = zlib.crc32(payload, zlib.crc32(data[at : at + _TYPE_AND_NBYTES]))
                wrong = _add(content, chunk_type, payload) if found == crc else "is damaged"
                if not wrong:
                    at = stop
                    continue
            elif nbytes > _MOST_NBYTES or not chunk_type.isalpha():
                wrong = "is damaged"
        content.notes.append(
            f"{path} {wrong} at byte {at} of {size}: {content.num_spans} spans before it were "
            f"read, {size - at} bytes were left out"
        )
        break
    return content


def _add(content: FileContent, chunk_type: bytes, payload: memoryview) -> str:
    """Takes a chunk into ``content``; what is wrong with it, if anything is."""
    try:
        if chunk_type == b"SPAN":
            content.blocks.append(_checked(np.frombuffer(payload, SPAN), content))
        elif chunk_type == b"STRS":
            content.strings += map(str, json.loads(bytes(payload)))
        elif chunk_type == b"THRD":
            told = json.loads(bytes(payload))
            content.threads += [Thread(tid=int(tid), name=str(name)) for tid, name in told]
        elif chunk_type == b"FACT":
            for name, value in dict(json.loads(bytes(payload))).items():
                before = content.facts.get(name)
                both = isinstance(before, list) and isinstance(value, list)
                content.facts[name] = before + value if both else value
    except (ValueError, TypeError):
        return "holds a chunk that cannot be understood"
    return ""


def _checked(spans: NDArray[Any], content: FileContent) -> NDArray[Any]:
    """Raises ``ValueError`` if a span points to what is not there."""
    bounds = {
        "name": len(content.strings),
        "layer": len(content.strings),
        "thread": max(1, len(content.threads)),
        "category": len(Category),
        "tier": len(Tier),
    }
    if len(spans) and any(int(spans[name].max()) >= bound for name, bound in bounds.items()):
        raise ValueError("a span points to what is not there")
    return spans
