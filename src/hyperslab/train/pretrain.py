"""Greedy pre-training of a stack in a program of one's own: a plain loop over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.models import StackedAutoencoder
from hyperslab.nn.parallel.parallelize import Parallel
from hyperslab.store import Loader
from hyperslab.train.config import StagesConfig
from hyperslab.train.stages import (
    Stage,
    check_stack,
    check_unit_range,
    encode,
    plan_stages,
    sparsity,
    the_sample,
    train_only,
)

MakeOptimizer = Callable[..., Optimizer]
"""Of weights and ``lr``."""


def pretrain(
    model: nn.Module,
    data: Dataset,
    mesh: Mesh,
    *,
    epochs: int | Sequence[int],
    together: int = 0,
    lr: float | Sequence[float] = 1e-3,
    noise: float | Sequence[float] = 0.0,
    kl: float = 0.0,
    rho: float = 0.05,
    l1: float = 0.0,
    optimizer: MakeOptimizer = torch.optim.Adam,
    **loader: Any,
) -> list[list[float]]:
    """Trains each pair of a parallelized ``StackedAutoencoder`` on the code of those before it.

    Then all pairs are trained for ``together`` epochs. ``epochs``, ``lr`` and ``noise`` are one
    number, or one for each pair; ``noise``, ``kl``, ``rho`` and ``l1`` mean what they mean in the
    table ``[stages]`` of a run. ``optimizer`` makes one of weights and ``lr``. Everything else,
    such as ``batch_size``, ``seed`` and ``normalize``, goes to ``hyperslab.Loader``.

    Codes are computed once, and kept cut in the memory of the ranks. Gives the mean loss of each
    epoch, by stage; the last stage is that of all pairs.

    Collective over the mesh.
    """
    if not isinstance(model, Parallel):
        raise ConfigError(
            "pretrain takes a parallelized model: hyperslab.parallelize(model, mesh) first"
        )
    stack = check_stack(model, "pretrain takes")
    config = StagesConfig(epochs=epochs, lr=lr, noise=noise, kl=kl, rho=rho, l1=l1)
    *stages, last = plan_stages(config, stack.num_stages, together, _first(lr))
    if loader.get("augment") is not None:
        raise ConfigError("pretrain takes no augment: codes are computed once, of samples as is")
    samples = Loader(data, mesh, **loader)
    source, losses = samples, []
    try:
        for stage in stages:
            if stage.number:
                source = _codes(stack, source, samples, stage, mesh, loader)
            losses.append(_fit(stack, source, stage, optimizer))
    finally:
        if source is not samples:
            source.close()
    with samples:
        losses.append(_fit(stack, samples, last, optimizer))
    stack.requires_grad_(True)
    return losses


def _first(values: float | Sequence[float]) -> float:
    return values if isinstance(values, int | float) else values[0]


def _codes(
    model: StackedAutoencoder,
    source: Loader,
    samples: Loader,
    stage: Stage,
    mesh: Mesh,
    asked: dict[str, Any],
) -> Loader:
    """A loader of what the pair before ``stage`` makes of what ``source`` has, which it closes."""
    pair = (stage.number - 1, stage.number)
    codes = encode(model, source, pair, stage.first_epoch, mesh, nullcontext())
    if source is not samples:
        source.close()
    for_files = ("normalize", "augment", "preload", "stage_dir", "bad_samples", "store", "dtype")
    kept = {name: value for name, value in asked.items() if name not in for_files}
    dtype = torch.float64 if codes.dtype == "float64" else torch.float32
    return Loader(codes, mesh, dtype=dtype, **kept)


def _fit(
    model: StackedAutoencoder, source: Loader, stage: Stage, make: MakeOptimizer
) -> list[float]:
    """Trains the pairs of ``stage``; the mean loss of each of its epochs."""
    train_only(model, stage)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = make(weights, lr=stage.lr)
    source.load_state_dict({**source.state_dict(), "epoch": stage.first_epoch, "sample": 0})
    model.train()
    return [_epoch(model, source, stage, optimizer) for _ in range(stage.num_epochs)]


def _epoch(
    model: StackedAutoencoder, source: Iterable[Any], stage: Stage, optimizer: Optimizer
) -> float:
    total, num = torch.zeros((), dtype=torch.float64), 0
    for arrays in source:
        x = the_sample(arrays)
        output, *codes = model(x, stages=stage.pairs, noise=stage.noise, want="both")
        if stage.kl and not num:
            check_unit_range(codes)
        loss: Tensor = F.mse_loss(output, x) + sparsity(codes, stage)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach().cpu() * len(x)
        num += len(x)
    return float(total / max(1, num))
