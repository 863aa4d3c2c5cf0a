"""Results that are on disk as soon as they are known: a run that is stopped loses nothing."""

import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

NO_TIME = "not measured: no time left (--budget)"
Found = dict[str, Any]
"""What is known of one row of a table."""


def about_this_run() -> dict[str, str]:
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


class Record:
    """A table that grows by rows, printed at the end and kept in ``<folder>/<name>.json, .md``."""

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        cells: Callable[[Found], Sequence[str]],
        *,
        folder: Path | None = None,
        budget: float = float("inf"),
    ) -> None:
        """``cells`` makes a row of text of what was found; ``budget`` is in seconds from now."""
        self.name, self.columns, self.cells, self.folder = name, columns, cells, folder
        self.rows: list[Found] = []
        self._begun, self._budget = time.perf_counter(), budget

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be begun any more."""
        return self.seconds > self._budget

    def add(self, row: Found) -> None:
        self.rows.append(row)
        told = ", ".join(cell for cell in self.cells(row) if cell)
        print(f"{self.seconds:6.1f} s  {told}", file=sys.stderr, flush=True)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / f"{self.name}.json", json.dumps(self.report(), indent=1))
            _replace(self.folder / f"{self.name}.md", self.markdown())

    def report(self) -> Found:
        return {**about_this_run(), "seconds": round(self.seconds, 1), self.name: self.rows}

    def markdown(self) -> str:
        about = about_this_run()
        lines = [
            f"{about['device']}, torch {about['torch']}: `{about['command']}`, "
            f"{self.seconds:.0f} s.\n",
            _line(self.columns),
            _line(["---"] * len(self.columns)),
            *(_line(self.cells(row)) for row in self.rows),
        ]
        return "\n".join(lines) + "\n"

    def print(self, width: int = 140) -> None:
        table = Table(*self.columns, title=self.name)
        for row in self.rows:
            table.add_row(*self.cells(row))
        Console(width=width).print(table)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _replace(path: Path, text: str) -> None:
    """All of it, or what was there before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
