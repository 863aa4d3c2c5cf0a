"""What a model is trained to do: the loss of a batch, and the scores of many."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyperslab.comm.collectives import broadcast_
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.io.info.pictures import Picture
from hyperslab.nn import Slab
from hyperslab.store import Loader
from hyperslab.train.config import TaskConfig
from hyperslab.train.fitting import Values, fit_weight, num_classes
from hyperslab.train.losses import COUNTED, ENTROPIES, LOSSES, OwnLoss, check_loss, label_count
from hyperslab.train.metrics import WeightedMean
from hyperslab.train.slices import draw_pictures

_log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class Batch:
    x: Slab
    target: Slab | None = None
    weight: Slab | None = None
    """One number a sample."""

    @property
    def num_samples(self) -> int:
        """Over all ranks."""
        return self.x.shape[0]


@dataclass(frozen=True, slots=True)
class Roles:
    """Which array of a dataset is the sample, which its target, which its weight."""

    sample: str
    target: str | None
    weight: str | None

    @classmethod
    def of(cls, dataset: Dataset, task: TaskConfig) -> Roles:
        sample, *others = (name for name in dataset.arrays if name != dataset.stats)
        for key in ("target", "weight"):
            name = getattr(task, key)
            if name is not None and name not in others:
                raise ConfigError(
                    f"task.{key} = {name!r} is not among the targets of the data, which are "
                    f"{', '.join(others) or 'none'}: name it in data.target too"
                )
        free = [name for name in others if name != task.weight]
        target = task.target or (free[0] if free else None)
        if task.kind == "reconstruction":
            target = None
        elif target is None:
            raise ConfigError(
                f"task.kind = {task.kind!r} needs a target, and the data has the sample "
                f"{sample!r} alone: name the array to learn in data.target"
            )
        return cls(sample, target, task.weight)

    def batch(self, arrays: Mapping[str, Slab]) -> Batch:
        return Batch(
            arrays[self.sample],
            None if self.target is None else arrays[self.target],
            None if self.weight is None else arrays[self.weight],
        )


class Task(ABC):
    """Losses are means over the global batch, equal on all ranks, weighted where samples are."""

    losses: ClassVar[tuple[str, ...]]
    """The names of those that suit it, the usual one first."""
    meters: ClassVar[type[Meter]]
    best_by: ClassVar[str]
    has_classes: ClassVar[bool] = False
    higher_is_better: bool

    def __init__(self, config: TaskConfig) -> None:
        self.names = tuple(config.names)
        self.loss_name = config.loss or self.losses[0]
        self._own_loss = OwnLoss(self.loss_name) if ":" in self.loss_name else None
        if self._own_loss is None:
            check_loss(self.loss_name, config.kind, self.losses)
        if config.class_weights and not (self.has_classes and self.loss_name in ENTROPIES):
            raise ConfigError(
                f"task.class_weights are given, but task.loss = {self.loss_name!r} of task.kind = "
                f"{config.kind!r} has no use for them"
            )
        self._class_weights = torch.tensor(config.class_weights, dtype=torch.float64)
        self.higher_is_better = self.score != "loss"

    @property
    def score(self) -> str:
        """The score by which checkpoints are compared: the loss itself, if it is a user's own."""
        return "loss" if self.has_own_loss else self.best_by

    @property
    def has_own_loss(self) -> bool:
        return self._own_loss is not None

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The output that ``loss`` and ``fit`` are given."""
        return model(batch.x)

    def loss(self, output: Values, batch: Batch) -> Tensor:
        """Collective over the mesh."""
        target, weight = self.target_of(batch), weight_of(batch)
        if self._own_loss is not None:
            return self._own_loss(output, target, weight)
        output, target = self.fit(output, target)
        weight = None if weight is None else weight.to(output.dtype)
        return LOSSES[self.loss_name](output, target, weight, self._class_weights_on(output))

    @torch.no_grad()
    def count(self, output: Values, batch: Batch) -> float:
        """What ``loss`` divides a sum by, up to a factor that is the same for all batches.

        That is the number of samples, or their weights, or what their labels count. Collective over
        the mesh.
        """
        weight = weight_of(batch)
        if self.loss_name in COUNTED and not self.target_of(batch).is_floating_point():
            output, target = self.fit(output, self.target_of(batch))
            return label_count(target, weight, self._class_weights_on(output))
        return batch.num_samples if weight is None else float(weight.sum(dtype=torch.float64))

    def target_of(self, batch: Batch) -> Slab:
        if batch.target is None:
            raise ConfigError("batches have no target: name the array to learn in data.target")
        return batch.target

    @abstractmethod
    def fit(self, output: Values, target: Values) -> tuple[Values, Values]:
        """Output and target as losses and scores compare them; raises if that makes no sense."""

    def meter(self) -> Meter:
        """A new one."""
        return self.meters(self)

    def _class_weights_on(self, output: Values) -> Tensor | None:
        if not self._class_weights.numel():
            return None
        if (num := num_classes(output)) != len(self._class_weights):
            raise ConfigError(
                f"task.class_weights has {len(self._class_weights)} weights, and there are {num} "
                "classes: give one for each"
            )
        if self._class_weights.device != output.device or self._class_weights.dtype != output.dtype:
            self._class_weights = self._class_weights.to(output.device, output.dtype)
        return self._class_weights


class Meter(ABC):
    """Collects what is needed to score all batches of an evaluation, and to draw them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.names: Sequence[str] = task.names
        self._loss = WeightedMean()
        self._pictures: list[Picture] = []
        """Of the first sample."""
        self._mesh: Mesh | None = None
        self._is_scored = True

    @torch.no_grad()
    def add(self, output: Values, batch: Batch, loss: Tensor) -> None:
        """Collective over the mesh."""
        self._loss.add(float(loss), self.task.count(output, batch))
        if self._is_scored:
            self._score(output, batch, weight_of(batch))
        self._mesh = batch.x.mesh

    def scores(self) -> dict[str, float]:
        """By name, equal on all ranks; NaN is what has no value, such as R2 of one sample.

        Collective over the mesh.
        """
        scores = {"loss": self._loss.value} | (self.count() if self._is_scored else {})
        if self._mesh is not None:
            numbers = torch.tensor(list(scores.values()), dtype=torch.float64)
            broadcast_([numbers], self._mesh, "comparing scores")
            scores = dict(zip(scores, numbers.tolist(), strict=True))
        return scores

    def _score(self, output: Values, batch: Batch, weight: Values | None) -> None:
        """A model with a loss of its own may give what only that understands."""
        if self.task.has_own_loss and isinstance(output, tuple | list) and output:
            output = output[0]
        try:
            output, target = self.task.fit(output, self.task.target_of(batch))
        except ConfigError as error:
            if not self.task.has_own_loss:
                raise
            self._is_scored = False
            if batch.x.mesh.rank == 0:
                _log.warning("the loss is the only score: %s", error)
            return
        if self._mesh is None:
            self.look(output, target, batch)
        self.collect(output, target, weight)

    @abstractmethod
    def collect(self, output: Values, target: Values, weight: Values | None) -> None:
        """Adds one batch of fitted output and target; ``weight`` is (N,). Collective."""

    @abstractmethod
    def look(self, output: Values, target: Values, batch: Batch) -> None:
        """Keeps the pictures that are drawn of the first batch. Collective."""

    @abstractmethod
    def count(self) -> dict[str, float]:
        """All scores but the loss."""

    def draw(self, folder: Path) -> list[Path]:
        """Writes figures into ``folder``; no communication, so that rank 0 may do it alone."""
        return draw_pictures(self._pictures, folder / "sample.png", self._remarks())

    def _remarks(self) -> list[str]:
        """What is known of the first sample."""
        return []


def weight_of(batch: Batch) -> Values | None:
    return None if batch.weight is None else fit_weight(batch.weight, batch.num_samples)


def make_task(config: TaskConfig) -> Task:
    from hyperslab.train.classification import Classification, Segmentation
    from hyperslab.train.regression import Reconstruction, Regression

    kinds: dict[str, type[Task]] = {
        "regression": Regression,
        "classification": Classification,
        "segmentation": Segmentation,
        "reconstruction": Reconstruction,
    }
    return kinds[config.kind](config)


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
                    output = task.forward(model, batch)
                    loss = task.loss(output, batch)
                meter.add(output, batch, loss)
                if is_stopped():
                    return None
    finally:
        for part, mode in modes.items():
            part.training = mode
    return meter
