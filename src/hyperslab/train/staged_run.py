"""A run in stages: one trainer after the other, on samples, on codes, and on samples again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hyperslab.comm.mesh import Mesh
from hyperslab.io import Dataset
from hyperslab.store import Loader
from hyperslab.train.config import Config
from hyperslab.train.datasets import make_loader
from hyperslab.train.loop import Standing, Trainer
from hyperslab.train.optimizers import make_optimizer
from hyperslab.train.run_folder import RunFolder
from hyperslab.train.stage_figures import (
    draw_filters,
    draw_pairs,
    draw_stages,
    first_filters,
    look_at,
)
from hyperslab.train.stages import (
    CODE,
    Stage,
    StageTask,
    check_stack,
    encode,
    plan_stages,
    train_only,
)
from hyperslab.train.task import Roles

Parts = dict[str, Dataset]


@dataclass(frozen=True, slots=True)
class _Source:
    """What a stage learns from: samples, or their codes after ``depth`` pairs."""

    train: Loader
    validation: Loader | None
    depth: int = 0

    def close(self) -> None:
        """Frees the memory of codes; samples stay where they are."""
        if self.depth:
            self.train.close()
            if self.validation is not None:
                self.validation.close()


class StagedTraining:
    """Trains the pairs of a stack one by one, then all together by ``trainer`` itself.

    Checkpoints hold the whole model and tell the stage. Codes are in none of them: a run that goes
    on computes those of its stage once more, on whatever mesh.
    """

    def __init__(self, trainer: Trainer, parts: Parts, mesh: Mesh) -> None:
        config = trainer.config
        self._model = check_stack(trainer.model, "stages.epochs train")
        self.stages = plan_stages(
            config.stages, self._model.num_stages, config.train.epochs, config.optimizer.lr
        )
        self._trainer, self._parts, self._mesh = trainer, parts, mesh
        self._resumes = False
        last = self.stages[-1]
        trainer.task = StageTask(config.task, last)
        trainer.config = _config_of(last, config)
        trainer.rate = replace(trainer.rate, first_epoch=last.first_epoch)

    def resume(self) -> bool:
        """As that of a trainer; the stage that the run is in is resumed when it begins."""
        trainer = self._trainer
        if trainer.checkpoints.latest() is None:
            return False
        standing = Standing(**trainer.checkpoints.load({})["standing"])
        if standing.stage == self.stages[-1].number:
            trainer.resume()
        else:
            trainer.checkpoints.load({"model": trainer.model})
        trainer.standing, self._resumes = standing, True
        return True

    def fit(self) -> str | None:
        """As that of a trainer. Collective over all ranks."""
        trainer, *_, last = self._trainer, *self.stages
        source = _Source(trainer.loader, trainer.validation)
        try:
            for stage in self.stages[trainer.standing.stage : -1]:
                if not stage.num_epochs:
                    continue
                source = self._deepened(source, stage)
                signal = self._fit_stage(stage, source)
                if signal is not None or self._is_at_last_step():
                    return signal
        finally:
            source.close()
        self._model.requires_grad_(True)
        if self._resumes:
            self._tell(last, trainer)
        else:
            self._enter(last, trainer)
        return trainer.fit()

    def _fit_stage(self, stage: Stage, source: _Source) -> str | None:
        train_only(self._model, stage)
        trainer = self._trainer_of(stage, source)
        if self._resumes:
            trainer.resume()
            self._trainer.standing, self._resumes = trainer.standing, False
            self._tell(stage, trainer)
        else:
            self._enter(stage, trainer)
        return trainer.fit()

    def _trainer_of(self, stage: Stage, source: _Source) -> Trainer:
        config = _config_of(stage, self._trainer.config)
        return replace(
            self._trainer,
            config=config,
            optimizer=make_optimizer(self._model, config.optimizer),
            rate=replace(
                self._trainer.rate, num_epochs=stage.num_epochs, first_epoch=stage.first_epoch
            ),
            task=StageTask(config.task, stage),
            roles=Roles(CODE, None, None) if source.depth else self._trainer.roles,
            loader=source.train,
            validation=source.validation,
        )

    def _enter(self, stage: Stage, trainer: Trainer) -> None:
        """Begins a stage: what was best in the one before does not count."""
        _begin_at(trainer.loader, stage.first_epoch)
        standing = trainer.standing
        standing.stage, standing.best_step, standing.best_scores = stage.number, None, {}
        standing.num_worse = 0
        self._tell(stage, trainer)

    def _tell(self, stage: Stage, trainer: Trainer) -> None:
        trainer.notes = {"stage": stage.number}
        step, epochs = trainer.standing.step, self.stages[-1].end_epoch
        trainer.progress.begin(step, trainer.loader.epoch, trainer.num_steps(), epochs)
        first, last = stage.first_epoch + 1, stage.end_epoch
        trainer.progress.say(f"{self._name(stage)}: epochs {first} to {last}")

    def _name(self, stage: Stage) -> str:
        if stage is self.stages[-1]:
            return "All pairs together"
        of = "codes" if stage.pairs[0] else "samples"
        return f"Stage {stage.number + 1} of {len(self.stages) - 1}, on {of}"

    def _is_at_last_step(self) -> bool:
        steps = self._trainer.config.train.steps
        return steps is not None and self._trainer.standing.step >= steps

    def draw(self, folder: RunFolder) -> list[Path]:
        """Writes figures of samples that come back, of each stage's loss, and of filters.

        Collective over all ranks; rank 0 writes.
        """
        part = next(name for name in ("test", "validation", "train") if name in self._parts)
        with make_loader(self._parts[part], self._trainer.config, self._mesh, once=True) as loader:
            batch = self._trainer.roles.batch(next(iter(loader)))
            self._model.eval()
            with self._trainer.context:
                pairs = look_at(self._model, batch.x)
        filters = first_filters(self._model, self._parts[part].shape, self._mesh)
        if self._mesh.rank:
            return []
        drawn = draw_pairs(pairs, folder.figures / "reconstructions.png")
        drawn += draw_stages(folder.log, folder.figures / "stages.png", self.stages[-1].number)
        if filters is not None:
            drawn += draw_filters(filters, folder.figures / "filters.png")
        return drawn

    # Codes

    def _deepened(self, source: _Source, stage: Stage) -> _Source:
        """What ``stage`` is given, made of what the stage before it was given."""
        for depth in range(source.depth, stage.pairs[0]):
            pairs, epoch = (depth, depth + 1), self.stages[depth + 1].first_epoch
            parts = {"train": self._encoded("train", source.train, pairs, epoch)}
            if source.validation is not None:
                parts["validation"] = self._encoded("validation", source.validation, pairs, 0)
            source.close()
            source = self._loaders(parts, depth + 1)
        return source

    def _encoded(self, part: str, loader: Loader, pairs: tuple[int, int], epoch: int) -> Dataset:
        config, context = self._trainer.config, self._trainer.context
        is_turned = not pairs[0] and part == "train" and config.data.augment is not None
        if not is_turned:
            return encode(self._model, loader, pairs, epoch, self._mesh, context)
        plain = replace(config, data=replace(config.data, augment=None, store="none"))
        with make_loader(self._parts[part], plain, self._mesh, training=True) as as_they_are:
            return encode(self._model, as_they_are, pairs, epoch, self._mesh, context)

    def _loaders(self, parts: Parts, depth: int) -> _Source:
        config = _config_of_codes(self._trainer.config)
        train = make_loader(parts["train"], config, self._mesh, training=True)
        validation = None
        if "validation" in parts:
            validation = make_loader(parts["validation"], config, self._mesh)
        return _Source(train, validation, depth)


def _begin_at(loader: Loader, epoch: int) -> None:
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "sample": 0})


def _config_of(stage: Stage, config: Config) -> Config:
    return replace(
        config,
        train=replace(config.train, epochs=stage.end_epoch),
        optimizer=replace(config.optimizer, lr=stage.lr),
    )


def _config_of_codes(config: Config) -> Config:
    """Codes are served as they are, from memory."""
    plain = replace(
        config.data,
        store="memory",
        bad_samples="stop",
        normalize=None,
        augment=None,
        preload=False,
        stage_dir=None,
    )
    return replace(config, data=plain)
