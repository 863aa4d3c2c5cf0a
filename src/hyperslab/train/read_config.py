"""From TOML files, presets and changes to a configuration."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hyperslab.annotations import accepts
from hyperslab.errors import ConfigError
from hyperslab.train.config import Config
from hyperslab.train.config_schema import (
    PLAN,
    Tables,
    annotation_of,
    check_table,
    checked_tables,
    checked_value,
    forget_axes,
    forget_options,
    merged,
    required,
    tables,
)
from hyperslab.train.preset_list import PRESETS, preset_text

SHORT = {"mesh=auto": "mesh.auto=true"}
"""Changes by their shorter forms."""
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
    under = _of_pretrained(name, changes)
    return _made(apply_changes(_layers(name, (), under), changes), name)


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
    made = {table: cls(**found.get(table, {})) for table, cls in tables().items()}
    return Config(**made, plan=found.get(PLAN, {}))


FROM_RUN = {"model": ("name", "options"), "data": (), "train": ("seed", "precision")}
"""What fine-tuning takes from the pre-trained run; nothing named is all."""
FEW_LABELS = ("labelled_fraction", "batch_size")
"""Of the data: not what is said of labels."""


def _of_pretrained(source: str, changes: Sequence[str]) -> Tables:
    """What ``finetune.run``, if it is set, gives to the configuration; that of a run has it all."""
    if Path(source).is_dir():
        return {}
    run = apply_changes(_layers(source, (), {}), changes).get("finetune", {}).get("run")
    if run is None:
        return {}
    if not (Path(run) / SAVED_AS).is_file():
        raise ConfigError(
            f"finetune.run = {run!r} is not the folder of a run: there is no {SAVED_AS} in it "
            f"(looked from {Path.cwd()})"
        )
    there = _layers(run, (), {})
    found = {
        table: {k: v for k, v in there.get(table, {}).items() if k in (names or there[table])}
        for table, names in FROM_RUN.items()
    }
    found["data"] = {k: v for k, v in found["data"].items() if k not in FEW_LABELS}
    return found


def _over_preset(preset: Tables, under: Tables) -> Tables:
    """A preset with the model and the data of the pre-trained run in place of its own."""
    if not under:
        return preset
    own = {k: v for k, v in preset.get("data", {}).items() if k in FEW_LABELS}
    train = {**preset.get("train", {}), **under["train"]}
    return {**preset, "model": under["model"], "data": {**under["data"], **own}, "train": train}


def _layers(source: str, users: tuple[str, ...], under: Tables) -> Tables:
    """The tables of ``source`` over those of its base; ``users`` are the files it is a base of.

    ``under`` lies between the files of the user and presets.
    """
    place = source if source in PRESETS else str(_file_of(source).absolute())
    if place in users:
        raise ConfigError(
            f"{source} is its own base{f', by way of {users[-1]}' if users[1:] else ''}"
        )
    content = _parsed(source)
    if content.get("mesh") == "auto":
        content["mesh"] = {"auto": True}
    base = content.pop("base", None)
    found = checked_tables(content, source)
    if Path(source).is_dir() and source not in PRESETS:
        found.setdefault("run", {})["folder"] = source
    is_outermost = source in PRESETS and not any(user in PRESETS for user in users)
    if base is None:
        if source in PRESETS:
            return _over_preset(found, under) if is_outermost else found
        return merged(under, found)
    if not isinstance(base, str):
        raise ConfigError(f"{source}: base must be the name of a preset or a file, got {base!r}")
    if base not in PRESETS:
        base = str(_file_of(source).parent / base)
    found = merged(_layers(base, (*users, place), under), found)
    return _over_preset(found, under) if is_outermost else found


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


# Changes to a configuration, as they are typed: ``data.batch_size=8``


def apply_changes(found: Tables, changes: Sequence[str]) -> Tables:
    """``found`` with ``changes`` made to it, the last one last."""
    found = {table: dict(pairs) for table, pairs in found.items()}
    parsed = [Change(SHORT.get("".join(text.split()), text)) for text in changes]
    names = {change.table: change.value for change in parsed if change.path[1:] == ("name",)}
    for table, name in names.items():
        forget_options(found.setdefault(table, {}), str(name))
    for change in parsed:
        pairs = found.setdefault(change.table, {})
        if change.path == ("mesh", "auto") and change.value is True:
            forget_axes(pairs)
        change.apply(pairs)
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
        path = self._split(key.strip()) if equals and value.strip() else ()
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

    def _split(self, key: str) -> tuple[str, ...]:
        """The parts of a key; names of modules have dots and stars, and quotes where one likes."""
        table, dot, rest = key.partition(".")
        if table != PLAN or not dot:
            return _key_path(key)
        name, setting = (rest, ()) if isinstance(self.value, Mapping) else rest.rpartition(".")[::2]
        return (PLAN, name.strip("\"' "), *([setting] if setting else []))

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
        pairs[name] = checked_value(self.table, name, value, self.origin, self.raw)


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
