"""A bar on stderr for work that is counted in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress as RichProgress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hyperslab.io.copying import Progress


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """What is told of bytes done and to do, and shows them on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with RichProgress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
