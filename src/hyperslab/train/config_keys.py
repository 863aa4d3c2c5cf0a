"""The keys of a configuration, and what a wrong one was meant to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from hyperslab.train.config import Config

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
    "gpus": "mesh.sample",
    "ranks": "mesh.sample",
    "base": "base at the top of a file",
}
"""What other programs call our settings."""


@cache
def tables() -> Mapping[str, type]:
    """The tables of a configuration, and the class of each."""
    return get_type_hints(Config)


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
