"""Files of programs that are not ours: what ``posix.c`` recorded of their opens, reads, closes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.trace.file import FileContent
from hyperslab.trace.launcher import rank_of_launcher
from hyperslab.trace.span import Category, Flag, Thread, Tier, empty_spans

MAGIC = b"hsposix1"
_LOST_AT, _TEXT_AT, _HEADER_NBYTES = 8, 16, 1 << 16

_SLOT = np.dtype(
    [
        ("type", "<u2"),
        ("op", "<u2"),
        ("thread", "<u4"),
        ("file", "<u4"),
        ("count", "<u4"),
        ("start", "<u8"),
        ("duration", "<u8"),
        ("nbytes", "<u8"),
    ]
)
_TEXT_IN_SLOT = _SLOT.itemsize - 2
_THREAD, _NAMED, _OPEN, _READ, _CLOSE, _MAP, _UNSEEN, _TEXT = 1, 2, 3, 4, 5, 6, 7, 15
_CALLS = (_OPEN, _READ, _CLOSE, _MAP)

_OPS = (
    *("", "open", "openat", "fopen", "freopen", "read", "pread", "readv", "preadv", "fread"),
    *("fgets", "getline", "sendfile", "copy_file_range", "mmap", "close", "fclose"),
)


def read_posix_file(path: Path, raw: NDArray[np.uint8]) -> FileContent:
    """What can be read of a file of which ``raw`` are the bytes."""
    content = FileContent(path)
    if len(raw) < _HEADER_NBYTES:
        content.notes.append(
            f"{path} ends within its header, after {len(raw)} bytes: it is left out"
        )
        return content
    content.facts.update(_facts(raw[_TEXT_AT:_HEADER_NBYTES].tobytes()))
    body = raw[_HEADER_NBYTES:]
    if len(body) % _SLOT.itemsize:
        content.notes.append(
            f"{path} is cut off at byte {len(raw)}, within a record: what comes before it was read"
        )
    slots = body[: len(body) // _SLOT.itemsize * _SLOT.itemsize].view(_SLOT)
    _add_slots(content, slots)
    if lost := int(raw[_LOST_AT:_TEXT_AT].view("<u8")[0]):
        content.notes.append(
            f"{path} lacks {lost} calls: there was no room for them, on the disk or in the file"
        )
    return content


def mark_main_loops(contents: Iterable[FileContent]) -> None:
    """Says of reads of main threads that their program waited in them.

    Those of processes that were forked, or that another one with the same rank started, such as the
    workers of a ``DataLoader``, are not: who waits for them is not recorded.
    """
    foreign = [content for content in contents if "parent" in content.facts]
    there = {_who(content, "pid") for content in foreign}
    num_workers = 0
    for content in foreign:
        if content.facts["forked"] or _who(content, "parent") in there:
            num_workers += bool(content.blocks)
            continue
        main = [i for i, each in enumerate(content.threads) if each.tid == content.facts["pid"]]
        for spans in content.blocks:
            waited = np.isin(spans["thread"], main) & (spans["category"] == Category.read)
            spans["flags"][waited] |= np.uint16(Flag.exposed)
    if num_workers:
        foreign[0].notes.append(
            f"{num_workers} processes read for others: nothing tells whether these waited for it"
        )


def _who(content: FileContent, name: str) -> tuple[Any, ...]:
    return (content.facts["clock"], content.facts["launched_as"], content.facts[name])


def _facts(text: bytes) -> dict[str, Any]:
    pairs = [each.partition("=") for each in text.decode(errors="replace").split("\0") if each]
    told = {name: value for name, _, value in pairs if name != "environ"}
    variables = dict(value.partition("=")[::2] for name, _, value in pairs if name == "environ")
    host = told.get("host", "")

    def number(name: str) -> int:
        return int(told[name]) if told.get(name, "").isdecimal() else 0

    return {
        "rank": rank_of_launcher(variables) or 0,
        "launched_as": rank_of_launcher(variables),
        "pid": number("pid"),
        "parent": number("parent"),
        "forked": number("forked"),
        "begun": number("begun"),
        "host": host,
        "clock": f"{host} {told.get('boot', '').strip()}",
        "clocks": [[number("monotonic"), number("unix")]],
        "program": told.get("program", "").replace("\x1f", " ").strip(),
    }


def _add_slots(content: FileContent, slots: NDArray[Any]) -> None:
    types = slots["type"]
    names = _texts(slots, np.flatnonzero((types == _NAMED) | (types == _OPEN)))
    numbers: dict[str, int] = {}
    known = np.zeros(max((file for file, _ in names), default=0) + 1, np.uint32)
    for file, name in names:
        known[file] = numbers.setdefault(name, len(numbers) + 1)
    first_op = len(numbers) + 1
    content.strings += [*numbers, *_OPS[1:]]

    calls = slots[np.isin(types, _CALLS)]
    right = (calls["file"] < len(known)) & (calls["op"] < len(_OPS))
    right &= (calls["start"] < 1 << 63) & (calls["duration"] < 1 << 62)
    right[right] = known[calls["file"][right]] > 0
    if not right.all():
        content.notes.append(
            f"{content.path} is damaged: {int((~right).sum())} of {len(right)} calls were left out"
        )
        calls = calls[right]
    tids, threads = np.unique(calls["thread"], return_inverse=True)
    told = dict(_texts(slots, np.flatnonzero(types == _THREAD), of="thread"))
    content.threads += [Thread(tid=tid, name=told.get(tid, "")) for tid in tids.tolist()]
    if len(calls):
        content.blocks.append(_spans(calls, threads, known, first_op))
    _tell_unseen(content, slots, calls, known)


def _spans(
    calls: NDArray[Any], threads: NDArray[np.intp], known: NDArray[np.uint32], first_op: int
) -> NDArray[Any]:
    spans = empty_spans(len(calls))
    is_map, is_open = calls["type"] == _MAP, calls["type"] == _OPEN
    spans["start"], spans["duration"] = calls["start"], calls["duration"]
    spans["nbytes"] = np.where(calls["type"] == _READ, calls["nbytes"], 0)
    spans["name"] = known[calls["file"]]
    spans["layer"] = np.where(calls["op"] > 0, first_op - 1 + calls["op"], 0)
    spans["thread"] = threads
    spans["category"] = np.where(is_map, Category.other, Category.read)
    spans["tier"] = np.where(is_map, Tier.none, Tier.file)
    spans["flags"] = np.where(is_open, Flag.opening, 0)
    return spans


def _texts(slots: NDArray[Any], heads: NDArray[np.intp], of: str = "file") -> list[tuple[int, str]]:
    """What ``heads`` are about, and the texts that follow them; those that are damaged are not."""
    texts = np.ascontiguousarray(slots).view(np.uint8).reshape(-1, _SLOT.itemsize)[:, 2:]
    found = []
    for head in heads.tolist():
        nbytes = int(slots["count"][head])
        stop = head + 1 + -(-nbytes // _TEXT_IN_SLOT)
        if stop <= len(slots) and (slots["type"][head + 1 : stop] == _TEXT).all():
            text = texts[head + 1 : stop].tobytes()[:nbytes].decode(errors="replace")
            found.append((int(slots[of][head]), text))
    return found


def _tell_unseen(
    content: FileContent, slots: NDArray[Any], calls: NDArray[Any], known: NDArray[np.uint32]
) -> None:
    """Notes about what such a recorder cannot see."""
    who = f"process {content.facts['pid']} ({content.facts['program']})"
    maps = calls[calls["type"] == _MAP]
    if len(maps):
        mapped = np.unique(known[maps["file"]])
        content.notes.append(
            f"{who} mapped {_listed([content.strings[i] for i in mapped])} into memory: what it "
            "reads there, when pages are touched, is not recorded"
        )
    unseen = _texts(slots, np.flatnonzero(slots["type"] == _UNSEEN))
    if programs := sorted({program for _, program in unseen}):
        content.notes.append(
            f"{who} started {_listed(programs)}, statically linked or without LD_PRELOAD: what "
            "that read is not recorded"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
