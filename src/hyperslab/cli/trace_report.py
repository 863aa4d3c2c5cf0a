"""``hyperslab trace report`` and ``compare``: what runs waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperslab.cli.output import print_news, print_result
from hyperslab.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

REPORT_EXAMPLES = """\b
Examples:
  hyperslab trace report runs/cosmo                 what did it wait for?
  hyperslab trace report runs/cosmo --html trace.html --png trace.png
  hyperslab trace report runs/on-1 runs/on-2 runs/on-4 --html scaling.html
  hyperslab trace report runs/cosmo --json | jq .verdict
"""

COMPARE_EXAMPLES = """\b
Examples:
  hyperslab trace compare runs/before runs/after
"""

RUN = click.Path(path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=REPORT_EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RUN)
@click.option("--html", type=OUTPUT, help="Write a page with charts and timelines.")
@click.option("--png", type=OUTPUT, help="Draw epochs and one iteration; of the first RUN.")
@click.option("--ranks", is_flag=True, help="Show every rank, and every thread.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than tables.")
def report(
    runs: tuple[Path, ...], html: Path | None, png: Path | None, ranks: bool, as_json: bool
) -> None:
    """Tell what a run waited for: first in words, then in numbers.

    RUN is the folder of a run, a folder of trace files, or trace files; files of one folder are one
    run. Several runs are shown side by side: by their ranks, and by how samples were shuffled.
    """
    if png and png.suffix.lower() != ".png":
        raise ConfigError(f"{png} is no name of a picture: --png writes .png")
    reports = read_runs(runs)
    from hyperslab.trace.analysis.tables import to_parts

    content = reports[0].to_dict() if len(reports) == 1 else _of_several(reports)
    print_result(content, as_json, *to_parts(reports, ranks=ranks))
    if html:
        from hyperslab.partial import write_file
        from hyperslab.trace.analysis.page import to_html

        write_file(html, to_html(reports))
        print_news(f"Page: {html}", err=True)
    if png:
        from hyperslab.trace.analysis.figures import draw_report

        draw_report(reports[0], png)
        print_news(f"Picture: {png}", err=True)


@click.command(epilog=COMPARE_EXAMPLES)
@click.argument("before", metavar="A", type=RUN)
@click.argument("after", metavar="B", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def compare(before: Path, after: Path, as_json: bool) -> None:
    """Tell what is faster or slower in run B than it was in A.

    Epochs after the first are compared, category by category.
    """
    from hyperslab.trace.analysis.compare import Comparison

    reports = [read_runs([path])[0] for path in (before, after)]
    comparison = Comparison(*reports)
    print_result(comparison.to_dict(), as_json, *comparison.to_parts())


def read_runs(paths: Sequence[Path]) -> list[Report]:
    """A report of each folder, and of the files of each folder."""
    from hyperslab.trace.analysis.report import report as report_of

    groups: dict[Path, list[Path]] = {}
    for path in paths:
        groups.setdefault(path.parent / "*" if path.is_file() else path, []).append(path)
    reports = [report_of(list(group)) for group in groups.values()]
    if not any(each.analysis.num_spans for each in reports):
        why = next((f": {note}" for each in reports for note in each.analysis.notes), "")
        names = ", ".join(each.name for each in reports)
        raise FormatError(f"{names}: nothing was recorded{why}")
    return reports


def _of_several(reports: Sequence[Report]) -> dict[str, object]:
    from hyperslab.trace.analysis.runs import runs_verdict

    told = [report.to_dict() for report in reports]
    words = runs_verdict(reports) or " ".join(f"{r.name}: {r.verdict}" for r in reports)
    return {"verdict": words, "runs": told}
