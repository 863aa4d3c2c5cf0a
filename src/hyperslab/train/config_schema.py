"""What a configuration may hold: its keys, their values, and words for what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_type_hints

from hyperslab.annotations import MisfitError, accepts, expected, fit
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES
from hyperslab.train.config import Config
from hyperslab.train.write_config import toml_key, toml_value

# Keys, and what a wrong one was meant to be

ALIASES = {
    "learning_rate": "optimizer.lr",
    "betas": "optimizer.options.betas",
    "momentum": "optimizer.options.momentum",
    "nesterov": "optimizer.options.nesterov",
    "eps": "optimizer.options.eps",
    "optim": "optimizer",
    "scheduler": "schedule",
    "path": "data.files",
    "paths": "data.files",
    "num_workers": "data.threads",
    "workers": "data.threads",
    "max_steps": "train.steps",
    "max_epochs": "train.epochs",
    "dtype": "train.precision",
    "amp": "train.precision",
    "bf16": "train.precision",
    "grad_clip": "train.clip",
    "clip_grad_norm": "train.clip",
    "output": "run.folder",
    "out": "run.folder",
    "from": "finetune.run",
    "pretrained": "finetune.run",
    "labels": "data.labelled_fraction",
    "gpus": "mesh.sample",
    "ranks": "mesh.sample",
    "base": "base at the top of a file",
}
"""What other programs call our settings."""


PLAN = "plan"
"""The table whose names are not ours: they are patterns of modules."""


@cache
def tables() -> Mapping[str, type]:
    """The tables of a configuration whose settings we name, and the class of each."""
    return {name: each for name, each in get_type_hints(Config).items() if name != PLAN}


@cache
def cut_annotation() -> Any:
    """Of what the plan says of modules."""
    return get_args(get_type_hints(Config)[PLAN])[1]


@cache
def settings(table: str) -> Mapping[str, Any]:
    """The settings in a table, and the annotation of each."""
    return get_type_hints(tables()[table])


@cache
def required() -> tuple[tuple[str, str], ...]:
    """Tables and names of the settings that have no default."""
    return tuple(
        (table, setting.name)
        for table, cls in tables().items()
        for setting in fields(cls)
        if setting.default is MISSING and setting.default_factory is MISSING
    )


def nearest_table(name: str) -> str | None:
    """The table that ``name`` was meant to be, in brackets, or None."""
    near = ALIASES.get(name) if ALIASES.get(name) in tables() else None
    near = near or next(iter(get_close_matches(name, tables(), 1)), None)
    return f"[{near}]" if near else None


def nearest_key(table: str, name: str) -> str | None:
    """The key that ``name`` in ``table`` was meant to be, or None.

    >>> nearest_key("data", "batch_sise"), nearest_key("train", "lr")
    ('data.batch_size', 'optimizer.lr')
    """
    here = settings(table) if table in tables() else {}
    if found := get_close_matches(name, here, 1, cutoff=0.8):
        return f"{table}.{found[0]}"
    if name in ALIASES and ALIASES[name] != table:
        return ALIASES[name]
    for cutoff in (1.0, 0.7):
        if found := get_close_matches(name, _all_names(), 1, cutoff):
            return _all_names()[found[0]]
    found = get_close_matches(name, here, 1)
    return f"{table}.{found[0]}" if found else None


@cache
def _all_names() -> Mapping[str, str]:
    """The key of each name; of equal names, that in the first table."""
    keys = [(table, name) for table in tables() for name in settings(table)]
    return {name: f"{table}.{name}" for table, name in reversed(keys)}


# Tables of settings: checked, and laid over each other

MERGED = ("options", "beside", "validation_beside", "test_beside")
"""Settings that are tables of independent entries; others, such as ``normalize``, are one value."""

Tables = dict[str, dict[str, Any]]
"""Settings by table and name."""

_SHOWN = 60


def shown(value: object) -> str:
    """A value as TOML has it, cut where it is long."""
    text = toml_value(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


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
    if table == PLAN:
        if not isinstance(pairs, Mapping):
            raise ConfigError(
                f"{origin}: plan must be a table of modules and their cuts, such as "
                f'plan."encoder.*" = {{channel = 2}}, got {shown(pairs)}'
            )
        return
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


def checked_value(table: str, name: str, value: object, origin: str, *typed: str) -> Any:
    """``value``, or, where a string is welcome, as it was ``typed``: 2024 may well be a file."""
    annotation = annotation_of(table, name, value, origin)
    for candidate in (value, *(typed if accepts(annotation, str) else ())):
        with suppress(MisfitError):
            return fit(candidate, annotation)
    wanted = expected(annotation, value)
    if table == PLAN and isinstance(value, Mapping):
        wanted += " (names with dots need quotes)"
    name = toml_key(name)
    raise ConfigError(f"{origin}: {table}.{name} must be {wanted}, got {shown(value)}")


def annotation_of(table: str, name: str, value: object, origin: str) -> Any:
    """The annotation of a setting; raises if there is no such setting."""
    if table == PLAN:
        return cut_annotation()
    if name in settings(table):
        return settings(table)[name]
    near = nearest_key(table, name)
    advice = f"did you mean {near}?" if near else f"[{table}] has {', '.join(settings(table))}"
    raise ConfigError(
        f"{origin}: there is no setting {table}.{name} (got {shown(value)}): {advice}"
    )


def merged(base: Tables, over: Tables) -> Tables:
    """``base`` with the settings of ``over`` in place of its own; options are merged."""
    found = {table: dict(pairs) for table, pairs in base.items()}
    for table, pairs in over.items():
        mine = found.setdefault(table, {})
        forget_options(mine, pairs.get("name"))
        if pairs.get("auto") is True:
            forget_axes(mine)
        for name, value in pairs.items():
            old = mine.get(name)
            merge = name in MERGED and isinstance(old, dict) and isinstance(value, dict)
            mine[name] = {**(old or {}), **value} if merge else value
    return found


def forget_options(pairs: dict[str, Any], name: str | None) -> None:
    """Drops options that belong to what ``pairs`` names, if it is to be another ``name``."""
    if name is not None and pairs.get("name") not in (None, name):
        pairs.pop("options", None)


def forget_axes(pairs: dict[str, Any]) -> None:
    """Drops the axes of a mesh, which the planner is to choose."""
    for axis in AXES:
        pairs.pop(axis, None)
