import contextlib
import gzip
import json
import random

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from hyperslab.errors import ConfigError, FormatError
from hyperslab.trace import Category, Flag, load_trace
from hyperslab.trace.foreign.convert import import_traces

SECOND = 10**9


def told(trace):
    """Category, name, start and duration in nanoseconds, bytes of each span."""
    return [
        (
            Category(span["category"]).name,
            trace.strings[span["name"]],
            int(span["start"]),
            int(span["duration"]),
            int(span["nbytes"]),
        )
        for span in trace.spans
    ]


# PyTorch's profiler


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    loader = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4)
    net = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters())
    every_step = {"schedule": lambda step: ProfilerAction.RECORD}
    with profile(activities=[ProfilerActivity.CPU], **every_step) as profiler:
        for x in loader:
            with record_function("mine"):
                loss = net(x).sum()
            loss.backward()
            optimizer.step()
            profiler.step()
    path = tmp_path_factory.mktemp("profiled") / "profile.pt.trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_trace_of_pytorchs_profiler_is_read(profiled):
    trace = load_trace(profiled)
    assert trace.notes == []
    spans = trace.spans
    steps = spans[spans["category"] == Category.step]
    assert steps["step"].tolist() == [0, 1, 2, 3]  # the last has begun
    inside = spans[(spans["start"] >= steps["start"][1]) & (spans["start"] < steps["start"][2])]
    ends = steps["start"] + steps["duration"]
    inside = inside[inside["start"] < ends[1]]
    assert set(inside["step"]) == {1}
    names = {Category(each).name: set() for each in np.unique(spans["category"])}
    for span in spans:
        names[Category(span["category"]).name].add(trace.strings[span["name"]])
    assert {"aten::linear"} <= names["compute"]
    assert {"aten::addmm"} <= names["other"]  # within the linear
    assert names["user"] == {"mine"}
    assert names["optimizer"] == {"Optimizer.step#SGD.step"}
    [wait] = names["wait"]
    assert wait.startswith("enumerate(DataLoader)")
    waits = spans[spans["category"] == Category.wait]
    assert (waits["flags"] & Flag.exposed).all()
    [process] = trace.processes
    assert process.host
    written = profiled.stat().st_mtime_ns
    assert abs(written - int(spans["start"][-1])) < 600 * SECOND


def test_a_compressed_trace_is_the_same(tmp_path, profiled):
    other = tmp_path / "profile.json.gz"
    other.write_bytes(gzip.compress(profiled.read_bytes()))
    assert told(load_trace(other)) == told(load_trace(profiled))


def test_of_a_trace_that_is_cut_off_the_rest_is_read(tmp_path, profiled):
    whole = told(load_trace(profiled))
    text = profiled.read_text()
    compressed = gzip.compress(text.encode())
    for path, content in (
        (tmp_path / "a.json", text[: len(text) * 2 // 3].encode()),
        (tmp_path / "a.json.gz", compressed[: len(compressed) * 2 // 3]),
    ):
        path.write_bytes(content)
        trace = load_trace(path)
        assert 0 < len(trace) < len(whole)
        assert any("is cut off" in note for note in trace.notes)


def test_what_runs_on_a_gpu_is_told_apart(tmp_path):
    def event(name, category, ts, dur, tid, **args):
        where = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid}
        return {**where, "ts": ts, "dur": dur, "args": args}

    events = [
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1.5, 2.25, 7, bytes=4096),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 5, 1, 20),
        event("sm90_xmma_fprop", "kernel", 4, 3, 7),
        event("aten::conv3d", "cpu_op", 1, 5, 100),
        event("nccl:all_reduce", "user_annotation", 2, 1, 100),
        {"ph": "X", "name": "no time", "cat": "kernel"},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
    ]
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": events}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**head, "baseTimeNanoseconds": 1_700_000_000 * SECOND}))
    trace = load_trace(path)
    base = 1_700_000_000 * SECOND
    assert told(trace) == [
        ("compute", "aten::conv3d", base + 1000, 5000, 0),
        ("copy", "Memcpy HtoD (Pinned -> Device)", base + 1500, 2250, 4096),
        ("all_reduce", "nccl:all_reduce", base + 2000, 1000, 0),
        ("compute", "sm90_xmma_fprop", base + 4000, 3000, 0),
        ("all_reduce", "ncclDevKernel_AllReduce_Sum_f32", base + 5000, 1000, 0),
    ]
    assert ((trace.spans["flags"] & Flag.device) > 0).tolist() == [False, True, False, True, True]
    assert trace.processes[0].rank == 3
    assert "stream 7" in {thread.name for thread in trace.threads}
    assert "has 1 events that cannot be understood" in trace.notes[0]


# dftracer

PFW = """\
[
{"id":0,"name":"start","cat":"dftracer","pid":10,"tid":10,"ts":1700000000000000,"dur":0,\
"ph":"X","args":{"hhash":"h1","date":"now","version":"1.0"}}
{"id":1,"name":"HH","cat":"dftracer","pid":10,"tid":10,"ph":"M",\
"args":{"name":"node7","value":"h1"}}
{"id":2,"name":"FH","cat":"dftracer","pid":10,"tid":10,"ph":"M",\
"args":{"name":"/data/a.npz","value":"f1"}}
{"id":3,"name":"open64","cat":"POSIX","pid":10,"tid":11,"ts":1700000000000100,"dur":7,\
"ph":"X","args":{"hhash":"h1","fhash":"f1","ret":5}}
{"id":4,"name":"read","cat":"POSIX","pid":10,"tid":11,"ts":1700000000000110,"dur":40,\
"ph":"X","args":{"hhash":"h1","fhash":"f1","ret":4096,"count":8192}},
{"id":5,"name":"write","cat":"POSIX","pid":10,"tid":11,"ts":1700000000000160,"dur":4,\
"ph":"X","args":{"hhash":"h1","fhash":"f1","ret":4096}}
{"id":6,"name":"fetch.block","cat":"dataloader","pid":10,"tid":10,"ts":1700000000000090,\
"dur":90,"ph":"X","args":{"hhash":"h1","epoch":1,"step":2,"image_idx":5}}
{"id":7,"name":"forward","cat":"compute","pid":12,"tid":12,"ts":1700000000000180,"dur":9,\
"ph":"X","args":{"hhash":"h1","epoch":"1"}}
]
"""


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_trace_of_dftracer_is_read(tmp_path, is_compressed):
    path = tmp_path / "trace.pfw"
    lines = PFW.splitlines(keepends=True)
    # Compressed ones consist of many members.
    members = [gzip.compress("".join(lines[i : i + 2]).encode()) for i in range(0, len(lines), 2)]
    path.write_bytes(b"".join(members) if is_compressed else PFW.encode())
    trace = load_trace(path)
    base = 1_700_000_000 * SECOND
    assert told(trace)[1:] == [
        ("wait", "fetch.block", base + 90_000, 90_000, 0),
        ("read", "/data/a.npz", base + 100_000, 7_000, 0),
        ("read", "/data/a.npz", base + 110_000, 40_000, 4096),
        ("other", "/data/a.npz", base + 160_000, 4_000, 0),
        ("compute", "forward", base + 180_000, 9_000, 0),
    ]
    assert trace.spans["epoch"].tolist() == [-1, 1, -1, -1, -1, 1]
    assert trace.spans["sample"].tolist() == [-1, 5, -1, -1, -1, -1]
    assert [(each.host, each.pid) for each in trace.processes] == [("node7", 10), ("node7", 12)]
    assert "does not tell the ranks of its 2 processes" in trace.notes[0]


def test_damaged_lines_of_dftracer_are_told_of(tmp_path):
    path = tmp_path / "trace.pfw"
    path.write_text(PFW.replace('"dur":40', '"dur":"x"').removesuffix("]\n")[:-20])
    trace = load_trace(path)
    assert len(trace) == 4
    assert "has 2 lines that cannot be understood" in " ".join(trace.notes)


# Darshan

DARSHAN = """\
# darshan log version: 3.41
# exe: python train.py
# nprocs: 2
# start_time: 1700000000
# start_time_asci: Tue Nov 14 22:13:20 2023
"""

DXT = """
# ***************************************************
# DXT_POSIX module data
# ***************************************************

# DXT, file_id: 1, file_name: /data/a, b.h5
# DXT, rank: 1, hostname: node3
# DXT, write_count: 1, read_count: 2
# DXT, mnt_pt: /data, fs_type: lustre
# DXT, Lustre stripe_size: 1048576, Lustre stripe_count: 1, Lustre OST obdidx: 3
# Module    Rank  Wt/Rd  Segment          Offset       Length    Start(s)      End(s)  [OST]
 X_POSIX       1   read        0               0         1048576      0.5000      0.5250  [3]
 X_POSIX       1   read        1         1048576            1000      1.0001      1.0002  [3]
 X_POSIX       1  write        0               0              16      2.0000      2.0001  [3]
# DXT, file_id: 2, file_name: /data/c
# DXT, rank: 0, hostname: node2
# Module    Rank  Wt/Rd  Segment          Offset       Length    Start(s)      End(s)  [OST]
 X_MPIIO       0   read        0               0            2000      0.1000      0.3000
 X_POSIX       0   read        0               0            2000      0.2000      0.3000
"""


def test_accesses_that_darshan_tells_are_read(tmp_path):
    path = tmp_path / "dxt.txt"
    path.write_text(DARSHAN + DXT + " X_POSIX  0   read  1  0\n")
    trace = load_trace(path)
    base = 1_700_000_000 * SECOND
    assert told(trace) == [
        ("other", "/data/c", base + SECOND // 10, 200_000_000, 2000),
        ("read", "/data/c", base + SECOND // 5, 100_000_000, 2000),
        ("read", "/data/a, b.h5", base + SECOND // 2, 25_000_000, 1048576),
        ("read", "/data/a, b.h5", base + SECOND + 100_000, 100_000, 1000),
        ("other", "/data/a, b.h5", base + 2 * SECOND, 100_000, 16),
    ]
    assert [(each.rank, each.host) for each in trace.processes] == [(0, "node2"), (1, "node3")]
    assert trace.processes[0].program == "python train.py"
    assert "has 1 lines that cannot be understood" in trace.notes[0]


def test_counters_that_darshan_tells_are_read(tmp_path):
    def line(rank, counter, value, name="/data/a.h5", module="POSIX"):
        return f"{module}\t{rank}\t77\t{module}_{counter}\t{value}\t{name}\t/data\tlustre\n"

    path = tmp_path / "counters.txt"
    path.write_text(
        DARSHAN
        + "#<module>\t<rank>\t<record id>\t<counter>\t<value>\t<file name>\t<mount pt>\t<fs type>\n"
        + line(1, "OPENS", 1)
        + line(1, "BYTES_READ", 5000)
        + line(1, "F_OPEN_START_TIMESTAMP", 0.25)
        + line(1, "F_META_TIME", 0.125)
        + line(1, "F_READ_START_TIMESTAMP", 0.5)
        + line(1, "F_READ_TIME", 2.5)
        + line(0, "BYTES_READ", 0, "/data/written")
        + line(-1, "BYTES_READ", 7, "/data/shared", "STDIO")
        + line(-1, "F_READ_TIME", 0.5, "/data/shared", "STDIO")
    )
    trace = load_trace(path)
    base = 1_700_000_000 * SECOND
    assert told(trace) == [
        ("read", "/data/shared", base, 0, 0),
        ("read", "/data/shared", base, SECOND // 2, 7),
        ("read", "/data/a.h5", base + SECOND // 4, SECOND // 8, 0),
        ("read", "/data/a.h5", base + SECOND // 2, 2 * SECOND + SECOND // 2, 5000),
    ]
    notes = " ".join(trace.notes)
    assert "does not tell single reads" in notes
    assert "only their sums over ranks" in notes


# Tables


def test_a_time_loggers_table_is_read_whatever_its_columns_are_called(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(
        "Process;Node;Thread;Epoch;Category;Start (ms);End (ms);Bytes;remark\n"
        "0;n1;main;0;IO;0.5;1.5;100;x\n"
        "1;n2;reader;0;forward;1700000000000.25;1700000000001.25;;\n"
        "0;n1;main;1;something else;2;x;0;\n"
        "0;n1;main;1;something else;2;5;0;\n"
        "0;n1\n"
    )
    trace = load_trace(path)
    assert [each[:1] + each[3:] for each in told(trace)] == [
        ("read", 1_000_000, 100),
        ("user", 3_000_000, 0),
        ("compute", 1_000_000, 0),
    ]
    assert trace.spans["start"][2] == 1_700_000_000_000_250_000
    assert [(each.rank, each.host) for each in trace.processes] == [(0, "n1"), (1, "n2")]
    assert {thread.name for thread in trace.threads} == {"main", "reader"}
    assert "has 2 lines that cannot be understood, the first of them line 4" in trace.notes[0]


def test_times_are_seconds_unless_their_names_say_else(tmp_path):
    path = tmp_path / "times.csv"
    for heading, unit in (
        *(("start,duration", SECOND), ("start_us,duration_us", 1000)),
        *(("t0", None), ("begin [ns],elapsed [ns]", 1), ("start(s),dur (sec)", SECOND)),
    ):
        path.write_text(f"rank,category,{heading}\n3,read,1.5,2.25\n")
        if unit is None:
            with pytest.raises(FormatError, match="a table of spans has a heading"):
                load_trace(path)
        else:
            [(category, _, start, duration, _)] = told(load_trace(path))
            assert (category, start, duration) == ("read", int(1.5 * unit), int(2.25 * unit))


# All of them


@pytest.mark.parametrize(
    "content",
    [
        b"hello world\n",
        b"\x00\x01\x02\x03" * 1000,
        b'{"a": 1}',
        b"[1, 2]",
        b"[\n" + b'{"name":"x","ph":"X","pid":1,"tid":1,"ts":1,"dur":1,"args":{}}\n',
        b"name,value\na,1\n",
        b"\x1f\x8b broken",
        b"a\rb,c\n",
        b'x,"a\rb\n' + b"\xff\r\xfe,\x00" * 9,
    ],
)
def test_what_is_no_trace_is_refused_with_what_would_be_one(tmp_path, content):
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"file\.bin is no trace that can be read: it is neither"):
        load_trace(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_tables_may_end_as_on_any_system(tmp_path, end):
    path = tmp_path / "times.csv"
    path.write_bytes(end.join(["category,start,duration", "io,0,1", "io,2,3", ""]).encode())
    trace = load_trace(path)
    assert trace.spans["duration"].tolist() == [10**9, 3 * 10**9]
    assert not any("understood" in note for note in trace.notes)


@pytest.mark.parametrize("column", ["rank", "duration", "start", "bytes", "step", "sample"])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "inf", "nan", "9" * 40, "a\rb"])
def test_numbers_for_which_there_is_no_room_are_left_out(tmp_path, column, value):
    names = ["category", "start", "duration", "rank", "bytes", "step", "sample", "flags"]
    row = dict.fromkeys(names, "1") | {"category": "io"}
    lines = [names, [(row | {column: value})[name] for name in names], [*row.values()]]
    path = tmp_path / "times.csv"
    path.write_text("".join(",".join(each) + "\n" for each in lines))
    trace = load_trace(path)
    assert trace.spans["nbytes"].tolist() == [1]
    assert any("cannot be understood" in note for note in trace.notes)


def test_a_field_without_end_is_left_out(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(f"category,start,duration\nio,0,{'1' * 200_000}\nio,0,1\n")
    trace = load_trace(path)
    assert len(trace) == 1
    assert any("cannot be understood" in note for note in trace.notes)


def test_a_chrome_trace_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(FormatError, match="nothing in it says that PyTorch's profiler wrote it"):
        load_trace(path)


@pytest.mark.parametrize(
    "content", [PFW, DARSHAN + DXT, "rank,category,start,duration\n0,io,1,2\n"]
)
def test_no_damage_raises_anything_else_than_a_format_error(tmp_path, content):
    random_numbers = random.Random(0)
    path = tmp_path / "damaged"
    for _ in range(100):
        data = bytearray(content.encode())
        for _ in range(random_numbers.randrange(1, 6)):
            data[random_numbers.randrange(len(data))] = random_numbers.randrange(256)
        path.write_bytes(data[: random_numbers.randrange(1, len(data) + 1)])
        with contextlib.suppress(FormatError):
            load_trace(path)


def test_imported_traces_are_trace_files(tmp_path):
    (tmp_path / "trace.pfw").write_text(PFW)
    (tmp_path / "dxt.txt").write_text(DARSHAN + DXT)
    paths = [tmp_path / "trace.pfw", tmp_path / "dxt.txt"]
    done = import_traces(paths, tmp_path / "out")
    assert done[:2] == (4, 11)
    assert told(load_trace(tmp_path / "out")) == told(load_trace(paths))
    with pytest.raises(ConfigError, match="has 4 trace files already"):
        import_traces(paths, tmp_path / "out")
