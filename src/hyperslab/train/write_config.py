"""A configuration as a TOML file that tells what each setting means."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache

from hyperslab.train import config as config_module
from hyperslab.train.config import Config
from hyperslab.train.config_values import NONE
from hyperslab.train.toml_text import toml_key, toml_value

_WIDTH = 98


def config_to_toml(config: Config) -> str:
    """All settings, with what they mean, as a text that reads back to an equal configuration.

    Defaults are written too, so that a run can be repeated when they have changed.
    """
    parts = [_table(table.name, getattr(config, table.name)) for table in fields(config)]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _table(table: str, values: object) -> Iterator[str]:
    yield f"[{table}]"
    about = _docstrings()[type(values).__name__]
    for setting in fields(values):  # type: ignore[arg-type]
        yield from _comment(about.get(setting.name, ""))
        value = getattr(values, setting.name)
        yield f"{toml_key(setting.name)} = {toml_value(NONE if value is None else value)}"


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
