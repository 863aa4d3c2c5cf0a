import errno
from pathlib import Path

import numpy as np
import pytest

from hyperslab.errors import FormatError
from hyperslab.testing.traces import UNIX_NS, Made, write_random_trace, write_trace
from hyperslab.trace import Category, load_trace
from hyperslab.trace.file import read_trace_file
from hyperslab.trace.merge import find_contents, read_files


def two_ranks(folder, **options):
    made = [
        [Made(Category.read, 0.5, 1.0, "a.h5", thread=1, nbytes=8), Made(Category.step, 0, 2, "s")],
        [Made(Category.halo, 0.25, 0.75, "halo", layer="conv1"), Made(Category.step, 0, 2, "s")],
    ]
    return write_trace(folder, made, **options)


def test_spans_of_ranks_are_sorted_and_keep_what_is_known_of_them(tmp_path):
    two_ranks(tmp_path / "trace")
    trace = load_trace(tmp_path)
    assert trace.notes == []
    assert [process.rank for process in trace.processes] == [0, 1]
    told = [
        (
            trace.processes[span["process"]].rank,
            Category(span["category"]).name,
            trace.strings[span["name"]],
            trace.strings[span["layer"]],
            trace.threads[span["thread"]].name,
            int(span["start"]) - UNIX_NS,
            int(span["duration"]),
        )
        for span in trace.spans
    ]
    assert told == [
        (0, "step", "s", "", "main", 0, 2_000_000_000),
        (1, "step", "s", "", "main", 0, 2_000_000_000),
        (1, "halo", "halo", "conv1", "main", 250_000_000, 500_000_000),
        (0, "read", "a.h5", "", "reader-0", 500_000_000, 500_000_000),
    ]


def test_clocks_of_hosts_are_aligned(tmp_path):
    two_ranks(tmp_path, hosts=("one", "two"), clock_offsets=(0, 2))
    trace = load_trace(tmp_path)
    assert [process.node for process in trace.processes] == [0, 1]
    assert (trace.spans["start"] - UNIX_NS).tolist() == [0, 0, 250_000_000, 500_000_000]


def test_a_damaged_file_is_read_up_to_the_damage(tmp_path):
    path, other = two_ranks(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        content = read_trace_file(path)
        at_chunk = size in (8, *_chunk_ends(whole))
        assert bool(content.notes) != at_chunk
        assert content.num_spans == 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        assert read_trace_file(path).notes
        assert load_trace([path, other]).notes
    path.write_bytes(b"")
    trace = load_trace(tmp_path)
    assert "is empty" in trace.notes[0]
    assert len(trace) == 2


def _chunk_ends(whole):
    at, ends = 8, []
    while at < len(whole):
        at += 16 + int.from_bytes(whole[at + 4 : at + 12], "little")
        ends.append(at)
    return ends


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(FormatError, match="does not exist"):
        load_trace(tmp_path / "no")
    with pytest.raises(FormatError, match="has no trace files"):
        load_trace(tmp_path)


def test_a_folder_that_may_not_be_read_is_said_to_be_so(tmp_path, monkeypatch):
    two_ranks(tmp_path / "trace")

    def forbidden(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(FormatError, match="cannot be read: Permission denied"):
        load_trace(tmp_path)


def test_clocks_of_hosts_without_names_are_told_by_their_files(tmp_path):
    two_ranks(tmp_path, hosts=("", "two"))
    contents = find_contents([tmp_path])
    for content in contents:
        content.facts["offsets"] = []
    notes = [note for trace in read_files(contents) for note in trace.notes]
    assert any(
        "the clock of two was not compared with that of rank00000.hstrace" in n for n in notes
    )


def test_many_spans_are_merged_in_order(tmp_path):
    write_random_trace(tmp_path, 20_000)
    trace = load_trace(tmp_path)
    assert len(trace) == 20_000
    assert (np.diff(trace.spans["start"]) >= 0).all()
    assert set(np.unique(trace.spans["process"])) == {0, 1, 2, 3}
