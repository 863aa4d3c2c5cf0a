"""The loop: batches in, a trained model out.

Nothing here knows how samples are cut: on one process it is ordinary training.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from hyperslab.nn.parallelize import Parallel
from hyperslab.store import Loader
from hyperslab.train.batch import Batch, Roles
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import Config
from hyperslab.train.evaluate import evaluate
from hyperslab.train.pace import Pace
from hyperslab.train.progress import TrainProgress
from hyperslab.train.recorder import Recorder
from hyperslab.train.rng import random_state, set_random_state
from hyperslab.train.schedule import RateFactor
from hyperslab.train.stop_signals import StopSignals
from hyperslab.train.task import Task


@dataclass
class Standing:
    """How far a run has come; it is saved with every checkpoint."""

    step: int = 0
    validated_step: int = 0
    best_step: int | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    num_worse: int = 0
    """Validations in a row that were no better than the best."""


@dataclass(kw_only=True)
class Trainer:
    config: Config
    model: nn.Module
    optimizer: Optimizer
    rate: RateFactor
    task: Task
    roles: Roles
    loader: Loader
    validation: Loader | None
    context: AbstractContextManager[object]
    """That forward passes and losses run in."""
    checkpoints: Checkpoints
    recorder: Recorder
    progress: TrainProgress
    signals: StopSignals
    standing: Standing = field(default_factory=Standing)
    pace: Pace = field(default_factory=Pace)

    def fit(self) -> str | None:
        """Trains to the end, or until a signal to stop, whose name it returns.

        Collective over all ranks.
        """
        self.pace.rest()
        signal = self._finish_epoch() if self._awaits_validation() else None
        while signal is None and not self._is_done():
            signal = self._train_epoch() or self._finish_epoch()
        if signal is not None:
            self._save()
        return signal

    # One epoch, or what is left of it

    def _train_epoch(self) -> str | None:
        self.model.train()
        losses: list[Tensor] = []
        num_samples = 0
        for arrays in self.pace.timed(self.loader):
            batch = self.roles.batch(arrays)
            completes = len(losses) + 1 == self.config.train.accumulate or self._is_between_epochs()
            losses.append(self._learn(batch, completes))
            num_samples += batch.num_samples
            if completes:
                self._update(losses, num_samples)
                losses, num_samples = [], 0
                if (signal := self.signals.poll()) or self._is_done():
                    return signal
                self._save_now_and_then()
        if losses:  # the last batches of the epoch could not be read
            self._update(losses, num_samples)
        return None

    def _learn(self, batch: Batch, completes: bool) -> Tensor:
        """Adds to the gradients those of a batch, times its samples; gives its loss, times them.

        A step's gradients are averaged over the ranks in its last backward pass, unless bad samples
        may be skipped: then any pass may be the last.
        """
        accumulates, skips = (
            self.config.train.accumulate > 1,
            self.config.data.bad_samples == "skip",
        )
        with nullcontext() if completes or skips else cast(Parallel, self.model).no_sync():
            with self.context:
                loss = self.task.loss(self.model(batch.x), batch)
            if accumulates:
                loss = loss * batch.num_samples
            loss.backward()
        return loss.detach()

    def _update(self, losses: list[Tensor], num_samples: int) -> None:
        """One step of the optimizer."""
        loss = torch.stack(losses).sum()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.config.train.accumulate > 1:
            loss = loss / num_samples
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], num_samples)
        norm = None
        if self.config.train.clip is not None:
            norm = clip_grad_norm_(parameters, self.config.train.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.standing.step += 1
        self.pace.add(loss, num_samples)
        if self.standing.step % self.config.run.log_every == 0:
            self._report(norm)
        else:
            self.progress.step(self.standing.step, self.loader.epoch)

    def _lr(self) -> float:
        return self.config.optimizer.lr * self.rate(self.standing.step)

    # Between epochs

    def _finish_epoch(self) -> str | None:
        """Validates, judges, saves."""
        self._report()
        is_best = False
        if self._awaits_validation():
            scores = self._validate()
            if scores is None:
                return self.signals.heard
            is_best = self._judge(scores)
        if is_best or self.config.run.checkpoint_every is None or self._is_done():
            self._save(is_best=is_best)
        return None

    def _validate(self) -> dict[str, float] | None:
        """Scores of the validation part, or None if a signal came."""
        assert self.validation is not None
        meter = evaluate(
            self.model,
            self.validation,
            self.task,
            self.roles,
            self.context,
            is_stopped=self.signals.poll,
        )
        self.pace.rest()
        if meter is None:
            return None
        scores = meter.scores()
        self.recorder.scores("validation", self.standing.step, self.loader.epoch, scores)
        self.progress.scores("validation", scores)
        return scores

    def _judge(self, scores: dict[str, float]) -> bool:
        """Whether these scores are the best so far."""
        standing = self.standing
        standing.validated_step = standing.step
        best = standing.best_scores.get(self.task.score, math.nan)
        sign = 1 if self.task.higher_is_better else -1
        if math.isnan(best) or sign * scores[self.task.score] > sign * best:
            standing.best_step, standing.best_scores, standing.num_worse = standing.step, scores, 0
            return True
        standing.num_worse += 1
        return False

    def _awaits_validation(self) -> bool:
        """Whether the run stands where an epoch was done, or its end, and was not validated."""
        if self.validation is None or self.standing.step == self.standing.validated_step:
            return False
        at_epoch = self._is_between_epochs() and not (
            self.loader.epoch % self.config.train.evaluate_every
        )
        return at_epoch or self._is_done()

    def _is_between_epochs(self) -> bool:
        return bool(self.loader.state_dict()["sample"] == 0)

    def _is_done(self) -> bool:
        settings = self.config.train
        return (
            self.loader.epoch >= settings.epochs
            or (settings.steps is not None and self.standing.step >= settings.steps)
            or (settings.patience is not None and self.standing.num_worse >= settings.patience)
        )

    # Log and checkpoints

    def _report(self, norm: Tensor | None = None) -> None:
        stretch = self.pace.settle(self.standing.step)
        if stretch is None:
            return
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.recorder.step(
            self.standing.step,
            self.loader.epoch,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=None if norm is None else float(norm),
            **asdict(stretch),
        )
        self.progress.step(self.standing.step, self.loader.epoch, **asdict(stretch))

    def _save_now_and_then(self) -> None:
        every = self.config.run.checkpoint_every
        if every is not None and self.standing.step % every == 0:
            self._save()

    def _save(self, *, is_best: bool = False) -> None:
        self._report()  # raises if the losses are no numbers: such weights are not worth keeping
        self.checkpoints.save(self.standing.step, self.parts(), is_best=is_best)

    def parts(self) -> dict[str, Any]:
        """All that a later run needs to go on from here."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "values": {
                "standing": asdict(self.standing),
                "loader": self.loader.state_dict(),
                "random": random_state(),
            },
        }

    def resume(self) -> bool:
        """Goes on from the last checkpoint, if there is one.

        Collective over all ranks.
        """
        if self.checkpoints.latest() is None:
            return False
        values = self.checkpoints.load({"model": self.model, "optimizer": self.optimizer})
        self.standing = Standing(**values["standing"])
        self.loader.load_state_dict(values["loader"])
        set_random_state(values["random"])
        return True
