"""What all commands on data take: the files, what they hold, and the mesh that reads them."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from glob import glob
from pathlib import Path
from typing import Any

import click

from hyperslab.io import PRESETS, Dataset, known_formats, open as open_data
from hyperslab.layout import AXES, Grid

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files that the user named, and what was said of them."""

    paths: tuple[str, ...]
    sample: str | None
    target: tuple[str, ...]
    axes: str | None
    preset: str | None
    format: str | None
    options: Mapping[str, Any]

    def open(self) -> Dataset:
        return open_data(
            self.paths,
            sample=self.sample,
            target=self.target or None,
            axes=_axes(self.axes),
            preset=self.preset,
            format=self.format,
            **self.options,
        )

    def words(self) -> list[str]:
        """The paths and options, as they would be typed again."""
        named = {"preset": self.preset, "sample": self.sample, "axes": self.axes}
        pairs = [(f"--{name}", value) for name, value in named.items() if value]
        pairs += [("--target", name) for name in self.target]
        pairs += [("--format", self.format)] if self.format else []
        pairs += [("--option", f"{name}={value}") for name, value in self.options.items()]
        words = [word for pair in pairs for word in pair]
        return [shlex.quote(word) for word in (*self.shown_paths, *words)]

    @property
    def shown_paths(self) -> list[str]:
        """The paths, or the pattern that the shell may have made them of."""
        first = Path(self.paths[0])
        pattern = str(first.parent / f"*{first.suffix}")
        given = sorted(str(Path(path)) for path in self.paths)
        if len(given) > 3 and sorted(str(Path(path)) for path in glob(pattern)) == given:
            return [pattern]
        return list(self.paths)


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what the files hold; ``command`` gets them as ``source``.

    The files themselves come as its argument ``paths``.
    """

    @wraps(command)
    def wrapped(
        paths: tuple[str, ...],
        sample: str | None,
        target: tuple[str, ...],
        axes: str | None,
        preset: str | None,
        format: str | None,
        option: tuple[tuple[str, Any], ...],
        **rest: Any,
    ) -> Any:
        source = Source(
            paths=paths,
            sample=sample,
            target=target,
            axes=axes,
            preset=preset,
            format=format,
            options=dict(option),
        )
        return command(source=source, **rest)

    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped


class MeshType(click.ParamType):
    """Axes with their sizes, such as ``depth=2,height=2``."""

    name = "MESH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Grid:
        if isinstance(value, Grid):
            return value
        sizes = {}
        for part in str(value).replace("x", ",").split(",") if "=" in str(value) else [""]:
            axis, _, size = part.strip().partition("=")
            if axis not in AXES or axis in sizes or not size.isdecimal() or not int(size):
                self.fail(
                    f"{value!r} is not a mesh such as depth=2,height=2 (its axes are among "
                    f"{', '.join(AXES)}, each at most once)",
                    param,
                    ctx,
                )
            sizes[axis] = int(size)
        return Grid(tuple(sizes.get(axis, 1) for axis in AXES))


class NumbersType(click.ParamType):
    """Numbers and ranges of them, both ends included, such as ``0-3,8``."""

    name = "NUMBERS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found: list[int] = []
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                self.fail(f"{value!r} is not numbers such as 0-3 or 0,2,5", param, ctx)
            found += range(int(first), int(last or first) + 1)
        return tuple(dict.fromkeys(found))


class ShapeType(click.ParamType):
    """Lengths joined by x, such as ``1x32x128x128``."""

    name = "SHAPE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).lower().split("x")
        if not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} is not lengths joined by 'x', such as 1x32x128x128", param, ctx)
        return tuple(map(int, parts))


class OptionType(click.ParamType):
    """A name and a value: a number, a list, a shape such as 4x64x64, or else text."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is not a name and a value, such as dtype=int16", param, ctx)
        return name, _value(text)


MESH, NUMBERS, SHAPE = MeshType(), NumbersType(), ShapeType()

_OPTIONS = (
    click.option("--sample", metavar="NAME", help="The array that holds the sample."),
    click.option(
        "--target",
        metavar="NAME",
        multiple=True,
        help="An array that belongs to it: a label map, a vector. May be repeated.",
    ),
    click.option(
        "--axes",
        metavar="LETTERS",
        help="The sample's dims in the file's order, such as DHWC, or NCHW for many samples a "
        "file; image=DHWC,labels=DHW for several arrays.",
    ),
    click.option("--preset", type=click.Choice(list(PRESETS)), help="A known schema."),
    click.option(
        "--format",
        type=click.Choice(list(known_formats())),
        help="The format, where the suffix does not tell it.",
    ),
    click.option(
        "-o",
        "--option",
        type=OptionType(),
        multiple=True,
        help="For the format: dtype=int16, shape=4x64x64x64 and offset=512 of raw files.",
    ),
)


def _axes(text: str | None) -> str | dict[str, str] | None:
    if text is None or "=" not in text:
        return text
    return dict(tuple(part.split("=", 1)) for part in text.split(",") if "=" in part)


def _value(text: str) -> Any:
    parts = text.lower().split("x")
    if len(parts) > 1 and all(part.isdecimal() for part in parts):
        return tuple(map(int, parts))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
