"""How much memory a step may take."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a GPU; None on CPUs, which nobody needs to ask."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
