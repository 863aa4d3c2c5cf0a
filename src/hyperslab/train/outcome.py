"""How a run ended, for who started it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Scores = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    summary: dict[str, Any]
    exit_code: int = 0

    def report(self) -> list[RenderableType]:
        """How it ended, its scores, and where figures and weights are, as far as there are any."""
        summary = self.summary
        shown: list[RenderableType] = [Text(f"{summary['folder']}: {summary['state']}")]
        shown += _tables(summary["scores"])
        if figures := [Path(path) for path in summary["figures"]]:
            names = ", ".join(path.name for path in figures)
            shown.append(Text(f"Figures: {figures[0].parent} ({names})"))
        if summary["weights"]:
            shown.append(Text(f"Weights: {summary['weights']}"))
        return shown


def _tables(parts: Mapping[str, Scores]) -> list[Table]:
    """The scores of each part, then those by name (``mae/sigma_8``), with a row for each name."""
    keys = list(dict.fromkeys(key for scores in parts.values() for key in scores))
    plain = [key for key in keys if "/" not in key]
    named = [key.split("/", 1) for key in keys if "/" in key]
    kinds = list(dict.fromkeys(kind for kind, _ in named))
    tables = []
    if plain:
        rows = {key: [scores.get(key) for scores in parts.values()] for key in plain}
        tables.append(_table("score", list(parts), rows))
    if named:
        columns = [f"{part}\n{kind}" for part in parts for kind in kinds]
        rows = {
            name: [scores.get(f"{kind}/{name}") for scores in parts.values() for kind in kinds]
            for _, name in named
        }
        tables.append(_table("name", columns, rows))
    return tables


def _table(first: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]]) -> Table:
    """Numbers in rows; None, which is what becomes of NaN, is a dash."""
    table = Table(first, box=box.SIMPLE, padding=(0, 1), show_edge=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, numbers in rows.items():
        cells = ("-" if number is None else f"{number:.4g}" for number in numbers)
        table.add_row(Text(name), *cells)
    return table
