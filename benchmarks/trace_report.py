"""How long does the report of a very large trace take, and how much memory?

    python benchmarks/trace_report.py

Writes made-up spans of 4 ranks on 2 hosts, 10 million of them, and has another process merge and
report them: words, JSON and the page. Prints its time, the time of its CPU, which other programs
slow down less, and its largest memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hyperslab.testing.traces import write_random_trace

NUM_SPANS = 10_000_000
SECONDS, GIB = 60, 4

REPORT = """
import json, resource, sys, time
start = time.perf_counter()
from hyperslab.trace import load_trace, report
trace = load_trace(sys.argv[1])
merged = time.perf_counter()
found = report(trace)
page, content = found.to_html(), json.dumps(found.to_dict())
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "spans": len(trace), "verdict": found.verdict,
    "merge_seconds": merged - start, "report_seconds": time.perf_counter() - merged,
    "cpu_seconds": used.ru_utime + used.ru_stime, "gib": used.ru_maxrss / 2**20,
    "page_mib": len(page) / 2**20, "json_mib": len(content) / 2**20,
}))
"""


def measure(num_spans):
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_random_trace(Path(folder), num_spans)
        wrote = time.perf_counter() - start
        done = subprocess.run(
            [sys.executable, "-c", REPORT, folder], capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout)
    seconds = found["merge_seconds"] + found["report_seconds"]
    return {**found, "seconds": seconds, "write_seconds": wrote}


def bars(report):
    """(what, measured, "<=" or ">=", bar) for what ``--json`` prints."""
    scale = NUM_SPANS / report["spans"]
    return [
        ("10 million spans merged and reported, s", scale * report["seconds"], "<=", SECONDS),
        ("memory of that, GiB", scale * report["gib"], "<=", GIB),
        ("their page, MiB", report["page_mib"], "<=", 5),
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=NUM_SPANS)
    parser.add_argument("--quick", action="store_true", help="the same: it takes half a minute")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    report = measure(options.spans)
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{report['spans']:,} spans, written in {report['write_seconds']:.1f} s")
    print(f"merged   {report['merge_seconds']:7.1f} s")
    print(f"reported {report['report_seconds']:7.1f} s")
    print(f"in all   {report['seconds']:7.1f} s (bar {SECONDS}), CPU {report['cpu_seconds']:.1f} s")
    print(f"memory   {report['gib']:7.2f} GiB (bar {GIB})")
    print(f"page     {report['page_mib']:7.2f} MiB, JSON {report['json_mib']:.2f} MiB")


if __name__ == "__main__":
    main()
