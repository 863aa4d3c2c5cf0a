"""The stages of a stacked autoencoder: what each trains, its loss, and the codes it passes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.io import Dataset
from hyperslab.models import StackedAutoencoder
from hyperslab.nn import Slab
from hyperslab.store import Loader
from hyperslab.store.computed import Computed
from hyperslab.train.config import StagesConfig, TaskConfig
from hyperslab.train.fitting import Values, widened
from hyperslab.train.regression import Reconstruction
from hyperslab.train.task import Batch

CODE = "code"
"""The array of a dataset of codes."""
LEAST_MEAN = 1e-6
"""Keeps logarithms of the means of units finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    number: int
    pairs: tuple[int, int]
    """The first that is trained, and the one after the last."""
    first_epoch: int
    end_epoch: int
    """Epochs are counted over all stages."""
    lr: float
    noise: float = 0.0
    kl: float = 0.0
    rho: float = 0.05
    l1: float = 0.0

    @property
    def num_epochs(self) -> int:
        return self.end_epoch - self.first_epoch


def plan_stages(
    config: StagesConfig, num_pairs: int, together: int, lr: float
) -> tuple[Stage, ...]:
    """One for each of ``num_pairs``, then that of all ``together``, of so many epochs."""
    epochs, lrs, noise = (
        _for_each(name, getattr(config, name), default, num_pairs)
        for name, default in (("epochs", 0), ("lr", lr), ("noise", 0.0))
    )
    ends = [0]
    for each in (*epochs, together):
        ends.append(ends[-1] + each)
    sparsity = {"kl": config.kl, "rho": config.rho, "l1": config.l1}
    return tuple(
        Stage(
            number=n,
            pairs=(n, n + 1) if n < num_pairs else (0, num_pairs),
            first_epoch=ends[n],
            end_epoch=ends[n + 1],
            lr=(*lrs, lr)[n],
            noise=(*noise, noise[0])[n],
            **sparsity,
        )
        for n in range(num_pairs + 1)
    )


def _for_each(name: str, given: Any, default: Any, num_pairs: int) -> tuple[Any, ...]:
    given = default if given is None else given
    if not isinstance(given, list | tuple):
        return (given,) * num_pairs
    if len(given) != num_pairs:
        raise ConfigError(
            f"stages.{name} = {list(given)} has {len(given)} entries, and the model has "
            f"{num_pairs} pairs of encoder and decoder: give one for each, or one number for all"
        )
    return tuple(given)


def check_stack(model: nn.Module, why: str) -> StackedAutoencoder:
    if isinstance(model, StackedAutoencoder):
        return model
    raise ConfigError(
        f"{why} a stack of encoders and decoders, and the model is {type(model).__name__}: use "
        "autoencoder, autoencoder-conv, or a hyperslab.StackedAutoencoder of your own modules"
    )


def train_only(model: StackedAutoencoder, stage: Stage) -> None:
    """Freezes all weights but those of the pairs of ``stage``."""
    model.requires_grad_(False)
    for number in range(*stage.pairs):
        for part in model.pair(number):
            part.requires_grad_(True)


# The loss of a stage


class StageTask(Reconstruction):
    """To give back what the pairs of a stage are given; codes may have to be sparse."""

    def __init__(self, config: TaskConfig, stage: Stage) -> None:
        super().__init__(config)
        self._stage = stage
        self._is_checked = False

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Values, ...]:
        """The output, then the code of each pair."""
        stage = self._stage
        found = model(batch.x, stages=stage.pairs, noise=stage.noise, want="both")
        return tuple(found)

    def loss(self, output: Values, batch: Batch) -> Tensor:
        restored, *codes = output
        if self._stage.kl and not self._is_checked:
            check_unit_range(codes)
            self._is_checked = True
        return super().loss(restored, batch) + sparsity(codes, self._stage)

    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        return super().fit(output[0] if isinstance(output, tuple) else output, target)


def sparsity(codes: Sequence[Values], stage: Stage) -> Tensor | float:
    """What the penalties of ``StagesConfig`` add to the loss, over the global batch."""
    total: Any = 0.0
    for code in map(widened, codes):
        if stage.l1:
            total = total + stage.l1 * code.abs().mean()
        if stage.kl:
            mean = code.mean([dim for dim in range(code.ndim) if dim != 1])
            mean, rho = mean.clamp(LEAST_MEAN, 1 - LEAST_MEAN), stage.rho
            each = rho * (rho / mean).log() + (1 - rho) * ((1 - rho) / (1 - mean)).log()
            total = total + stage.kl * each.mean()
    return total  # type: ignore[no-any-return]


@torch.no_grad()
def check_unit_range(codes: Sequence[Values]) -> None:
    """Raises, on all ranks, unless all codes lie between 0 and 1. Collective over the mesh."""
    for code in codes:
        low, high = float(code.amin()), float(code.amax())
        if low < 0 or high > 1:
            raise ConfigError(
                f"stages.kl is for codes from 0 to 1, and these go from {low:.3g} to {high:.3g}: "
                "set activation = 'sigmoid' in model.options, or use stages.l1"
            )


# Codes, computed once and kept in the store


@torch.no_grad()
def encode(
    model: StackedAutoencoder,
    loader: Loader,
    pairs: tuple[int, int],
    epoch: int,
    mesh: Mesh,
    context: AbstractContextManager[object],
) -> Dataset:
    """What the encoders of ``pairs`` make of all samples of ``loader``, cut as it comes out.

    A loader of them with the same batches and seed has each code on the ranks that take it in
    ``epoch``, which have computed it. Collective over the mesh.
    """
    codes = Computed(CODE, int(loader.state_dict()["num_samples"]), mesh)
    was_training = model.training
    model.eval()
    try:
        for arrays in loader.visit_all(epoch):
            x = the_sample(arrays)
            with context:
                code = model(x, stages=pairs, want="code")
            _check_finite(code, pairs)
            codes.add(code, loader.taken)
    finally:
        model.train(was_training)
    if loader.skipped:
        raise HyperslabError(
            f"{len(loader.skipped)} samples have no code, as they could not be read "
            f"({next(iter(loader.skipped.values()))}): stages need all of them, so mend them or "
            "give them no part in data.files"
        )
    return codes.dataset(epoch)


def the_sample(arrays: Any) -> Slab:
    """The sample itself, of what a loader yields."""
    if isinstance(arrays, dict):
        arrays = next(iter(arrays.values()))
    x: Slab = arrays[0] if isinstance(arrays, tuple) else arrays
    return x


def _check_finite(code: Slab, pairs: tuple[int, int]) -> None:
    if not math.isfinite(float(widened(code).abs().amax())):
        raise HyperslabError(
            f"the code of stage {pairs[1] - 1} holds values that are no numbers: lower stages.lr"
        )
