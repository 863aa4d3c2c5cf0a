"""Classes and functions of the user's own, named in a configuration."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hyperslab.errors import ConfigError, did_you_mean


def find_named(text: str, what: str) -> Callable[..., Any]:
    """The class or function that ``text`` names: ``package.module:Name`` or ``path/file.py:Name``.

    Modules are also looked for in the current folder, and those that a file imports beside it.
    ``what`` is the setting, for errors.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        raise ConfigError(
            f"{what} = {text!r} is not understood: write module:Name or path/to/file.py:Name"
        )
    try:
        module = _file(Path(place)) if place.endswith(".py") else _module(place)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} = {text!r}: {_why(error, place)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{what} = {text!r}: {place} has no {name}{_near(name, found)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"{what} = {text!r} is {type(found).__name__}, neither a class nor a function"
        )
    return found  # type: ignore[no-any-return]


def _near(name: str, where: object) -> str:
    public = [each for each in dir(where) if not each.startswith("_")]
    return did_you_mean(name.rpartition(".")[2], public, ": ")


def _module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """The module in a file, loaded once, under a name that no other module has."""
    path = path.expanduser().resolve()
    name = f"hyperslab.files.{path}"
    if name not in sys.modules:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        _look_in(path.parent)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _look_in(folder: Path) -> None:
    """Lets modules be imported from ``folder``, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _why(error: BaseException, place: str) -> str:
    """What went wrong while importing, and in which line of the user's own code."""
    if isinstance(error, FileNotFoundError) and not Path(place).exists() and place.endswith(".py"):
        return str(error)
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{place}.".startswith(f"{error.name}.")
    ):
        return f"there is no module {error.name} (looked in the current folder too)"
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{place} cannot be imported: {said}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place} cannot be imported: {said} ({Path(last.filename).name}, line {last.lineno})"
