"""Spans of time of all ranks: recorded, written, merged."""

from hyperslab.trace.active import (
    recording as recording,
    start as start,
    stop as stop,
)
from hyperslab.trace.analysis.report import (
    Report as Report,
    report as report,
    write_report as write_report,
)
from hyperslab.trace.loop import evaluation as evaluation, steps as steps
from hyperslab.trace.merge import load_trace as load_trace
from hyperslab.trace.span import (
    SPAN as SPAN,
    Category as Category,
    Flag as Flag,
    Process as Process,
    Thread as Thread,
    Tier as Tier,
    Trace as Trace,
)
