"""Changes to a configuration, as they are typed: ``data.batch_size=8``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.train.config_tables import (
    Tables,
    annotation_of,
    check_table,
    forget_options,
    wrong_value,
)
from hyperslab.train.config_values import MisfitError, accepts, fit


def apply_changes(found: Tables, changes: Sequence[str]) -> Tables:
    """``found`` with ``changes`` made to it, the last one last."""
    found = {table: dict(pairs) for table, pairs in found.items()}
    parsed = [Change(text) for text in changes]
    names = {change.table: change.value for change in parsed if change.path[1:] == ("name",)}
    for table, name in names.items():
        forget_options(found.setdefault(table, {}), str(name))
    for change in parsed:
        change.apply(found.setdefault(change.table, {}))
    return found


@dataclass(frozen=True)
class Change:
    """One change; reading any part of it raises where the text makes no sense."""

    text: str

    @property
    def origin(self) -> str:
        return f"--set {self.text}"

    @property
    def table(self) -> str:
        return self.path[0]

    @cached_property
    def path(self) -> tuple[str, ...]:
        """The parts of the key: table, setting, and perhaps parts of its value."""
        key, equals, value = self.text.partition("=")
        path = _key_path(key) if equals and value.strip() else ()
        if not path:
            raise ConfigError(
                f"{self.origin}: a change is a key and a value, such as data.batch_size=8"
            )
        if len(path) == 1:
            check_table(path[0], self.value, self.origin)  # raises, as no table is a value
            raise ConfigError(
                f"{self.origin}: {path[0]} is a table: change its settings one by one"
            )
        check_table(path[0], {".".join(path[1:]): self.value}, self.origin)
        return path

    @cached_property
    def raw(self) -> str:
        return self.text.partition("=")[2].strip()

    @cached_property
    def value(self) -> Any:
        """As TOML has it, else the bare word."""
        try:
            content = tomllib.loads(f"value = {self.raw}")
        except (ValueError, RecursionError) as error:
            if self.raw[0] in "\"'{" or (self.raw[0] == "[" and self.raw[-1] == "]"):
                raise ConfigError(
                    f"{self.origin}: {self.raw} is not a TOML value ({error}): strings in lists "
                    'and tables need quotes, such as ["a", "b"]'
                ) from error
            return self.raw
        return content["value"] if len(content) == 1 else self.raw

    def apply(self, pairs: dict[str, Any]) -> None:
        """Sets it in ``pairs``, the settings of its table."""
        name, *inside = self.path[1:]
        annotation = annotation_of(self.table, name, self.value, self.origin)
        value = self.value
        if inside:
            if not accepts(annotation, Mapping):
                raise ConfigError(
                    f"{self.origin}: {self.table}.{name} is no table, and has no {inside[0]}"
                )
            value = _set_inside(pairs.get(name), inside, self.value)
        pairs[name] = self._fit(f"{self.table}.{name}", value, annotation)

    def _fit(self, key: str, value: object, annotation: Any) -> Any:
        for candidate in (value, self.raw):  # 2024 may well be the name of a file
            if candidate is value or accepts(annotation, str):
                try:
                    return fit(candidate, annotation)
                except MisfitError:
                    continue
        raise wrong_value(key, annotation, value, self.origin)


def _key_path(key: str) -> tuple[str, ...]:
    """The parts of a dotted key, or none if it is not one."""
    try:
        content: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return ()
    path = []
    while isinstance(content, dict):
        if len(content) != 1:
            return ()
        name, content = content.popitem()
        path.append(name)
    return tuple(path)


def _set_inside(old: object, path: Sequence[str], value: object) -> dict[str, Any]:
    """``old`` with ``value`` at ``path``; what is no table there gives way."""
    found = dict(old) if isinstance(old, Mapping) else {}
    name, *rest = path
    found[name] = _set_inside(found.get(name), rest, value) if rest else value
    return found
