"""Tests on several ranks: real processes, one machine, tenths of a second.

``Team`` needs no pytest; ``on_ranks`` makes a pytest test out of a body that every rank runs.
``ReaderContract`` holds the tests that every file format passes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyperslab.testing.rank_processes import RankError as RankError
from hyperslab.testing.team import Team as Team, on_ranks as on_ranks

if TYPE_CHECKING:
    from hyperslab.testing.compare import (
        assert_same_as_serial as assert_same_as_serial,
        averaged as averaged,
        seeded as seeded,
        whole as whole,
    )
    from hyperslab.testing.reader_contract import ReaderContract as ReaderContract

_LAZY = {
    "assert_same_as_serial": "hyperslab.testing.compare",
    "averaged": "hyperslab.testing.compare",
    "seeded": "hyperslab.testing.compare",
    "whole": "hyperslab.testing.compare",
    "ReaderContract": "hyperslab.testing.reader_contract",
}
"""Names whose modules load torch or pytest, and are therefore imported when first used."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hyperslab.testing' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
