"""The log of a run: a line of JSON for every report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from hyperslab.io.partial import explained_writing, partial_file

Line: TypeAlias = dict[str, Any]


def read_log(path: Path) -> list[Line]:
    """All whole lines, in order, without those that a killed run tore; none if there is no file."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    return list(_whole_lines(text))


def _whole_lines(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found


def cut_log(path: Path, step: int) -> list[Line]:
    """Keeps the lines up to ``step`` alone, and gives them; the file is never half written."""
    with explained_writing(path):
        kept = [line for line in read_log(path) if line["step"] <= step]
    text = "".join(to_json(line) + "\n" for line in kept)
    with partial_file(path) as (_, fd), os.fdopen(os.dup(fd), "w") as file:
        file.write(text)
    return kept


def to_json(values: Mapping[str, Any], **how: Any) -> str:
    """As JSON, which knows neither NaN nor infinity: they become null."""
    return json.dumps(_without_nan(values), allow_nan=False, **how)


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
