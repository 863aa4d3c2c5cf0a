"""What is printed, where that may fail: a disk that is full, a reader that is gone."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import click
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

BARS = " ▁▂▃▄▅▆▇█"


def draw(parts: Iterable[RenderableType], *, min_width: int = 0) -> str:
    """The parts as text for stdout: in colour on a terminal, else at least ``min_width`` wide."""
    stdout, memory = Console(), io.BytesIO()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    console = Console(
        file=io.TextIOWrapper(memory, encoding, errors="replace", newline=""),
        force_terminal=stdout.is_terminal,
        width=stdout.width if stdout.is_terminal else max(stdout.width, min_width),
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    return memory.getvalue().decode(encoding).rstrip("\n")


def print_result(content: object, as_json: bool, *parts: RenderableType) -> None:
    """Prints ``content`` as JSON, or else the parts.

    What goes into a file or a pipe is not wrapped where a narrow screen would end.
    """
    print_answer(json.dumps(content, indent=2) if as_json else draw(parts, min_width=120))


def print_answer(text: str) -> None:
    """Prints what the user has asked for, or ends the command with an error."""
    try:
        click.echo(text)
    except OSError as error:
        _silence(sys.stdout)
        if _is_gone(error):
            raise click.exceptions.Exit(1) from error
        raise click.ClickException(f"stdout cannot be written: {error.strerror}") from error


def print_news(text: str, *, err: bool = False) -> None:
    """Prints what came of something, which is done even if nobody can read of it."""
    try:
        click.echo(text, err=err)
    except OSError as error:
        _silence(sys.stderr if err else sys.stdout)
        if not err and not _is_gone(error):
            print_news(f"Warning: stdout cannot be written: {error.strerror}", err=True)


@contextmanager
def progress_bar(title: str, *, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """What is told how much is done and how much there is, and shows a bar on a terminal."""
    counts = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if in_bytes
        else (MofNCompleteColumn(), TimeElapsedColumn())
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def two_columns() -> Table:
    """An empty table for names and what is to be said of them."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def bars(counts: Sequence[int]) -> str:
    """A character for each count, as high as its square root so that tails can be seen."""
    top = max(counts, default=0) or 1
    heights = [round((count / top) ** 0.5 * (len(BARS) - 1)) for count in counts]
    return "".join(
        BARS[max(height, count > 0)] for height, count in zip(heights, counts, strict=True)
    )


def counted(num: int, word: str) -> str:
    """Such as ``1 file`` and ``2 processes``."""
    return f"{num} {word}" if num == 1 else f"{num} {word}{'es' if word.endswith('s') else 's'}"


def _is_gone(error: OSError) -> bool:
    """Whether nobody reads any more, as after ``| head``."""
    return error.errno == errno.EPIPE


def _silence(stream: TextIO) -> None:
    """Lets what it still holds go nowhere, or Python would fail on it at exit, with code 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
