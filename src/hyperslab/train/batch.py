"""One batch, by what its arrays are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.nn import Slab
from hyperslab.train.config import TaskConfig


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
