"""A configuration as a TOML file that tells what each setting means."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import date, time
from functools import cache

from hyperslab.annotations import NONE
from hyperslab.errors import ConfigError
from hyperslab.train import config as config_module
from hyperslab.train.config import Config

_WIDTH = 98


def config_to_toml(config: Config) -> str:
    """All settings, with what they mean, as a text that reads back to an equal configuration.

    Defaults are written too, so that a run can be repeated when they have changed.
    """
    tables = [table.name for table in fields(config) if table.name != "plan"]
    parts = [*(_table(name, getattr(config, name)) for name in tables), _plan(config)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _table(table: str, values: object) -> Iterator[str]:
    yield f"[{table}]"
    about = _docstrings()[type(values).__name__]
    for setting in fields(values):  # type: ignore[arg-type]
        yield from _comment(about.get(setting.name, ""))
        value = getattr(values, setting.name)
        yield f"{toml_key(setting.name)} = {toml_value(NONE if value is None else value)}"


def _plan(config: Config) -> Iterator[str]:
    yield "[plan]"
    yield from _comment(_docstrings()[type(config).__name__]["plan"])
    yield from (f"{toml_key(name)} = {toml_value(cut)}" for name, cut in config.plan.items())


def _comment(text: str) -> list[str]:
    words = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")


@cache
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """The texts under the settings, by class and name."""
    tree = ast.parse(inspect.getsource(config_module))
    return {node.name: _texts(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(cls: ast.ClassDef) -> dict[str, str]:
    """The strings that follow annotated names."""
    found = {}
    for node, following in zip(cls.body, cls.body[1:], strict=False):
        match node, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = text
    return found


# Values as TOML text, which Python's library reads but does not write

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: object) -> str:
    """``value`` on one line.

    >>> toml_value({"size": 64, "betas": [0.9, 0.99], "name": "a b"})
    '{size = 64, betas = [0.9, 0.99], name = "a b"}'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(str(name))} = {toml_value(each)}" for name, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return _quoted(os.fspath(value) if isinstance(value, os.PathLike) else str(value))


def toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{text!a} is not text that can be written: use names in UTF-8")
    # The escapes of JSON are those of TOML, which allows no raw DEL either.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
