"""What all commands on data take: the files, what they hold, and the mesh that reads them."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from hyperslab.io import PRESETS, Dataset, known_formats, open as open_data
from hyperslab.io.sharing import Ranks, shared
from hyperslab.io.targets import Targets
from hyperslab.layout import AXES, Grid

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files that the user named, and what was said of them."""

    paths: tuple[str, ...]
    sample: str | None
    target: tuple[str, ...]
    axes: str | dict[str, str] | None
    preset: str | None
    format: str | None
    beside: Mapping[str, str]
    pair_by: str | None
    columns: tuple[str, ...]
    key: str | None
    attributes: tuple[str, ...]
    options: Mapping[str, Any]

    def open(self, mesh: Ranks | None = None) -> Dataset:
        """With ``mesh`` rank 0 looks at the files for all; collective over all ranks."""
        if mesh is None or mesh.num_ranks == 1:
            return self._opened()
        return Dataset(shared(lambda: self._opened().manifest, mesh))

    def _opened(self) -> Dataset:
        targets = Targets(
            beside=self.beside,
            pair_by=self.pair_by,
            columns=self.columns or None,
            key=self.key,
            attributes=self.attributes,
        )
        axes = self.axes if isinstance(self.axes, dict) else {}
        of_targets = {name: letters for name, letters in axes.items() if name in self.beside}
        own = {name: letters for name, letters in axes.items() if name not in self.beside}
        data = open_data(
            self.paths,
            sample=self.sample,
            target=self.target or None,
            axes=self.axes if isinstance(self.axes, str) else own or None,
            preset=self.preset,
            format=self.format,
            **self.options,
        )
        return targets.put_beside(data, of_targets, setting="--pair-by")

    def words(self) -> list[str]:
        """The paths and options, as they would be typed again."""
        axes = self.axes
        if isinstance(axes, dict):
            axes = ",".join(f"{name}={letters}" for name, letters in axes.items())
        named = {"preset": self.preset, "sample": self.sample, "axes": axes}
        pairs = [(f"--{name}", value) for name, value in named.items() if value]
        pairs += [("--target", name) for name in self.target]
        pairs += [("--format", self.format)] if self.format else []
        pairs += [("--beside", f"{name}={pattern}") for name, pattern in self.beside.items()]
        pairs += [("--column", name) for name in self.columns]
        pairs += [("--attribute", name) for name in self.attributes]
        pairs += [("--pair-by", self.pair_by)] if self.pair_by else []
        pairs += [("--key", self.key)] if self.key else []
        pairs += [("--option", f"{name}={value}") for name, value in self.options.items()]
        words = [word for pair in pairs for word in pair]
        return [shlex.quote(word) for word in (*self.shown_paths, *words)]

    @property
    def shown_paths(self) -> list[str]:
        """The paths, or the pattern that the shell may have made them of."""
        first = Path(self.paths[0])
        beside = first.parent.glob(f"*{first.suffix}")
        if len(self.paths) > 3 and set(beside) == set(map(Path, self.paths)):
            return [str(first.parent / f"*{first.suffix}")]
        return list(self.paths)


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what the files hold; ``command`` gets them as ``source``.

    The files themselves come as its argument ``paths``.
    """
    return _with_source(command, (*_OPTIONS, _option_for_format("-o", "--option")))


def data_options_and_out(text: str, *, required: bool = False) -> Decorator:
    """The same, and ``-o`` for an index to write, which ``command`` gets as ``out``."""
    out = click.option(
        "-o",
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_parsed(_checked_index),
        required=required,
        help=text,
    )
    options = (*_OPTIONS, _option_for_format("--option"), out)
    return lambda command: _with_source(command, options)


def _checked_index(path: Path) -> Path:
    if path.suffix != ".json":
        raise click.BadParameter(
            f"an index is a .json file, so that it is known as one: got {path}"
        )
    return path


def _with_source(command: Callable[..., Any], options: Iterable[Decorator]) -> Callable[..., Any]:

    @wraps(command)
    def wrapped(**given: Any) -> Any:
        source = Source(**{each.name: given.pop(each.name) for each in fields(Source)})
        return command(source=source, **given)

    decorated: Callable[..., Any] = wrapped
    for add in reversed(tuple(options)):
        decorated = add(decorated)
    return decorated


def mesh_option(text: str) -> Decorator:
    """``--mesh depth=2,height=2``, which the command gets as a ``Grid``."""
    return click.option("--mesh", metavar="AXES", callback=_parsed(parse_mesh), help=text)


def numbers_option(name: str, text: str) -> Decorator:
    """An option for numbers and ranges of them, both ends included, such as ``0-3,8``."""
    return click.option(name, metavar="NUMBERS", callback=_parsed(parse_numbers), help=text)


def shape_option(name: str, text: str) -> Decorator:
    """An option for lengths joined by x, such as ``1x32x128x128``."""
    return click.option(name, metavar="SHAPE", callback=_parsed(parse_shape), help=text)


def parse_mesh(text: str) -> Grid:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or not int(size):
            raise click.BadParameter(
                f"{text!r} is not a mesh such as depth=2,height=2; its axes are among "
                f"{', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return Grid(tuple(sizes.get(axis, 1) for axis in AXES))


def parse_numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(f"{text!r} is not numbers such as 0-3 or 0,2,5")
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise click.BadParameter(f"{text!r} holds no number, as its end comes before its start")
    return tuple(dict.fromkeys(found))


def parse_shape(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is not lengths joined by 'x', such as 1x32x128x128")
    return tuple(map(int, parts))


def _parse_options(texts: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{text!r} is not a name and a value, such as dtype=int16")
        found[name] = _value(value)
    return found


def _parse_beside(texts: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, pattern = text.partition("=")
        if not equals or not name or not pattern or name in found:
            raise click.BadParameter(
                f"{text!r} is not a name and files, such as label=masks/*.nii, or named twice"
            )
        found[name] = pattern
    return found


def _parse_axes(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): letters.strip() for name, _, letters in pairs}


def _value(text: str) -> Any:
    """A number, a list, a shape such as 4x64x64, or else text."""
    parts = text.lower().split("x")
    if len(parts) > 1 and all(part.isdecimal() for part in parts):
        return tuple(map(int, parts))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parsed(parse: Callable[[Any], Any]) -> Callable[..., Any]:
    """``parse`` as click calls it; what was not given stays None."""
    return lambda ctx, param, value: None if value is None else parse(value)


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
        callback=_parsed(_parse_axes),
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
        "--beside",
        metavar="NAME=PATTERN",
        multiple=True,
        callback=_parsed(_parse_beside),
        help="Targets in other files: label='masks/*.nii', y=targets.csv. May be repeated.",
    ),
    click.option(
        "--pair-by",
        metavar="HOW",
        help="How names go together: a regular expression with a group, a CSV file of pairs, order "
        "or row.",
    ),
    click.option(
        "--column",
        "columns",
        metavar="NAME",
        multiple=True,
        help="A column of the table with numbers; default: all but the key. May be repeated.",
    ),
    click.option(
        "--key", metavar="NAME", help="Its column that names samples; default: the first."
    ),
    click.option(
        "--attribute",
        "attributes",
        metavar="NAME",
        multiple=True,
        help="An attribute of the samples' HDF5 files that is a target. May be repeated.",
    ),
)


def _option_for_format(*names: str) -> Decorator:
    return click.option(
        *names,
        "options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_parsed(_parse_options),
        help="For the format: dtype=int16, shape=4x64x64x64 and offset=512 of raw files.",
    )
