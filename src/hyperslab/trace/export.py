"""A trace as a file for other tools: Chrome/Perfetto JSON, Parquet, CSV, by the file's suffix."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import ConfigError
from hyperslab.partial import partial_file
from hyperslab.trace.span import Category, Flag, Tier, Trace

_ROWS = 1 << 16
COLUMNS = (
    *("rank", "process", "node", "thread", "thread_name", "epoch", "step", "category", "name"),
    *("start_ns", "duration_ns", "bytes", "tier", "sample", "layer", "flags"),
)


def export_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes ``trace`` as Chrome/Perfetto JSON (``.json``, ``.json.gz``), ``.parquet`` or ``.csv``.

    The file is there as a whole or not at all.
    """
    target = Path(path)
    for suffix, write in _WRITERS.items():
        if target.name.endswith(suffix):
            write(trace, target)
            return
    raise ConfigError(f"{target} does not say by its suffix what to write: {', '.join(_WRITERS)}")


# Chrome and Perfetto


def _write_chrome(trace: Trace, target: Path) -> None:
    origin = int(trace.spans["start"].min()) if len(trace) else 0
    lanes = _lanes(trace)
    with _text_of(target) as file:
        about = {"producer": "hyperslab", "start_unix_ns": str(origin), "notes": trace.notes}
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
        file.write(",\n".join(json.dumps(each) for each in _tracks(trace, lanes)))
        for lines in _events(trace, lanes, origin):
            file.write(",\n" + ",\n".join(lines))
        file.write("\n]}\n")


def _tracks(trace: Trace, lanes: NDArray[np.uint32]) -> Iterator[dict[str, Any]]:
    """Names of processes and threads. Tools take number 0 for the system's own."""
    for number, process in enumerate(trace.processes, 1):
        name = f"rank {process.rank} ({process.host or f'node {process.node}'}, pid {process.pid})"
        yield _metadata("process_name", number, name=name)
        yield _metadata("process_labels", number, labels=process.program)
        yield _metadata("process_sort_index", number, sort_index=process.rank)
    used = np.unique(np.stack([trace.spans["process"], trace.spans["thread"], lanes]), axis=1).T
    for process_index, thread_index, lane in used.tolist():
        thread = trace.threads[thread_index]
        name = thread.name or f"thread {thread.tid}"
        more = f" ({lane + 1})" if lane else ""
        track = _track(thread_index, lane)
        yield _metadata("thread_name", process_index + 1, track, name=name + more)
        yield _metadata("thread_sort_index", process_index + 1, track, sort_index=thread_index)


def _metadata(event: str, process: int, track: int | None = None, **args: Any) -> dict[str, Any]:
    where = {"pid": process} if track is None else {"pid": process, "tid": track}
    return {"ph": "M", "name": event, **where, "args": args}


_MOST_LANES = 1000


def _track(thread: int, lane: int) -> int:
    return (thread + 1) * _MOST_LANES + lane


def _lanes(trace: Trace) -> NDArray[np.uint32]:
    """Tracks beside each other for spans of a thread that overlap and do not lie in each other.

    A track holds a stack: tools drop spans that begin in another one and end after it.
    """
    starts = np.ascontiguousarray(trace.spans["start"])
    stops = starts + trace.spans["duration"]
    lanes = np.zeros(len(trace), np.uint32)
    order = np.lexsort((-stops, starts, trace.spans["thread"]))
    ends = np.flatnonzero(np.diff(trace.spans["thread"][order])) + 1
    for of in np.split(order, ends):
        if len(of) and np.any(starts[of][1:] < np.maximum.accumulate(stops[of])[:-1]):
            lanes[of] = _stacked(starts[of].tolist(), stops[of].tolist())
    return lanes


def _stacked(starts: list[int], stops: list[int]) -> list[int]:
    stacks: list[list[int]] = []
    found = []
    for start, stop in zip(starts, stops, strict=True):
        lane = 0
        while lane < len(stacks) and not _fits(stacks[lane], start, stop):
            lane += 1
        lane = min(lane, _MOST_LANES - 1)
        if lane == len(stacks):
            stacks.append([])
        stacks[lane].append(stop)
        found.append(lane)
    return found


def _fits(stack: list[int], start: int, stop: int) -> bool:
    while stack and stack[-1] <= start:
        stack.pop()
    return not stack or stop <= stack[-1]


def _events(trace: Trace, lanes: NDArray[np.uint32], origin: int) -> Iterator[list[str]]:
    names = [json.dumps(each) for each in trace.strings]
    heads = [f'{{"ph":"X","cat":"{each.name}","name":' for each in Category]
    for at in range(0, len(trace), _ROWS):
        part = trace.spans[at : at + _ROWS]
        tracks = (part["thread"].astype(np.int64) + 1) * _MOST_LANES + lanes[at : at + _ROWS]
        whole, rest = np.divmod(part["start"] - origin, 1000)
        long, short = np.divmod(part["duration"], 1000)
        columns = (
            part["category"],
            part["name"],
            part["process"],
            tracks,
            whole,
            rest,
            long,
            short,
        )
        texts = [
            f'{heads[category]}{names[name]},"pid":{process + 1},"tid":{track},'
            f'"ts":{micro}.{nano:03},"dur":{length}.{length_nano:03}'
            for category, name, process, track, micro, nano, length, length_nano in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        yield [text + args + "}" for text, args in zip(texts, _args(trace, part), strict=True)]


def _args(trace: Trace, part: NDArray[Any]) -> Iterator[str]:
    """What else is known of spans; nothing of those that are only times."""
    numbers = {"bytes": "nbytes", "step": "step", "epoch": "epoch", "sample": "sample"}
    nothing = {"nbytes": 0}
    columns = [
        np.where(part[field] == nothing.get(field, -1), -1, part[field]).tolist()
        for field in numbers.values()
    ]
    layers, tiers, flags = part["layer"].tolist(), part["tier"].tolist(), part["flags"].tolist()
    for *values, layer, tier, flag in zip(*columns, layers, tiers, flags, strict=True):
        told: dict[str, Any] = {
            name: value for name, value in zip(numbers, values, strict=True) if value != -1
        }
        if layer:
            told["layer"] = trace.strings[layer]
        if tier:
            told["tier"] = Tier(tier).name
        if flag:
            told["flags"] = _flag_names(flag)
        yield f',"args":{json.dumps(told)}' if told else ""


def _flag_names(flags: int) -> str:
    return " ".join(flag.name or "" for flag in Flag if flags & flag)


# Tables


def _write_csv(trace: Trace, target: Path) -> None:
    with _text_of(target) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for at in range(0, len(trace), _ROWS):
            columns = _columns(trace, trace.spans[at : at + _ROWS])
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def _columns(trace: Trace, part: NDArray[Any]) -> dict[str, NDArray[Any]]:
    strings = np.array(trace.strings, object)
    processes = [(each.rank, each.pid, each.host) for each in trace.processes] or [(0, 0, "")]
    ranks, pids, hosts = (np.array(each, object) for each in zip(*processes, strict=True))
    threads = [(each.tid, each.name) for each in trace.threads] or [(0, "")]
    tids, thread_names = (np.array(each, object) for each in zip(*threads, strict=True))
    process, thread = part["process"], part["thread"]
    return {
        "rank": ranks[process].astype(np.int64),
        "process": pids[process].astype(np.int64),
        "node": hosts[process],
        "thread": tids[thread].astype(np.int64),
        "thread_name": thread_names[thread],
        "epoch": part["epoch"],
        "step": part["step"],
        "category": np.array([each.name for each in Category], object)[part["category"]],
        "name": strings[part["name"]],
        "start_ns": part["start"],
        "duration_ns": part["duration"],
        "bytes": part["nbytes"],
        "tier": np.array([each.name for each in Tier], object)[part["tier"]],
        "sample": part["sample"],
        "layer": strings[part["layer"]],
        "flags": part["flags"],
    }


def _write_parquet(trace: Trace, target: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"{target} needs pyarrow, which is not installed: pip install pyarrow, or write .csv"
        ) from error
    with partial_file(target) as (_, fd), os.fdopen(os.dup(fd), "wb") as file:
        writer = None
        for at in range(0, max(1, len(trace)), _ROWS * 8):
            columns = _columns(trace, trace.spans[at : at + _ROWS * 8])
            table = pa.table(
                {
                    name: pa.array(column, pa.string() if column.dtype == object else None)
                    for name, column in columns.items()
                }
            )
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()


@contextmanager
def _text_of(target: Path) -> Iterator[IO[str]]:
    with partial_file(target) as (_, fd), os.fdopen(os.dup(fd), "wb") as file:
        binary: Any = gzip.GzipFile("", "wb", 6, file) if target.suffix == ".gz" else file
        text = io.TextIOWrapper(binary, "utf-8", newline="")
        yield text
        text.detach()  # and flushes
        if binary is not file:
            binary.close()


_WRITERS: dict[str, Callable[[Trace, Path], None]] = {
    ".json": _write_chrome,
    ".json.gz": _write_chrome,
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".csv.gz": _write_csv,
}
