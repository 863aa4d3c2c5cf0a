"""Training: from a configuration to weights, scores and pictures."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyperslab.train.config import Config as Config

if TYPE_CHECKING:
    from hyperslab.train.losses import LOSSES as LOSSES
    from hyperslab.train.read_config import read_config as read_config
    from hyperslab.train.run import Outcome as Outcome

_LAZY = {
    "LOSSES": "hyperslab.train.losses",
    "Outcome": "hyperslab.train.run",
    "read_config": "hyperslab.train.read_config",
}
"""Names whose modules load torch, and are therefore imported when first used."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hyperslab.train' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
