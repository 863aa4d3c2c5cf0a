"""Tables of settings: checked, and laid over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.train.config_keys import nearest_key, nearest_table, settings, tables
from hyperslab.train.config_values import MisfitError, expected, fit, shown

MERGED = ("options", "beside", "validation_beside", "test_beside")
"""Settings that are tables of independent entries; others, such as ``normalize``, are one value."""

Tables = dict[str, dict[str, Any]]
"""Settings by table and name."""


def checked_tables(content: Mapping[str, Any], origin: str) -> Tables:
    """The settings of a file as their annotations want them; ``origin`` begins every error."""
    found: Tables = {}
    for table, pairs in content.items():
        check_table(table, pairs, origin)
        found[table] = {
            name: checked_value(table, name, value, origin) for name, value in pairs.items()
        }
    return found


def check_table(table: str, pairs: object, origin: str) -> None:
    if table in tables():
        if not isinstance(pairs, Mapping):
            raise ConfigError(
                f"{origin}: {table} must be a table of settings, such as [{table}] or "
                f"{table}.{next(iter(settings(table)))} = ..., got {shown(pairs)}"
            )
        return
    if isinstance(pairs, Mapping):
        near, what = nearest_table(table), f"table [{table}]"
    else:
        near, what = nearest_key("", table), f"setting {table}"
    advice = f"did you mean {near}?" if near else f"the tables are {', '.join(tables())}"
    raise ConfigError(f"{origin}: there is no {what} (got {shown(pairs)}): {advice}")


def checked_value(table: str, name: str, value: object, origin: str) -> Any:
    annotation = annotation_of(table, name, value, origin)
    try:
        return fit(value, annotation)
    except MisfitError:
        raise wrong_value(f"{table}.{name}", annotation, value, origin) from None


def annotation_of(table: str, name: str, value: object, origin: str) -> Any:
    """The annotation of a setting; raises if there is no such setting."""
    if name in settings(table):
        return settings(table)[name]
    near = nearest_key(table, name)
    advice = f"did you mean {near}?" if near else f"[{table}] has {', '.join(settings(table))}"
    raise ConfigError(
        f"{origin}: there is no setting {table}.{name} (got {shown(value)}): {advice}"
    )


def wrong_value(key: str, annotation: Any, value: object, origin: str) -> ConfigError:
    return ConfigError(f"{origin}: {key} must be {expected(annotation, value)}, got {shown(value)}")


def merged(base: Tables, over: Tables) -> Tables:
    """``base`` with the settings of ``over`` in place of its own; options are merged."""
    found = {table: dict(pairs) for table, pairs in base.items()}
    for table, pairs in over.items():
        mine = found.setdefault(table, {})
        forget_options(mine, pairs.get("name"))
        for name, value in pairs.items():
            old = mine.get(name)
            merge = name in MERGED and isinstance(old, dict) and isinstance(value, dict)
            mine[name] = {**(old or {}), **value} if merge else value
    return found


def forget_options(pairs: dict[str, Any], name: str | None) -> None:
    """Drops options that belong to what ``pairs`` names, if it is to be another ``name``."""
    if name is not None and pairs.get("name") not in (None, name):
        pairs.pop("options", None)
