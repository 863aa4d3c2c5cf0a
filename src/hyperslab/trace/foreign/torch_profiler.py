"""Traces of PyTorch's profiler: ``export_chrome_trace`` and ``tensorboard_trace_handler``."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from hyperslab.trace.file import FileContent
from hyperslab.trace.foreign.spans import ImportedProcess, nanoseconds
from hyperslab.trace.foreign.texts import JsonEvents, TextFile
from hyperslab.trace.span import Category, Flag

_SIGNS = ("schemaVersion", "deviceProperties", "baseTimeNanoseconds", "distributedInfo")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cpu_op", "user_annotation"}
_MESSAGES = re.compile(r"nccl|gloo|c10d::|mpi:|all_?reduce|reduce_scatter|all_?gather", re.I)


def is_torch_profiler(start: str) -> bool:
    """Whether a file that begins so says that PyTorch's profiler wrote it."""
    before = start.partition('"traceEvents"')[0]
    return start.lstrip().startswith("{") and any(f'"{sign}"' in before for sign in _SIGNS)


class _Event(NamedTuple):
    start: int
    duration: int
    name: str
    category: str
    thread: tuple[Any, Any]
    nbytes: int


def read_torch_profiler(file: TextFile) -> list[FileContent]:
    """One process: what runs on its GPUs is in threads of their own."""
    read = JsonEvents(file, "traceEvents")
    process = ImportedProcess()
    events: list[_Event] = []
    num_wrong = 0
    for told in read.items():
        try:
            if told.get("ph") == "X":
                events.append(_event(told))
            elif told.get("name") == "thread_name":
                thread = (told.get("pid"), told.get("tid"))
                process.name_thread(thread, str(told["args"]["name"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            num_wrong += 1
    if num_wrong:
        file.notes.append(f"{file.path} has {num_wrong} events that cannot be understood: left out")
    process.facts = _facts(read.head, events, file)
    base = read.head.get("baseTimeNanoseconds", 0)
    _add_all(process, events, base if isinstance(base, int) else 0)
    return [process.content(file.path)]


def _event(told: Mapping[str, Any]) -> _Event:
    args = told.get("args")
    nbytes = args.get("bytes", 0) if isinstance(args, dict) else 0
    return _Event(
        nanoseconds(told["ts"], 1000),
        nanoseconds(told.get("dur", 0), 1000),
        str(told["name"]),
        str(told.get("cat", "")),
        (told.get("pid"), told.get("tid")),
        nbytes if isinstance(nbytes, int) else 0,
    )


def _facts(head: Mapping[str, Any], events: list[_Event], file: TextFile) -> dict[str, Any]:
    told = head.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    pids = (each.thread[0] for each in events if each.category not in _ON_DEVICE)
    host = str(head.get("host_name", ""))
    return {
        "rank": rank if isinstance(rank, int) else 0,
        "pid": next((pid for pid in pids if isinstance(pid, int)), 0),
        "host": host,
        "clock": f"{host or file.path} Unix time",
        "clocks": [[0, 0]],
        "program": "PyTorch profiler",
    }


def _add_all(process: ImportedProcess, events: list[_Event], base: int) -> None:
    """Operators inside of others are ``other``: their time is that of the outermost."""
    events.sort(key=lambda each: (each.start, -each.duration))
    found = ((each, _STEP.fullmatch(each.name)) for each in events)
    steps = [(each, int(step[1])) for each, step in found if step and each.category in _ON_HOST]
    step_starts = [each.start for each, _ in steps]
    inside_until: dict[Any, int] = {}
    for event in events:
        category, flags = _category(event)
        stop = event.start + event.duration
        if category is Category.compute and not flags:
            if stop <= inside_until.get(event.thread, -1):
                category = Category.other
            else:
                inside_until[event.thread] = stop
        at = bisect_right(step_starts, event.start) - 1
        is_inside = at >= 0 and event.start < steps[at][0].start + steps[at][0].duration
        process.add(
            category,
            event.name,
            event.start + base,
            event.duration,
            thread=event.thread,
            nbytes=event.nbytes,
            step=steps[at][1] if is_inside else -1,
            flags=flags,
        )


def _category(event: _Event) -> tuple[Category, Flag]:
    lower = event.name.lower()
    if event.category in _ON_DEVICE:
        if event.category == "gpu_memcpy":
            return (Category.copy if "htod" in lower else Category.other), Flag.device
        is_message = "nccl" in lower
        return (Category.all_reduce if is_message else Category.compute), Flag.device
    if event.category not in _ON_HOST:
        return Category.other, Flag(0)
    if _STEP.fullmatch(event.name):
        return Category.step, Flag(0)
    if lower.startswith("enumerate(dataloader)"):
        return Category.wait, Flag.exposed
    if lower.startswith("optimizer.step"):
        return Category.optimizer, Flag(0)
    if _MESSAGES.search(event.name):
        return Category.all_reduce, Flag(0)
    return (Category.compute if event.category == "cpu_op" else Category.user), Flag(0)
