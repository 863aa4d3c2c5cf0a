"""Values as TOML text, which Python's library reads but does not write."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import date, time

from hyperslab.errors import ConfigError

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
