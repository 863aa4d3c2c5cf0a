"""What reports and HTML pages of hyperslab share: their style, their tables, their numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from html import escape

STYLE = """
:root { color-scheme: light dark; --ground: #fbfcfd; --ink: #1d2733; --faint: #5c6b7a;
  --line: #dde3ea; --strong: #2a6f97; --weak: #d1603d; }
@media (prefers-color-scheme: dark) { :root { --ground: #12181f; --ink: #e3e9ef; --faint: #93a1b0;
  --line: #2c3743; --strong: #62b0dc; --weak: #f0936f; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 70rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.answer { font-size: 1.1rem; border-left: 4px solid var(--strong); padding-left: 1rem; }
.faint { color: var(--faint); } pre { white-space: pre-wrap; padding: .8rem 1rem;
  border: 1px solid var(--line); border-radius: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } td.number, th.number { text-align: right; white-space: nowrap; }
.time { width: 14rem; min-width: 8rem; }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden; }
.key span { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  margin: 0 .35rem 0 1rem; } .charts { display: flex; flex-wrap: wrap; gap: 2rem; }
"""
"""In light and in dark, as the reader's system has it."""


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A page that needs nothing but itself; ``title`` is escaped here."""
    title = escape(title)
    code = f"\n<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{style}</style></head>\n"
        f"<body><h1>{title}</h1>\n{body}{code}\n</body></html>\n"
    )


def header_row(names: Iterable[str], words: Collection[str]) -> str:
    """The head of a table; columns that are not in ``words`` hold numbers."""
    made = (f"<th{_class(name not in words)}>{escape(name)}</th>" for name in names)
    return f"<tr>{''.join(made)}</tr>"


def table_row(cells: Iterable[str], num_words: int = 1) -> str:
    """A row; its first cells are words, the others numbers. Cells are escaped here."""
    made = (f"<td{_class(i >= num_words)}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    return f"<tr>{''.join(made)}</tr>"


def _class(is_number: bool) -> str:
    return " class=number" if is_number else ""


def shown_seconds(seconds: float) -> str:
    """With its unit.

    >>> shown_seconds(0.00811), shown_seconds(2.5), shown_seconds(3e-6), shown_seconds(0)
    ('8.11 ms', '2.5 s', '3 µs', '0 s')
    >>> shown_seconds(7503.2)
    '7,503 s'
    """
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def shown_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def shown_share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1%}"
