"""What is printed, where that may fail: a disk that is full, a reader that is gone."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

import click
from rich.console import Console, RenderableType
from rich.text import Text


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


def _is_gone(error: OSError) -> bool:
    """Whether nobody reads any more, as after ``| head``."""
    return error.errno == errno.EPIPE


def _silence(stream: TextIO) -> None:
    """Lets what it still holds go nowhere, or Python would fail on it at exit, with code 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
