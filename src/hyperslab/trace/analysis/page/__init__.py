"""One HTML page that tells what runs waited for; it needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from hyperslab.pages import document, header_row, shown_seconds, shown_share, table_row
from hyperslab.partial import shown_nbytes
from hyperslab.trace.analysis.lanes import COLOURS
from hyperslab.trace.analysis.page.content import (
    MOST_RANKS_OF_ITERATION,
    epochs_of_ranks,
    run_content,
)
from hyperslab.trace.analysis.runs import RUN_COLUMNS, lines_of_runs, run_row, runs_verdict
from hyperslab.trace.file import printable

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

MOST_NOTES = 20


def to_html(reports: Sequence[Report]) -> str:
    """Of one run, or of several that are compared first."""
    title = ", ".join(report.name for report in reports)
    content = {"colours": COLOURS, "runs": [run_content(report) for report in reports]}
    parts = [*_runs(reports)] if len(reports) > 1 else []
    for number, report in enumerate(reports):
        parts += _run(report, number, named=len(reports) > 1)
    # No "<" of a name may end the script, or begin another one.
    packed = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="trace-data">{packed}</script>')
    script, style = _shipped("report.js"), _shipped("report.css")
    page = document(f"Trace of {title}", "\n".join(parts), style=style, script=script)
    return printable(page)


def _shipped(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _run(report: Report, number: int, *, named: bool) -> Iterator[str]:
    analysis = report.analysis
    yield f'<section class="run" id="run-{number}">'
    if named:
        yield f"<h1>{escape(report.name)}</h1>"
    yield f'<p class="answer">{escape(report.verdict)}</p>'
    yield (
        f'<p class="faint">{report.num_ranks} rank{"s" * (report.num_ranks != 1)}, '
        f"{analysis.num_spans:,} spans, "
        f"{shown_seconds((analysis.stop - analysis.start) / 1e9)}.</p>"
    )
    yield from _notes([*analysis.notes, *_left_out(report)])
    yield '<p class="sticky"><label>Rank <select class="rank"></select></label></p>'
    yield "<h2>Where the time of epochs goes</h2>"
    yield (
        '<p class="faint">Each moment of the loop is given to one category: it computes, or it '
        "waits for what is named.</p>"
    )
    yield '<p class="key faint epoch-key"></p><div class="epochs"></div>'
    yield '<p><label>Epoch <select class="epoch"></select></label></p>'
    columns = ("", "seconds", "exposed", "hidden", "of the time", "of threads", "bytes", "rate")
    yield _table(columns, [], "categories")
    yield (
        '<p class="faint">Exposed: the loop waited for it, or did it. Hidden: it went on while '
        "something else was done or waited for. Of <i>wait</i>, what readers did meanwhile is "
        "given to them: what is exposed of it no recorded work explains.</p>"
    )
    yield '<h2>Bandwidth and timeline</h2><div class="bandwidth"></div><div class="whole"></div>'
    yield from _iteration(report)
    yield from _what_ifs(report)
    yield from _stragglers(report)
    yield from _reads(report)
    yield "<h2>I/O and compute by thread</h2>"
    yield _table(("rank", "thread", "I/O", "compute", "time"), [], "threads", ("thread", "time"))
    yield "</section>"


def _left_out(report: Report) -> Iterator[str]:
    """What a page has no room for."""
    num = epochs_of_ranks(report)
    if len(report.analysis.epochs) > num:
        yield f"of single ranks this page shows the first {num} epochs; --json has all"
    if report.analysis.iteration and report.num_ranks > MOST_RANKS_OF_ITERATION:
        yield f"of the iteration this page shows {MOST_RANKS_OF_ITERATION} ranks"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        shown = [f"<li>{escape(note)}</li>" for note in notes[:MOST_NOTES]]
        if len(notes) > MOST_NOTES:
            shown.append(f"<li>and {len(notes) - MOST_NOTES} more</li>")
        yield f'<ul class="faint notes">{"".join(shown)}</ul>'


def _table(
    columns: Sequence[str], rows: Iterable[str], name: str = "", words: Sequence[str] = ()
) -> str:
    named = f" class={name}" if name else ""
    head = header_row(columns, {columns[0], *words})
    return (
        f'<div class="wide"><table><thead>{head}</thead><tbody{named}>{"".join(rows)}'
        "</tbody></table></div>"
    )


def _iteration(report: Report) -> Iterator[str]:
    iteration = report.analysis.iteration
    if iteration is None:
        return
    yield f"<h2>One iteration: step {iteration.number} of epoch {iteration.epoch}</h2>"
    yield (
        '<p class="faint">The one whose length is in the middle. To the right is what of it is '
        'hidden: in its time the rank computed.</p><div class="iteration"></div>'
    )


def _what_ifs(report: Report) -> Iterator[str]:
    if report.what_ifs:
        rows = (
            table_row([each.words, shown_seconds(each.seconds), shown_share(each.saved_share)])
            for each in report.what_ifs
        )
        yield "<h2>What if</h2>"
        yield _table(("", "all epochs would take", "saved"), rows)


def _stragglers(report: Report) -> Iterator[str]:
    if report.stragglers:
        rows = (
            table_row(
                [
                    f"rank {each.rank} ({each.host})",
                    each.category.name.replace("_", "-"),
                    shown_seconds(each.seconds),
                    shown_seconds(each.usual_seconds),
                    shown_seconds(each.lag_seconds),
                    shown_seconds(max(0.0, each.others_wait_seconds)),
                ],
                2,
            )
            for each in report.stragglers
        )
        columns = ("rank", "slow in", "takes", "on others", "late by", "others wait")
        yield "<h2>Stragglers</h2>"
        yield _table(columns, rows, words=["slow in"])


def _reads(report: Report) -> Iterator[str]:
    analysis = report.analysis
    if analysis.files:
        rows = (
            table_row(
                [
                    each.name,
                    f"{each.num_reads:,}",
                    shown_seconds(each.seconds),
                    shown_seconds(each.lost_seconds),
                    shown_seconds(each.slowest_seconds),
                    shown_nbytes(each.nbytes),
                    f"{shown_nbytes(each.rate)}/s",
                ]
            )
            for each in analysis.files
        )
        yield "<h2>Slowest files</h2>"
        yield _table(("file", "reads", "time", "lost", "slowest", "bytes", "rate"), rows)
    if len(analysis.reading) > 1:
        rows = (
            table_row(
                [str(each.num_reads), shown_seconds(each.seconds), f"{shown_nbytes(each.rate)}/s"]
            )
            for each in analysis.reading
        )
        yield "<h2>Reads at once</h2>"
        yield _table(("reads at once, of all ranks", "for", "bring"), rows)


def _runs(reports: Sequence[Report]) -> Iterator[str]:
    rows = (table_row(run_row(report), 2) for report in reports)
    if words := runs_verdict(reports):
        yield f'<p class="answer">{escape(words)}</p>'
    yield "<h2>All runs</h2>"
    yield _table(RUN_COLUMNS, rows, words=RUN_COLUMNS[:2])
    lines = lines_of_runs(reports)
    if lines:
        yield _chart(lines)


# The share of I/O by ranks

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 480, 260, 60, 40, 30
_STROKES = ("#2a6f97", "#d1603d", "#4c956c", "#9d5bd2")


def _chart(lines: dict[str, list[tuple[int, float]]]) -> str:
    ranks = sorted({num for points in lines.values() for num, _ in points})
    most = max(max(share for points in lines.values() for _, share in points), 0.01)

    def x(num: int) -> float:
        return LEFT + (WIDTH - LEFT - 20) * ranks.index(num) / max(1, len(ranks) - 1)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share / most

    drawn = [f'<text class="title" x="{LEFT}" y="16">I/O that the loop waits for, by ranks</text>']
    for num in ranks:
        at = f'x="{x(num):.0f}" y="{HEIGHT - BOTTOM + 18}"'
        drawn.append(f'<text {at} text-anchor="middle">{num}</text>')
    for share in (0.0, most / 2, most):
        place = f'y1="{y(share):.0f}" y2="{y(share):.0f}"'
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" {place}/>')
        drawn.append(f'<text x="4" y="{y(share) + 4:.0f}">{shown_share(share)}</text>')
    for i, (name, points) in enumerate(lines.items()):
        colour = _STROKES[i % len(_STROKES)]
        places = " ".join(f"{x(num):.0f},{y(share):.0f}" for num, share in points)
        drawn.append(f'<polyline stroke="{colour}" points="{places}"/>')
        drawn += [
            f'<circle fill="{colour}" cx="{x(num):.0f}" cy="{y(share):.0f}" r="4"/>'
            for num, share in points
        ]
        at = f'x="{LEFT + 8 + 130 * i}" y="{HEIGHT - 4}"'
        drawn.append(f'<text {at} style="fill:{colour}">{escape(name)}</text>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="I/O share by ranks"'
    return f'<svg class="io-by-ranks" {box}>{"".join(drawn)}</svg>'
