"""What ``torch.compile`` cannot take in."""

from __future__ import annotations

from typing import NoReturn

from torch.compiler import assume_constant_result

from hyperslab.errors import ConfigError


@assume_constant_result  # type: ignore[untyped-decorator]
def refuse_compiling(name: str) -> NoReturn:
    """Raises while Dynamo traces; where traced code raises, it would run what it is in as it is."""
    raise ConfigError(
        f"{name}, a depth-first chain, cannot be compiled: leave it out of depth_first, or compile "
        "modules without it"
    )
