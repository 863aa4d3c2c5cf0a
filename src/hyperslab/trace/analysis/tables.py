"""What the terminal shows of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hyperslab.pages import shown_seconds, shown_share
from hyperslab.partial import shown_nbytes
from hyperslab.trace.analysis.periods import Period, Share
from hyperslab.trace.analysis.rank_report import RankReport
from hyperslab.trace.analysis.runs import RUN_COLUMNS, run_row, runs_verdict
from hyperslab.trace.span import Category

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

MOST_RANKS = 16
MOST_THREADS = 16
MOST_FILES = 5
MOST_NOTES = 5
LEAST_OUTSIDE = 0.01
"""Of the time of epochs: what lies outside of them is shown from this on."""


def to_parts(reports: Sequence[Report], *, ranks: bool = False) -> list[RenderableType]:
    """All that is printed: the verdict first; ``ranks`` adds tables of ranks and of threads."""
    parts: list[RenderableType] = []
    if len(reports) > 1:
        if told := runs_verdict(reports):
            parts += [Text(told), Text()]
        parts += [_runs(reports)]
    for report in reports:
        if parts:
            parts += [Text(), Text(report.name, style="bold")]
        parts += _run(report, ranks)
    return parts


def _run(report: Report, ranks: bool) -> Iterable[RenderableType]:
    analysis = report.analysis
    yield Text(report.verdict)
    for note in analysis.notes[:MOST_NOTES]:
        yield Text(f"Note: {note}", style="yellow")
    if len(analysis.notes) > MOST_NOTES:
        yield Text(f"and {len(analysis.notes) - MOST_NOTES} more notes (--json)", style="yellow")
    if not analysis.epochs:
        return
    yield Text()
    epochs = {str(number): period for number, period in analysis.epochs.items()}
    if analysis.outside.seconds > LEAST_OUTSIDE * analysis.total.seconds:
        epochs["outside"] = analysis.outside
    yield _epochs("epoch", epochs)
    yield Text()
    yield categories_table(analysis.total)
    if len(analysis.ranks) > 1:
        yield Text()
        few = analysis.ranks if ranks else analysis.ranks[:MOST_RANKS]
        yield _epochs("rank", {str(rank.rank): rank.total for rank in few})
        if len(few) < len(analysis.ranks):
            yield Text(f"and {len(analysis.ranks) - len(few)} more ranks (--ranks)", style="dim")
    if ranks:
        yield Text()
        yield _threads(analysis.ranks)
    if report.what_ifs:
        yield Text()
        yield _what_ifs(report)
    if analysis.files:
        yield Text()
        yield _files(report)


def new_table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty one in the style of all."""
    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False, header_style="bold")
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def shown(category: Category) -> str:
    return category.name.replace("_", "-")


def _epochs(what: str, periods: dict[str, Period]) -> Table:
    """The exposed share of each category, by epoch or by rank."""
    columns = [
        category
        for category in Category
        if any(period.share(category) >= 0.0005 for period in periods.values())
    ]
    table = new_table([what], ["time", *map(shown, columns)])
    for name, period in periods.items():
        shares = (shown_share(period.share(category)) for category in columns)
        table.add_row(name, shown_seconds(period.seconds), *shares)
    return table


def categories_table(period: Period) -> Table:
    """Total, exposed and hidden time of each category."""
    columns = ("seconds", "exposed", "hidden", "of the time", "of threads", "bytes", "rate")
    table = new_table(["all epochs"], columns)
    for category, share in period.categories.items():
        if share.seconds or share.nbytes:
            table.add_row(shown(category), *_numbers(period, category, share))
    return table


def _numbers(period: Period, category: Category, share: Share) -> Iterable[str]:
    times = (share.seconds, share.exposed_seconds, share.hidden_seconds)
    yield from (shown_seconds(each) for each in times)
    yield shown_share(period.share(category))
    yield shown_seconds(share.thread_seconds)
    yield shown_nbytes(share.nbytes) if share.nbytes else "-"
    yield f"{shown_nbytes(share.nbytes / share.seconds)}/s" if share.nbytes and times[0] else "-"


def _threads(ranks: Sequence[RankReport]) -> Table:
    table = new_table(["rank", "thread", "time"], [])
    for rank in ranks:
        busy = sorted(rank.threads, key=lambda each: -sum(each.seconds.values()))
        for thread in busy[:MOST_THREADS]:
            busiest = sorted(thread.seconds.items(), key=lambda each: -each[1])
            told = ", ".join(f"{shown(c)} {shown_seconds(seconds)}" for c, seconds in busiest[:5])
            table.add_row(str(rank.rank), Text(thread.name), told)
    return table


def _what_ifs(report: Report) -> Table:
    table = new_table(["what if"], ["all epochs would take", "saved"])
    for each in report.what_ifs:
        table.add_row(each.words, shown_seconds(each.seconds), shown_share(each.saved_share))
    return table


def _files(report: Report) -> Table:
    table = new_table(["slowest files"], ["reads", "time", "lost", "slowest", "bytes", "rate"])
    for each in report.analysis.files[:MOST_FILES]:
        times = (each.seconds, each.lost_seconds, each.slowest_seconds)
        table.add_row(
            Text(each.name),
            f"{each.num_reads:,}",
            *map(shown_seconds, times),
            shown_nbytes(each.nbytes),
            f"{shown_nbytes(each.rate)}/s",
        )
    return table


def _runs(reports: Sequence[Report]) -> Table:
    table = new_table((), RUN_COLUMNS)
    for column in table.columns[:2]:
        column.justify = "left"
    for report in reports:
        table.add_row(*map(Text, run_row(report)))
    return table
