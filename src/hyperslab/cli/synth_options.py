"""Options of the commands that make samples up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hyperslab.cli.data_options import JSON, Decorator


def size_option(num: int, default: str, text: str, *, one_for_all: bool = False) -> Decorator:
    """An option for ``num`` lengths joined by x; where they may be equal, one stands for all."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        parts = value.lower().split("x")
        if len(parts) == 1 and one_for_all:
            parts *= num
        if len(parts) != num or not all(part.isdecimal() and int(part) for part in parts):
            either = f"{default} or " if one_for_all else ""
            example = "x".join([default] * num) if one_for_all else default
            raise click.BadParameter(f"{value!r} is not a size such as {either}{example}")
        return tuple(map(int, parts))

    return click.option("--size", default=default, show_default=True, callback=parsed, help=text)


def synth_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what all commands here take beside their sizes and counts."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


_OPTIONS = (
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of chance."),
    click.option(
        "--jobs",
        type=click.IntRange(1),
        help="Processes; default: one a core, as far as memory goes.",
    ),
    click.option("--overwrite", is_flag=True, help="Make files anew that are there already."),
    JSON,
)
OUT = click.argument("out", type=click.Path(file_okay=False, path_type=Path))


def count_option(default: int, text: str) -> Decorator:
    return click.option(
        "--count", type=click.IntRange(1), default=default, show_default=True, help=text
    )


def per_file_option(default: int) -> Decorator:
    return click.option(
        "--per-file",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="Images in a file.",
    )


def checked_equal(size: tuple[int, ...], name: str) -> int:
    if len(set(size)) > 1:
        shown = "x".join(map(str, size))
        raise click.BadParameter(f"{shown} is not {name}", param_hint="'--size'")
    return size[0]
