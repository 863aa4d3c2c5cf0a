"""What the terminal shows of a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
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
LEAST_SHARE = 0.0005
"""Categories that are given less of every epoch have no column."""
UNLIMITED = 10_000
Rows = Sequence[tuple[str, Sequence[str]]]


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


def new_table(words: Sequence[str], numbers: Sequence[str], widest: int | None = None) -> Table:
    """An empty one in the style of all; its first column is as wide as it is, up to ``widest``."""
    table = Table(box=box.SIMPLE, padding=(0, 1), show_edge=False, header_style="bold")
    for place, name in enumerate(words):
        is_whole = not place and widest is None
        limit = None if place else widest
        table.add_column(name, overflow="fold", no_wrap=is_whole, max_width=limit)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


class Fitting:
    """The first of ``tables``, which come the widest first, that is no wider than the screen."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = [*tables]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        unlimited = options.update(width=UNLIMITED, max_width=UNLIMITED)
        for table in self._tables[:-1]:
            if Measurement.get(console, unlimited, table).maximum <= options.max_width:
                yield table
                return
        yield self._tables[-1]


def _narrower(words: str, columns: Sequence[str], rows: Rows, *dropped: Sequence[str]) -> Fitting:
    """A table of named columns, or one with narrower words, or without what is ``dropped``."""

    def tables() -> Iterator[Table]:
        choices: list[tuple[int | None, Sequence[str]]] = [(None, ()), (48, ()), (32, ())]
        choices += [(32, each) for each in dropped]
        choices += [(22, each) for each in dropped[-1:] or ((),)]
        for widest, left_out in choices:
            kept = [place for place, name in enumerate(columns) if name not in left_out]
            table = new_table([words], [columns[place] for place in kept], widest)
            for name, numbers in rows:
                table.add_row(Text(name), *(numbers[place] for place in kept))
            yield table

    return Fitting(tables())


def shown(category: Category) -> str:
    return category.name.replace("_", "-")


def _epochs(what: str, periods: dict[str, Period]) -> Fitting:
    """The exposed share of each category, by epoch or by rank; where it is narrow, of the largest.

    What the smaller ones were given together is ``rest``.
    """
    largest = {each: max(period.share(each) for period in periods.values()) for each in Category}
    columns = [category for category in Category if largest[category] >= LEAST_SHARE]
    by_size = sorted(columns, key=lambda each: -largest[each])

    def tables() -> Iterator[Table]:
        for num in range(len(columns), 0, -1):
            kept = [each for each in columns if each in by_size[:num]]
            rest = [each for each in columns if each not in kept]
            heads = ["time", *map(shown, kept), *(["rest"] if rest else [])]
            table = new_table([what], heads)
            for name, period in periods.items():
                shares = [period.share(each) for each in kept]
                shares += [period.share(*rest)] if rest else []
                table.add_row(name, shown_seconds(period.seconds), *map(shown_share, shares))
            yield table

    return Fitting(tables() if columns else [new_table([what], ["time"])])


def categories_table(period: Period) -> Fitting:
    """Total, exposed and hidden time of each category."""
    columns = ("seconds", "exposed", "hidden", "of the time", "of threads", "bytes", "rate")
    rows = [
        (shown(category), [*_numbers(period, category, share)])
        for category, share in period.categories.items()
        if share.seconds or share.nbytes
    ]
    dropped = (["of threads"], ["of threads", "rate"], ["of threads", "rate", "bytes"])
    return _narrower("all epochs", columns, rows, *dropped)


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


def _what_ifs(report: Report) -> Fitting:
    rows = [
        (each.words, [shown_seconds(each.seconds), shown_share(each.saved_share)])
        for each in report.what_ifs
    ]
    return _narrower("what if", ("all epochs would take", "saved"), rows)


def _files(report: Report) -> Fitting:
    columns = ("reads", "time", "lost", "slowest", "bytes", "rate")
    rows = []
    for each in report.analysis.files[:MOST_FILES]:
        times = (each.seconds, each.lost_seconds, each.slowest_seconds)
        numbers = [f"{each.num_reads:,}", *map(shown_seconds, times), shown_nbytes(each.nbytes)]
        rows.append((each.name, [*numbers, f"{shown_nbytes(each.rate)}/s"]))
    return _narrower("slowest files", columns, rows, ["slowest"], ["slowest", "bytes", "reads"])


def _runs(reports: Sequence[Report]) -> Fitting:
    def tables() -> Iterator[Table]:
        for num in (len(RUN_COLUMNS), len(RUN_COLUMNS) - 2):
            for widest in (None, 32, 22, 14):
                table = new_table(RUN_COLUMNS[:1], RUN_COLUMNS[1:num], widest)
                table.columns[1].justify = "left"
                for report in reports:
                    table.add_row(*map(Text, run_row(report)[:num]))
                yield table

    return Fitting(tables())
