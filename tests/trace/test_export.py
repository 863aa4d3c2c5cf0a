import csv
import gzip
import json

import numpy as np
import pytest

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.testing.traces import UNIX_NS, Made, write_random_trace, write_trace
from hyperslab.trace import Category, Flag, Tier, load_trace
from hyperslab.trace.analysis.page import to_html
from hyperslab.trace.export import export_trace


@pytest.fixture
def trace(tmp_path):
    read = Made(Category.read, 0.5, 1.0, 'a "b".h5', 1, nbytes=8, sample=3, tier=Tier.disk)
    wait = Made(Category.wait, 0.25, 0.75, "batch", step=4, epoch=1, flags=Flag.exposed)
    halo = Made(Category.halo, 0.1, 0.1234567, "halo", 4, layer="conv1", flags=Flag.device)
    return load_trace(write_trace(tmp_path / "trace", [[read, wait], [halo]]))


def events_of(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_chrome_json_has_every_span_with_what_is_known_of_it(tmp_path, trace, suffix):
    path = tmp_path / f"trace{suffix}"
    export_trace(trace, path)
    told = events_of(path)
    assert told["otherData"]["start_unix_ns"] == str(UNIX_NS + 100_000_000)
    names = {
        (each["pid"], each.get("tid")): each["args"]
        for each in told["traceEvents"][:99]
        if each["ph"] == "M" and each["name"].endswith("_name")
    }
    spans = [each for each in told["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["cat"], each["ts"], each["dur"]) for each in spans] == [
        ("halo", "halo", 0.0, 23456.7),
        ("batch", "wait", 150000.0, 500000.0),
        ('a "b".h5', "read", 400000.0, 500000.0),
    ]
    assert [each["args"] for each in spans] == [
        {"layer": "conv1", "flags": "device"},
        {"step": 4, "epoch": 1, "flags": "exposed"},
        {"bytes": 8, "sample": 3, "tier": "disk"},
    ]
    assert [names[each["pid"], each["tid"]]["name"] for each in spans] == [
        *("gpu halo", "main", "reader-0"),
    ]
    assert [names[each["pid"], None]["name"] for each in spans] == [
        "rank 1 (node0, pid 101)",
        *["rank 0 (node0, pid 100)"] * 2,
    ]


def test_spans_of_a_track_lie_in_each_other_or_apart(tmp_path):
    write_random_trace(tmp_path / "trace", 4000)
    export_trace(load_trace(tmp_path / "trace"), tmp_path / "trace.json")
    tracks = {}
    for each in events_of(tmp_path / "trace.json")["traceEvents"]:
        if each["ph"] == "X":
            start = round(each["ts"] * 1000)
            spans = tracks.setdefault((each["pid"], each["tid"]), [])
            spans.append((start, -start - round(each["dur"] * 1000)))
    assert sum(map(len, tracks.values())) == 4000
    for spans in tracks.values():
        stack = []
        for start, minus_stop in sorted(spans):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or -minus_stop <= stack[-1]
            stack.append(-minus_stop)


def test_tables_hold_what_the_trace_holds(tmp_path, trace):
    export_trace(trace, tmp_path / "trace.csv")
    with (tmp_path / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["halo", "batch", 'a "b".h5']
    assert [int(row["start_ns"]) for row in rows] == trace.spans["start"].tolist()
    assert rows[2] == {
        "rank": "0",
        "process": "100",
        "node": "node0",
        "thread": "101",
        "thread_name": "reader-0",
        "epoch": "-1",
        "step": "-1",
        "category": "read",
        "name": 'a "b".h5',
        "start_ns": str(UNIX_NS + 500_000_000),
        "duration_ns": "500000000",
        "bytes": "8",
        "tier": "disk",
        "sample": "3",
        "layer": "",
        "flags": "0",
    }


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_an_exported_table_is_read_again(tmp_path, trace, suffix):
    export_trace(trace, tmp_path / f"trace{suffix}")
    again = load_trace(tmp_path / f"trace{suffix}")
    for name in ("start", "duration", "nbytes", "sample", "step", "epoch", "category", "tier"):
        np.testing.assert_array_equal(again.spans[name], trace.spans[name])
    assert [again.strings[i] for i in again.spans["name"]] == ["halo", "batch", 'a "b".h5']
    assert [process.rank for process in again.processes] == [0, 1]


def test_parquet_holds_what_csv_holds(tmp_path, trace):
    parquet = pytest.importorskip("pyarrow.parquet")
    export_trace(trace, tmp_path / "trace.parquet")
    export_trace(trace, tmp_path / "trace.csv")
    table = parquet.read_table(tmp_path / "trace.parquet").to_pydict()
    with (tmp_path / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: str(table[name][i]) for name in table} for i in range(3)] == rows


def test_an_empty_trace_is_exported(tmp_path):
    [path] = write_trace(tmp_path / "trace", [[]])
    for suffix in (".json", ".csv"):
        export_trace(load_trace(path), tmp_path / f"out{suffix}")
    assert [each["ph"] for each in events_of(tmp_path / "out.json")["traceEvents"]] == ["M"] * 3


def test_other_suffixes_are_refused_and_nothing_is_left_behind(tmp_path, trace, monkeypatch):
    with pytest.raises(ConfigError, match=r"trace.txt does not say by its suffix .*json.gz"):
        export_trace(trace, tmp_path / "trace.txt")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
        export_trace(trace, tmp_path / "trace.parquet")
    trace.strings[1:] = []  # fails in the middle
    with pytest.raises(IndexError):
        export_trace(trace, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".json", ".html", ".parquet"])
def test_names_that_are_no_text_are_written_with_escapes(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    name = b"a\xff.h5".decode(errors="surrogateescape")
    folder = tmp_path / b"run\xfe".decode(errors="surrogateescape")
    with hs.trace.recording(folder / "trace"), hs.span(name, category="read", nbytes=3):
        pass
    target = tmp_path / f"out{suffix}"
    if suffix == ".html":
        target.write_bytes(to_html([hs.trace.report(folder)]).encode())
    else:
        export_trace(load_trace(folder), target)
    content = target.read_bytes()
    if suffix in (".csv", ".json", ".html"):
        assert b"a\\udcff.h5" in content.replace(b"\\\\", b"\\")
