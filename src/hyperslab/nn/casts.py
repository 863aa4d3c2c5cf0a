"""How autocast casts, to be had again later."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Casts:
    """How operands are cast on a kind of device."""

    kind: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device: torch.device) -> Casts:
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        """Without a cache: what it keeps of weights would outlive a tile and its graph."""
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)
