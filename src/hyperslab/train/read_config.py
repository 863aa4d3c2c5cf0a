"""From TOML files, presets and changes to a configuration."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hyperslab.errors import ConfigError
from hyperslab.train.config import Config
from hyperslab.train.config_changes import apply_changes
from hyperslab.train.config_keys import required, tables
from hyperslab.train.config_tables import Tables, checked_tables, merged
from hyperslab.train.preset_list import PRESETS, preset_text
from hyperslab.train.write_config import config_to_toml as config_to_toml

SAVED_AS = "config.toml"
"""The configuration's name in the folder of a run."""


def read_config(source: str | os.PathLike[str], changes: Sequence[str] = ()) -> Config:
    """The configuration that ``source`` holds, with ``changes`` made to it, the last one last.

    ``source`` is the name of a preset, a TOML file, or the folder of a run, which stays its
    ``run.folder``. A file may begin with ``base = "cosmoflow-128"`` (a preset, or another file,
    looked for from where this one is), and then says only what is different; the ``options`` of a
    base go when another ``name`` is given beside them.

    A change is a text such as ``data.batch_size=8``: a key and a TOML value, where words need no
    quotes. ``none`` takes a setting back to None. Paths of data are as the current folder sees
    them, wherever the file is.
    """
    name = os.fspath(source)
    return _made(apply_changes(_layers(name, ()), changes), name)


def config_name(source: str | os.PathLike[str]) -> str:
    """What a run of ``source`` is called: its preset, the file's stem, or the folder's name."""
    name = os.fspath(source)
    if name in PRESETS:
        return name
    path = Path(name).absolute()
    return path.name if path.is_dir() else path.stem


def _made(found: Tables, source: str) -> Config:
    for table, name in required():
        if name not in found.get(table, {}):
            raise ConfigError(
                f"{source} does not set {table}.{name}, which every run needs: add it to table "
                f"[{table}], or begin with a preset (base = ..., hyperslab train --list)"
            )
    return Config(**{table: cls(**found.get(table, {})) for table, cls in tables().items()})


def _layers(source: str, users: tuple[str, ...]) -> Tables:
    """The tables of ``source`` over those of its base; ``users`` are the files it is a base of."""
    place = source if source in PRESETS else str(_file_of(source).absolute())
    if place in users:
        raise ConfigError(
            f"{source} is its own base{f', by way of {users[-1]}' if users[1:] else ''}"
        )
    content = _parsed(source)
    base = content.pop("base", None)
    found = checked_tables(content, source)
    if Path(source).is_dir() and source not in PRESETS:
        found.setdefault("run", {})["folder"] = source
    if base is None:
        return found
    if not isinstance(base, str):
        raise ConfigError(f"{source}: base must be the name of a preset or a file, got {base!r}")
    if base not in PRESETS:
        base = str(_file_of(source).parent / base)
    return merged(_layers(base, (*users, place)), found)


def _parsed(source: str) -> dict[str, Any]:
    text = preset_text(source) if source in PRESETS else _text_of(_file_of(source))
    shown = source if source in PRESETS else _file_of(source)
    try:
        return tomllib.loads(f"{text}\n")  # so that no error is at the very end, which has no line
    except ValueError as error:  # TOMLDecodeError, and that of a number with too many digits
        raise ConfigError(f"{shown}{_where(str(error))}") from error
    except RecursionError as error:
        raise ConfigError(f"{shown} is nested too deeply to be read") from error


def _where(message: str) -> str:
    """The parser's message, with line and column in front."""
    found = re.fullmatch(r"(.*) \(at (line \d+, column \d+|end of document)\)", message, re.DOTALL)
    return f", {found[2]}: {found[1]}" if found else f": {message}"


def _file_of(source: str) -> Path:
    path = Path(source)
    return path / SAVED_AS if path.is_dir() else path


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(_missing(path)) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: it is not UTF-8 text") from error
    except ValueError as error:  # a null byte
        raise ConfigError(f"{str(path)!r} is not a path") from error


def _missing(path: Path) -> str:
    if path.name == SAVED_AS and path.parent.is_dir():
        return f"{path.parent} is a folder without {SAVED_AS}, so not that of a run"
    beside = [str(each) for each in path.parent.glob("*.toml")]
    near = [name for name in PRESETS if name.startswith(str(path))]
    near = near or get_close_matches(str(path), [*PRESETS, *beside], 1, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{path} is neither a file nor a preset (looked from {Path.cwd()}): {hint}"
        "hyperslab train --list shows all presets"
    )
