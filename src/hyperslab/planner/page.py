"""One HTML page that tells what was found; it needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from hyperslab.pages import (
    document,
    header_row,
    shown_rate,
    shown_seconds,
    shown_share,
    table_row,
)
from hyperslab.partial import shown_nbytes, write_file
from hyperslab.planner.report import (
    LAYER_COLUMNS,
    MOST_ROWS,
    layer_row,
    rows_of,
    rule_warning,
    samples,
    sentence,
    shares_of,
    usage,
)
from hyperslab.planner.scaling import Point, strong_scaling, weak_scaling
from hyperslab.planner.search import Candidate, Found

STYLE = """
td:first-child { min-width: 11rem; }
.kernels { background: #2a6f97; } .recompute { background: #7b2cbf; }
.halos { background: #d1603d; } .reductions { background: #e9c46a; }
.recuts { background: #48cae4; } .gradients { background: #4c956c; }
.optimizer { background: #90be6d; } .host { background: #f28482; } .slowest { background: #6d597a; }
.data { background: #8d99ae; }
svg { flex: 1 1 26rem; max-width: 36rem; height: auto; }
svg text { fill: var(--faint); font-size: 12px; }
svg .title { fill: var(--ink); font-size: 13px; } svg line { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2; } svg .ideal { stroke: var(--faint);
  stroke-dasharray: 5 4; stroke-width: 1.2; }
.strong { stroke: var(--strong); } circle.strong { fill: var(--strong); }
.weak { stroke: var(--weak); } circle.weak { fill: var(--weak); }
"""


def write_page(found: Found, path: Path, most: int = MOST_ROWS) -> None:
    write_file(path, to_html(found, most))


def to_html(found: Found, most: int = MOST_ROWS) -> str:
    title = f"{found.job.network.name} on {found.gpus} x {found.machine.gpu}"
    parts = [*_answer(found), *_meshes(found, most), *_scaling(found), *_layers(found.best)]
    return document(title, "\n".join(parts), style=STYLE)


def _answer(found: Found) -> Iterator[str]:
    job, machine = found.job, escape(found.machine.name)
    shape = "x".join(map(str, job.network.input_shape))
    yield f'<p class="answer">{escape(sentence(found))}.</p>'
    yield f"<pre>{escape(chr(10).join(usage(found)))}</pre>"
    if warning := rule_warning(found):
        yield f"<p>{escape(warning)}.</p>"
    yield (
        f'<p class="faint">Samples of {shape}, {job.precision}, {escape(job.optimizer)}, read from '
        f"{escape(job.source)}; machine: {machine}. All numbers are predicted.</p>"
    )


# The best meshes, and where their time goes


def _meshes(found: Found, most: int) -> Iterator[str]:
    rows = rows_of(found, most)
    longest = max(candidate.step_seconds for candidate, _ in rows)
    used = {name for each, _ in rows for name, share in shares_of(each).items() if share}
    yield "<h2>The best meshes</h2>"
    names = [name for name in found.best.cost.parts if name in used]
    key = "".join(f'<span class="{name}"></span>{name}' for name in names)
    yield f'<p class="key faint">Where the time goes:{key}</p>'
    columns = ["mesh", *_NUMBERS, "time"]
    yield f'<div class="wide"><table><thead>{header_row(columns, _WORDS)}</thead><tbody>'
    for candidate, alike in rows:
        yield _mesh_row(found, candidate, alike, candidate.step_seconds / longest)
    yield "</tbody></table></div>"


_NUMBERS = ("step", "samples/s", "of ideal", "memory")


def _mesh_row(found: Found, candidate: Candidate, alike: int, width: float) -> str:
    more = f' <span class="faint">(+{alike} alike)</span>' if alike else ""
    numbers = (
        shown_seconds(candidate.step_seconds),
        shown_rate(candidate.samples_per_second),
        shown_share(found.efficiency(candidate)),
        shown_nbytes(candidate.memory_nbytes),
    )
    cells = "".join(f'<td class="number">{each}</td>' for each in numbers)
    cells += f'<td class="time">{_bar(candidate, width)}</td>'
    return f"<tr><td>{escape(str(candidate))}{more}</td>{cells}</tr>"


def _bar(candidate: Candidate, width: float) -> str:
    seconds = candidate.cost.parts
    parts = "".join(
        f'<div class="{name}" style="width:{share:.2%}" '
        f'title="{name}: {shown_seconds(seconds[name])}, {share:.1%}"></div>'
        for name, share in shares_of(candidate).items()
        if share
    )
    return f'<div class="bar" style="width:{width:.1%}">{parts}</div>'


_WORDS = ("mesh", "time", *LAYER_COLUMNS[:3])


# Scaling


def _scaling(found: Found) -> Iterator[str]:
    job = found.job
    yield '<h2>With more and fewer GPUs</h2><div class="charts">'
    yield _chart(strong_scaling(found), f"strong: {samples(job.batch)} a step", "strong")
    title = f"weak: {samples(job.batch)} on {found.gpus} GPUs, in proportion on others"
    yield _chart(weak_scaling(found), title, "weak")
    yield "</div>"


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 480, 320, 64, 44, 30, 16


class _Scale:
    """From logarithms to places in a picture."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._start, self._length = start, stop - start

    def __call__(self, value: float) -> float:
        return round(self._start + (math.log(value) - self._low) / self._span * self._length, 1)


def _chart(points: Sequence[Point], title: str, name: str) -> str:
    """Samples a second by GPUs, both by their logarithms."""
    fitting = [(point, point.best) for point in points if point.best is not None]
    first, first_best = fitting[0]
    rate = first_best.samples_per_second / first.gpus
    rates = [best.samples_per_second for _, best in fitting]
    ideal = [rate * point.gpus for point, _ in fitting]
    x = _Scale(points[0].gpus, max(points[-1].gpus, 2), LEFT, WIDTH - RIGHT)
    low, high = min(*rates, *ideal) / 1.15, max(*rates, *ideal) * 1.15
    y = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    lines = [*_grid(points, x, y, low, high)]
    for values, style in ((ideal, "ideal"), (rates, name)):
        places = " ".join(
            f"{x(point.gpus)},{y(value)}" for (point, _), value in zip(fitting, values, strict=True)
        )
        lines.append(f'<polyline class="{style}" points="{places}"/>')
    for point, best in fitting:
        told = f"{point.gpus} GPUs, {samples(point.batch)} a step, {best.cut}: "
        told += (
            f"{shown_seconds(best.step_seconds)}, {shown_rate(best.samples_per_second)} samples/s"
        )
        at = f'cx="{x(point.gpus)}" cy="{y(best.samples_per_second)}"'
        lines.append(f'<circle class="{name}" {at} r="4"><title>{escape(told)}</title></circle>')
    missing = [str(point.gpus) for point in points if point.best is None]
    note = f" (nothing fits on {', '.join(missing)})" if missing else ""
    lines.append(f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>')
    lines.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">samples/s by GPUs{note}; dashed: ideal</text>')
    content = "\n".join(lines)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}>{content}</svg>"


def _grid(points: Sequence[Point], x: _Scale, y: _Scale, low: float, high: float) -> Iterator[str]:
    for point in points:
        place, below = x(point.gpus), HEIGHT - BOTTOM
        yield f'<line x1="{place}" x2="{place}" y1="{TOP}" y2="{below}"/>'
        yield f'<text x="{place}" y="{below + 16}" text-anchor="middle">{point.gpus}</text>'
    for value in _ticks(low, high):
        place = y(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>'
        yield f'<text x="{LEFT - 6}" y="{place + 4}" text-anchor="end">{value:,.6g}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, a few.

    >>> _ticks(30, 700)
    [50.0, 100.0, 200.0, 500.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return found if len(found) <= 7 else [each for each in found if math.log10(each) % 1 < 1e-9]


# Layers


def _layers(best: Candidate) -> Iterator[str]:
    yield "<h2>Layer by layer</h2>"
    yield (
        f"<details><summary>{len(best.cost.layers)} operators of the best mesh; of an exchange, "
        "what kernels do not hide is waited for</summary>"
    )
    yield f'<div class="wide"><table><thead>{header_row(LAYER_COLUMNS, _WORDS)}</thead><tbody>'
    for layer in best.cost.layers:
        yield table_row(layer_row(layer), 3)
    yield "</tbody></table></div></details>"
