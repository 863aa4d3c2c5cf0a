"""Process groups, made once for every set of ranks and kept as long as the default group lives."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hyperslab.comm.graph import unwatched

_made: dict[tuple[object, ...], ProcessGroup] = {}
_made_for: list[ProcessGroup] = []


def group_of(
    partition: Iterable[tuple[int, ...]], rank: int, backend: str, timeout: timedelta
) -> ProcessGroup:
    """The group of the set of ranks in ``partition`` that ``rank`` belongs to.

    Collective over all ranks the first time: each makes all the groups of the partition, in the
    same order, as torch wants it. These groups carry only our messages, so that they cannot be
    mistaken for averages of gradients, by us or by FSDP, which run in the default group.
    """
    world = dist.group.WORLD
    assert world is not None
    if _made_for != [world]:
        _made.clear()
        _made_for[:] = [world]
    found = None
    for ranks in partition:
        key = (ranks, backend, timeout)
        if key not in _made:
            with unwatched():
                _made[key] = dist.new_group(
                    list(ranks), timeout, backend, pg_options=_options(backend, timeout)
                )
        if rank in ranks:
            found = _made[key]
    assert found is not None
    return found


def _options(backend: str, timeout: timedelta) -> Any:
    """NCCL's stream goes before others: a halo must not queue behind the interior that hides it."""
    if "nccl" not in backend:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def forget_groups() -> None:
    """Lets go of all groups, so that they end with their last user."""
    _made.clear()
    _made_for.clear()
