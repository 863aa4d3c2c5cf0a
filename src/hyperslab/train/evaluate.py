"""What a model is worth on samples that it has not learned from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from hyperslab.store import Loader
from hyperslab.train.batch import Roles
from hyperslab.train.task import Meter, Task


def evaluate(
    model: nn.Module,
    loader: Loader,
    task: Task,
    roles: Roles,
    context: AbstractContextManager[object],
    *,
    is_stopped: Callable[[], object] = lambda: False,
) -> Meter | None:
    """The meter of one pass over ``loader``; None if ``is_stopped`` said so after some batch.

    Collective over all ranks, as is ``is_stopped``.
    """
    meter, modes = task.meter(), {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for arrays in loader:
                batch = roles.batch(arrays)
                with context:
                    output = model(batch.x)
                    loss = task.loss(output, batch)
                meter.add(output, batch, loss)
                if is_stopped():
                    return None
    finally:
        for part, mode in modes.items():
            part.training = mode
    return meter
