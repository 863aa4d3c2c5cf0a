"""HDF5 files that are there whole or not at all, and say what they were made with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import h5py

from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.partial import partial_file

MADE_WITH = "made_with"
"""The attribute of a file that says with which settings it was made, as JSON."""

Settings = Mapping[str, str | int | float]


@contextmanager
def whole_file(path: Path, settings: Settings) -> Iterator[h5py.File]:
    """A new file to fill; it gets its name when it is whole and on disk, and is gone otherwise."""
    # Without a lock of HDF5's own: the file is locked already.
    with partial_file(path) as (part, _), h5py.File(part, "w", locking=False) as file:
        file.attrs[MADE_WITH] = json.dumps(dict(settings))
        yield file


def is_whole(path: Path, settings: Settings) -> bool:
    """Whether the file is there, made with ``settings``; raises if it is something else."""
    if not path.exists():
        return False
    was = _made_with(path)
    if changed := sorted(name for name in {*was, *settings} if was.get(name) != settings.get(name)):
        there, asked = (
            ", ".join(f"{name}={made.get(name)}" for name in changed) for made in (was, settings)
        )
        raise ConfigError(f"{path} was made with {there}, not {asked}: {_WAYS_OUT}")
    return True


def _made_with(path: Path) -> Settings:
    try:
        with h5py.File(path, "r") as file:
            text = file.attrs.get(MADE_WITH)
    except (OSError, RuntimeError, KeyError) as error:  # as h5py reports damage
        raise FormatError(f"{path} exists and cannot be read ({error}): {_WAYS_OUT}") from error
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise ConfigError(f"{path} was not made by this command: {_WAYS_OUT}") from None


_WAYS_OUT = "choose another folder, or overwrite its files with --overwrite"
