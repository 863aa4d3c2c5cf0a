"""Traces of dftracer and DLIO's profiler: ``.pfw`` and ``.pfw.gz``, an event a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from hyperslab.trace.file import FileContent
from hyperslab.trace.foreign.spans import ImportedProcess, nanoseconds
from hyperslab.trace.foreign.texts import TextFile
from hyperslab.trace.span import Category, Flag, Tier

_SYSTEM = ("POSIX", "STDIO")
_READS = {"read", "pread", "pread64", "readv", "preadv", "preadv2", "fread", "fgets", "getline"}
_OPENS = {"open", "open64", "openat", "openat64", "fopen", "fopen64"}
_CLOSES = {"close", "fclose"}
_BY_CATEGORY = {
    "compute": Category.compute,
    "dataloader": Category.wait,
    "data_loader": Category.wait,
    "comm": Category.all_reduce,
    "communication": Category.all_reduce,
    "device": Category.copy,
    "checkpoint": Category.checkpoint,
}
_OF_PIPELINE = {
    "epoch": Category.epoch,
    "evaluate": Category.evaluation,
    "test": Category.evaluation,
}
_HASHES = ("FH", "HH", "SH")  # metadata: names of files, hosts and other texts by their hashes


def is_dftracer(start: str) -> bool:
    """Whether a file that begins so says that dftracer wrote it: it hashes hosts and files."""
    lines = start.lstrip("\ufeff \n").split("\n")
    if not lines or not (lines[0].strip() == "[" or lines[0].startswith('{"id"')):
        return False
    return any(_is_event(_parsed(line)) for line in islice(lines, 200))


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or not {"name", "pid", "tid", "ph"} <= event.keys():
        return False
    args = event.get("args")
    signs = {"hhash", "fhash", "hostname", "fname"}
    return event.get("cat") in ("dftracer", "dlio_profiler") or (
        isinstance(args, dict) and not signs.isdisjoint(args)
    )


def _parsed(line: str) -> Any:
    text = line.strip().removeprefix("[").strip().removesuffix("]").strip().removesuffix(",")
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return ""


def read_dftracer(file: TextFile) -> list[FileContent]:
    """A content for each process that it tells of."""
    processes: dict[tuple[str, int], ImportedProcess] = {}
    texts: dict[str, str] = {}
    later: list[Mapping[str, Any]] = []
    num_wrong = 0
    for line in file.lines():
        event = _parsed(line)
        if event is None:
            continue
        if not isinstance(event, dict):
            num_wrong += 1
        elif event.get("ph") == "M":
            args = event.get("args")
            if event.get("name") in _HASHES and isinstance(args, dict):
                texts[str(args.get("value"))] = str(args.get("name"))
        elif event.get("ph") == "X":
            later.append(_slim(event))
    for event in later:
        try:
            _add(processes, texts, event)
        except (KeyError, TypeError, ValueError, OverflowError):
            num_wrong += 1
    if num_wrong:
        file.notes.append(f"{file.path} has {num_wrong} lines that cannot be understood: left out")
    if len(processes) > 1 and not any(each.facts["told"] for each in processes.values()):
        file.notes.append(
            f"{file.path} does not tell the ranks of its {len(processes)} processes: "
            "all are shown as rank 0"
        )
    for process in processes.values():
        del process.facts["told"]
    return [process.content(file.path) for process in processes.values()]


_KEPT = {"fhash", "fname", "hhash", "hostname", "ret", "image_size", "image_idx"}
_KEPT |= {"epoch", "step", "rank"}


def _slim(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    return {**event, "args": {name: args[name] for name in _KEPT if name in args}}


def _add(
    processes: dict[tuple[str, int], ImportedProcess],
    texts: Mapping[str, str],
    event: Mapping[str, Any],
) -> None:
    args = event["args"]
    host = texts.get(str(args.get("hhash")), str(args.get("hostname", "")))
    start, duration = nanoseconds(event["ts"], 1000), nanoseconds(event.get("dur", 0), 1000)
    pid, rank = int(event["pid"]), _number(args, "rank", -1)
    process = processes.get((host, pid))
    if process is None:
        clock = {"clock": f"{host} Unix time", "clocks": [[0, 0]]}
        process = ImportedProcess(rank=0, pid=pid, host=host, program="dftracer", **clock)
        process.facts["told"] = False
        processes[host, pid] = process
    if rank >= 0:
        process.facts |= {"rank": rank, "told": True}
    name, layer = str(event["name"]), ""
    category, flags, tier = _category(str(event.get("cat", "")), name)
    if tier is Tier.file:
        path = texts.get(str(args.get("fhash")), str(args.get("fname", "")))
        name, layer = (path or name), name
    is_reading = category is Category.read and layer in _READS
    process.add(
        category,
        name,
        start,
        duration,
        thread=int(event["tid"]),
        nbytes=max(0, _number(args, "ret", 0)) if is_reading else _number(args, "image_size", 0),
        layer=layer,
        sample=_number(args, "image_idx", -1),
        step=_number(args, "step", -1),
        epoch=_number(args, "epoch", -1),
        tier=tier,
        flags=flags,
    )


def _category(told: str, name: str) -> tuple[Category, Flag, Tier]:
    if told in _SYSTEM:
        if name in _OPENS:
            return Category.read, Flag.opening, Tier.file
        is_read = name in _READS or name in _CLOSES
        return (Category.read if is_read else Category.other), Flag(0), Tier.file
    if told == "dftracer":
        return Category.other, Flag(0), Tier.none
    lower = told.lower()
    if lower == "pipeline":
        found = _OF_PIPELINE.get(name.rpartition(".")[2].lower(), Category.user)
    else:
        found = _BY_CATEGORY.get(lower, Category.user)
    return found, Flag.exposed if found is Category.wait else Flag(0), Tier.none


def _number(args: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(args.get(name, default))
    except (TypeError, ValueError, OverflowError):
        return default
