"""The loop: batches in, a trained model out.

Nothing here knows how samples are cut: on one process it is ordinary training.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperslab.nn import clip_grad_norm_
from hyperslab.nn.parallel.parallelize import Parallel
from hyperslab.nn.pass_spans import compute
from hyperslab.store import Loader
from hyperslab.torch_private import foreach_div_
from hyperslab.trace import Category, active, evaluation
from hyperslab.trace.loop import Loop
from hyperslab.train.auto_mesh import Forecast
from hyperslab.train.checkpoint_state import random_state, set_random_state
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import Config
from hyperslab.train.datasets import check_same_parts
from hyperslab.train.optimizers import RateFactor, choose_settings, give_rate, take_step
from hyperslab.train.process import StopSignals
from hyperslab.train.recorder import Pace, Recorder, StepPlace
from hyperslab.train.report import TrainProgress
from hyperslab.train.run_trace import RunTrace
from hyperslab.train.task import Batch, Meter, Roles, Task, evaluate, make_task
from hyperslab.train.tournament.seat import Seat, give_settings


@dataclass
class Standing:
    """How far a run has come; it is saved with every checkpoint."""

    step: int = 0
    validated_step: int = 0
    best_step: int | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    num_worse: int = 0
    """Validations in a row that were no better than the best."""
    stage: int = 0
    """Of a run in stages."""
    num_matches: int = 0
    """Of a tournament, those without a partner among them."""


@dataclass
class _Passes:
    """The forward and backward passes of one step."""

    step: int = 0
    """Its number in the epoch."""
    losses: list[Tensor] = field(default_factory=list)
    """Each times what it counts."""
    total: float = 0.0
    num_samples: int = 0

    def add(self, step: int, loss: Tensor, count: float, num_samples: int) -> None:
        self.step = step
        self.losses.append(loss)
        self.total += count
        self.num_samples += num_samples

    @property
    def count(self) -> float:
        """What the losses are divided by; where nothing counts, they are 0."""
        return self.total or 1.0


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
    parts_digest: dict[str, int]
    """Of the samples in each part: no sample may go from one to another when a run goes on."""
    standing: Standing = field(default_factory=Standing)
    pace: Pace = field(default_factory=Pace)
    notes: dict[str, int] = field(default_factory=dict)
    """What else each line of the log tells of a step."""
    forecast: Forecast | None = None
    """What the planner has predicted, if it chose the mesh."""
    trace: RunTrace | None = None
    _loop: Loop = field(default_factory=lambda: Loop(None, 0, 0))
    """The epoch, in a trace."""
    seat: Seat | None = None
    """In a tournament, if this is one of several trainers."""
    _norm: Tensor | None = None
    """Of the last step's gradients, before they were clipped."""

    def fit(self) -> str | None:
        """Trains to the end, or until a signal to stop, whose name it returns.

        Collective over all ranks.
        """
        self.pace.rest()
        signal = self._play()
        if signal is None and self._awaits_validation():
            signal = self._finish_epoch()
        while signal is None and not self._is_done():
            signal = self._make_epoch()
        if signal is not None:
            self._save()
        return signal

    # One epoch, or what is left of it

    def _make_epoch(self) -> str | None:
        epoch = self.loader.epoch
        self._loop = Loop(active.recorder, epoch, self.standing.step)
        try:
            signal = self._train_epoch()
            self._loop.end_steps()
            if self.trace is not None:
                self.trace.note_epoch(epoch, self.standing.step)
            return signal or self._finish_epoch()
        finally:
            self._loop.end()

    def _train_epoch(self) -> str | None:
        self.model.train()
        passes = _Passes()
        for arrays in self.pace.timed(self.loader):
            end = self._num_taken()
            step = (end - 1) // self.config.data.batch_size
            if passes.losses and passes.step != step:  # its last batches could not be read
                self._update(passes)
                passes = _Passes()
            if self.config.data.drop_last and step == self._short_step():
                continue
            completes = end % self.config.data.batch_size == 0 or self._is_between_epochs()
            passes.add(step, *self._learn(self.roles.batch(arrays), completes))
            if completes:
                self._update(passes)
                passes = _Passes()
                if (signal := self._play() or self.signals.poll()) or self._is_done():
                    return signal
                self._save_now_and_then()
        if passes.losses:
            self._update(passes)
        return self._play()

    def _play(self) -> str | None:
        """A match that is due in a tournament; the name of a signal that came meanwhile."""
        standing, seat = self.standing, self.seat
        if seat is None or not seat.is_due(standing.step, standing.num_matches):
            return None
        self._report()
        parts = {"model": self.model, "optimizer": self.optimizer}
        match = seat.play(standing.step, parts, self._score, self.signals.poll, self.checkpoints)
        self.pace.rest()
        if match is None:
            return self.signals.heard
        standing.num_matches += 1
        self.progress.say(str(match))
        if match.adopted:
            self._take_settings(seat)
        self._save()
        return None

    def _score(self) -> float:
        """What the model is worth on samples that are held out for matches."""
        assert self.seat is not None
        assert self.seat.held_out is not None
        meter = evaluate(self.model, self.seat.held_out, self.task, self.roles, self.context)
        assert meter is not None
        return meter.scores()[self.task.score]

    def _take_settings(self, seat: Seat) -> None:
        """The hyperparameters of the model that goes on here."""
        before, self.config = self.config, seat.adjusted(self.config)
        self.rate = replace(self.rate, config=self.config.schedule)
        give_settings(self.optimizer, self.config)
        if self.config.task != before.task:
            self.task = make_task(self.config.task)

    def _learn(self, batch: Batch, completes: bool) -> tuple[Tensor, float, int]:
        """Adds to the gradients those of a batch; gives its loss, what it counts, its samples.

        Of several passes each counts what its loss was divided by, and both are multiplied by that.
        A step's gradients are averaged over the ranks in its last backward pass, unless bad samples
        may be skipped: then any pass may be the last.
        """
        skips, count = self.config.data.bad_samples == "skip", 1.0
        with nullcontext() if completes or skips else cast(Parallel, self.model).no_sync():
            with compute("forward", batch.x.mesh.device), self.context:
                output = self.task.forward(self.model, batch)
                loss = self.task.loss(output, batch)
            if self.config.train.accumulate > 1:
                count = self.task.count(output, batch)
                loss = loss * count
            # A thread of its own is slower.
            with compute("backward", loss.device), torch.autograd.set_multithreading_enabled(False):
                loss.backward()
        return loss.detach(), count, batch.num_samples

    def _update(self, passes: _Passes) -> None:
        """One step of the optimizer."""
        loss = torch.stack(passes.losses).sum()
        with compute("optimizer", loss.device, Category.optimizer):
            loss = self._take_step(passes, loss)
        self.standing.step += 1
        self.pace.add(loss, passes.num_samples, self._place(passes.step))
        if self.standing.step % self.config.run.log_every == 0:
            self._report()
        else:
            self.progress.step(self.standing.step, self.loader.epoch)
        if self.forecast is not None and (line := self.forecast.after_step()):
            self.progress.say(line)
        self._loop.end_step()

    def _take_step(self, passes: _Passes, loss: Tensor) -> Tensor:
        """Changes the weights; gives the loss, ``loss`` divided by what it counts."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.config.train.accumulate > 1:
            loss = loss / passes.count
            foreach_div_([p.grad for p in parameters if p.grad is not None], passes.count)
        if self.config.train.clip is not None:
            self._norm = clip_grad_norm_(parameters, self.config.train.clip)
        lr = self.config.optimizer.lr * self.rate(self._start(passes.step))
        give_rate(self.optimizer, lr)
        take_step(self.optimizer)
        self.optimizer.zero_grad()
        return loss

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

    def evaluate(self, loader: Loader) -> Meter | None:
        """What the model is worth on ``loader``; None if a signal came. Collective."""
        poll = self.signals.poll
        with evaluation():
            return evaluate(
                self.model, loader, self.task, self.roles, self.context, is_stopped=poll
            )

    def _validate(self) -> dict[str, float] | None:
        """Scores of the validation part, or None if a signal came."""
        assert self.validation is not None
        meter = self.evaluate(self.validation)
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

    def _num_taken(self) -> int:
        """The samples of this epoch up to the last batch, those that could not be read too."""
        at = self.loader.state_dict()
        num, size = at["num_samples"], at["batch_size"]
        last = num // size * size if self.config.data.drop_last else num
        return int(at["sample"] or last)

    def _short_step(self) -> int:
        """The number, in its epoch, of the step that would have too few samples."""
        num = int(self.loader.state_dict()["num_samples"])
        return num // self.config.data.batch_size

    def _start(self, step: int) -> float:
        """The epochs before a step of the epoch that batches were last taken of."""
        start = step * self.config.data.batch_size
        ahead = 0.0 if self.seat is None else self.seat.ahead / self.rate.steps_per_epoch
        return float(ahead + self._epoch() + start / self.loader.state_dict()["num_samples"])

    def _epoch(self) -> int:
        """That batches were last taken of."""
        at = self.loader.state_dict()
        return int(at["epoch"] - (at["sample"] == 0))

    def _place(self, step: int) -> StepPlace:
        """The step that was just made, number ``step`` of its epoch."""
        return StepPlace(
            self.standing.step,
            self._epoch(),
            step * self.config.data.batch_size,
            self.optimizer.param_groups[0]["lr"],
        )

    def _explain(self, loss: float, place: StepPlace) -> str:
        """Why a loss is not finite: its samples, if they are not, else what else may be.

        Collective over all ranks. It reads the samples again: no other step pays for this.
        """
        told = f"the loss became {loss} at step {place.step}"
        stop = place.start + self.config.data.batch_size
        if found := self.loader.find_not_finite(place.epoch, place.start, stop):
            return (
                f"{told}: {found}; mend or remove it, or give such samples no part in "
                "data.files; all checkpoints are from before"
            )
        return (
            f"{told}, with a learning rate of {place.lr:.4g}, and the files of its samples hold "
            "finite values alone: lower optimizer.lr, set train.clip, warm up "
            "(schedule.warmup_epochs), or look at data.normalize and the loss; all checkpoints are "
            "from before"
        )

    def _is_done(self) -> bool:
        settings = self.config.train
        return (
            self.loader.epoch >= settings.epochs
            or (settings.steps is not None and self.standing.step >= settings.steps)
            or (settings.patience is not None and self.standing.num_worse >= settings.patience)
        )

    def num_steps(self) -> int:
        """Of the whole run, those already made included."""
        at = self.loader.state_dict()
        left = self.config.train.epochs - at["epoch"] - at["sample"] / at["num_samples"]
        total = self.standing.step + max(0, math.ceil(left * self.rate.steps_per_epoch - 1e-9))
        return int(min(total, self.config.train.steps or total))

    # Log and checkpoints

    def _report(self) -> None:
        # In a tournament a model whose losses are no numbers loses its next match.
        stretch = self.pace.finish(self._explain if self.seat is None else None)
        if stretch is None:
            return
        norm = self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm
        self.recorder.step(
            self.standing.step,
            self.loader.epoch,
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=None if norm is None else float(norm),
            **asdict(stretch),
            **self.notes,
        )
        self.progress.step(self.standing.step, self.loader.epoch, **asdict(stretch))

    def _save_now_and_then(self) -> None:
        every = self.config.run.checkpoint_every
        if every is not None and self.standing.step % every == 0:
            self._save()

    def _save(self, *, is_best: bool = False) -> None:
        self._report()  # raises if the losses are no numbers: such weights are not worth keeping
        with active.around(Category.checkpoint, "save", exposed=True):
            self.checkpoints.save(self.standing.step, self.parts(), is_best=is_best)

    def parts(self) -> dict[str, Any]:
        """All that a later run needs to go on from here."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "values": {
                "standing": asdict(self.standing),
                "loader": self.loader.state_dict(),
                "parts": self.parts_digest,
                "random": random_state(),
                **({} if self.seat is None else {"tournament": self.seat.state_dict()}),
            },
        }

    def resume(self) -> bool:
        """Goes on from the last checkpoint, if there is one.

        Collective over all ranks.
        """
        step = self.checkpoints.latest() if self.seat is None else self.seat.resume_step
        if step is None:
            return False
        chosen = [{**group, "params": None} for group in self.optimizer.param_groups]
        with active.around(Category.checkpoint, "load", exposed=True):
            values = self.checkpoints.load({"model": self.model, "optimizer": self.optimizer}, step)
        check_same_parts(values["parts"], self.parts_digest)
        for group, settings in zip(self.optimizer.param_groups, chosen, strict=True):
            choose_settings(group, settings)
        self.standing = Standing(**values["standing"])
        self.loader.load_state_dict(values["loader"])
        set_random_state(values["random"])
        if self.seat is not None:
            self.seat.load_state_dict(values["tournament"])
            self._take_settings(self.seat)
        return True
