"""One run: from a configuration to a folder with weights, scores and pictures."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.train.auto_mesh import choose_mesh, init_mesh
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import Config
from hyperslab.train.datasets import make_loader, open_parts
from hyperslab.train.export import export_state
from hyperslab.train.figures import draw_curves
from hyperslab.train.finetune import (
    check_run_is_named,
    load_encoder,
    rate_factors,
    tell_unlike_parts,
)
from hyperslab.train.loop import Trainer
from hyperslab.train.model import float32_products, forward_context, make_model
from hyperslab.train.optimizers import RateFactor, make_optimizer
from hyperslab.train.process import CAN_GO_ON, StopSignals
from hyperslab.train.recorder import Recorder
from hyperslab.train.report import Outcome, TrainProgress, start_report
from hyperslab.train.run_folder import RunFolder, without_nan
from hyperslab.train.run_trace import RunTrace
from hyperslab.train.staged_run import StagedTraining
from hyperslab.train.task import Roles, make_task
from hyperslab.train.tournament.run import run_tournament
from hyperslab.train.tournament.seat import Seat
from hyperslab.train.tournament.shares import HELD_OUT
from hyperslab.train.weight_files import find_weights
from hyperslab.train.write_config import config_to_toml


def run(
    config: Config, *, resume: bool = False, ends_process: bool = False, trainer: int | None = None
) -> Outcome:
    """Trains, validates and tests as ``config`` says, and writes all of it to the run's folder.

    With ``ends_process`` the caller is about to end: a signal that comes late changes nothing. One
    ``trainer`` of a tournament, by its number, joins the others that play.

    Collective over all ranks, which torchrun, srun, mpirun or the caller has started.
    """
    train = partial(_run, resume=resume, ends_process=ends_process)
    if config.tournament.trainers == 1:
        return train(config)
    return run_tournament(config, train, resume=resume, trainer=trainer)


def _run(config: Config, seat: Seat | None = None, *, resume: bool, ends_process: bool) -> Outcome:
    """A run, or that of one trainer, who has a ``seat``. Collective over its ranks."""
    start = time.monotonic()
    check_run_is_named(config)
    with ExitStack() as stack:
        asked, forecast, lines = config, None, list[str]()
        mesh = init_mesh(config.mesh)
        stack.enter_context(float32_products(config.train.precision))
        context = forward_context(config.train.precision, mesh.device)
        signals = stack.enter_context(StopSignals(mesh, until_exit=ends_process))
        wanted, divide = (asked, None) if seat is None else (seat.asked, seat.divide)
        parts = open_parts(wanted, mesh, divide)
        if asked.mesh.auto:
            choice = choose_mesh(asked, mesh, parts["train"])
            config, forecast, lines = choice.config, choice.forecast, choice.lines
            mesh = init_mesh(config.mesh)
        model = make_model(config, mesh, parts["train"])
        if not resume:  # before anything is written
            lines += _load_encoder(config, model, mesh)
        path = Path(config.run.folder or f"runs/{config.model.name.rpartition(':')[2]}")
        folder = stack.enter_context(RunFolder.begin(path, mesh, resume=resume))
        trace = stack.enter_context(RunTrace(folder, mesh, config.run.trace))
        is_shown = mesh.rank == 0 and (seat is None or seat.is_shown)
        trainer = _trainer(
            config, mesh, model, parts, folder, signals, context, stack, is_shown=is_shown
        )
        trainer.trace = trace
        trainer.forecast = forecast
        if seat is not None:
            held_out = make_loader(parts.pop(HELD_OUT), config, mesh)
            trainer.seat, seat.held_out = seat, stack.enter_context(held_out)
            seat.sit_down(mesh)
        training = trainer if config.stages.epochs is None else StagedTraining(trainer, parts, mesh)
        went_on = resume and training.resume()
        if resume and not went_on:
            lines += _load_encoder(config, model, mesh)
        lines += _tell_unlike_parts(config, trainer)
        folder.note_start(config_to_toml(asked), mesh)
        trainer.recorder.begin(trainer.standing.step)
        trainer.progress.begin(trainer.standing.step, trainer.loader.epoch, trainer.num_steps())
        for line in (*lines, *start_report(config, mesh, parts)):
            trainer.progress.say(line)
        if went_on:
            trainer.progress.say(f"Going on from step {trainer.standing.step}")
        signal = training.fit()
        trainer.checkpoints.wait()
        if seat is not None and not signal:
            seat.tournament.finish()
        test = _Test(signal=signal) if signal else _test(trainer, parts, mesh, folder)
        for step, shares in trace.finish(trainer.checkpoints.free_channel()).items():
            trainer.recorder.shares(step, shares)
        if isinstance(training, StagedTraining) and config.run.figures and not test.signal:
            test.figures.extend(training.draw(folder))
        summary = _summary(trainer, mesh, folder, test)
        summary["seconds"] = round(time.monotonic() - start, 1)
        if mesh.rank == 0:
            folder.write_summary(summary)
    return Outcome(summary, CAN_GO_ON if test.signal else 0, is_told=mesh.rank == 0)


def _load_encoder(config: Config, model: nn.Module, mesh: Mesh) -> list[str]:
    """Gives the encoder the weights of the pre-trained run, if there is one. Collective."""
    run = config.finetune.run
    return [] if run is None else load_encoder(model, Path(run), mesh)


def _tell_unlike_parts(config: Config, trainer: Trainer) -> list[str]:
    run = config.finetune.run
    if run is None or not Path(run).exists():
        return []
    return tell_unlike_parts(trainer.parts_digest, Path(run))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """What came of the samples that were kept for the end."""

    part: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    figures: list[Path] = field(default_factory=list)
    signal: str | None = None
    """That stopped the run before."""


def _trainer(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    parts: dict[str, Dataset],
    folder: RunFolder,
    signals: StopSignals,
    context: AbstractContextManager[object],
    stack: ExitStack,
    *,
    is_shown: bool,
) -> Trainer:
    loader = stack.enter_context(make_loader(parts["train"], config, mesh, training=True))
    validation = None
    if "validation" in parts:
        validation = stack.enter_context(make_loader(parts["validation"], config, mesh))
    return Trainer(
        config=config,
        model=model,
        optimizer=make_optimizer(model, config.optimizer, rate_factors(config)),
        rate=RateFactor(
            config.schedule, _steps_per_epoch(len(parts["train"]), config), config.train.epochs
        ),
        task=make_task(config.task),
        roles=Roles.of(parts["train"], config.task),
        loader=loader,
        validation=validation,
        context=context,
        checkpoints=stack.enter_context(
            Checkpoints(folder.checkpoints, mesh, keep=config.run.keep)
        ),
        recorder=stack.enter_context(Recorder(folder, mesh, tensorboard=config.run.tensorboard)),
        progress=stack.enter_context(TrainProgress(config.train.epochs, show=is_shown)),
        signals=signals,
        parts_digest={name: part.manifest.digest() for name, part in parts.items()},
    )


def _steps_per_epoch(num_samples: int, config: Config) -> int:
    size = config.data.batch_size
    if not config.data.drop_last:
        return math.ceil(num_samples / size)
    if num_samples < size:
        raise ConfigError(
            f"data.drop_last leaves no step: there are {num_samples} samples to train on, and "
            f"data.batch_size = {size}"
        )
    return num_samples // size


def _test(trainer: Trainer, parts: dict[str, Dataset], mesh: Mesh, folder: RunFolder) -> _Test:
    """What the best weights are worth on samples kept for the end; they are exported too.

    Collective over all ranks.
    """
    config, best = trainer.config, trainer.standing.best_step
    if best is not None and best != trainer.standing.step:
        trainer.checkpoints.load({"model": trainer.model}, step=best)
    described = None if config.finetune.is_asked else config.model
    export_state(trainer.model, folder.weights, mesh, described)
    part = next((name for name in ("test", "validation") if name in parts), None)
    scores: dict[str, float] = {}
    drawn: list[Path] = []
    if part is not None:
        trainer.progress.say(f"Evaluating on the {part} part ({len(parts[part])} samples)")
        with make_loader(parts[part], config, mesh, once=True) as loader:
            meter = trainer.evaluate(loader)
        if meter is None:
            return _Test(signal=trainer.signals.heard)
        scores = meter.scores()
        trainer.recorder.scores(part, trainer.standing.step, trainer.loader.epoch, scores)
        if config.run.figures and mesh.rank == 0:
            drawn += meter.draw(folder.figures)
    if config.run.figures and mesh.rank == 0:
        drawn += draw_curves(folder.log, folder.figures)
    return _Test(part=part, scores=scores, figures=drawn)


def _summary(trainer: Trainer, mesh: Mesh, folder: RunFolder, test: _Test) -> dict[str, Any]:
    standing = trainer.standing
    scores = {"validation": standing.best_scores, **({test.part: test.scores} if test.part else {})}
    return {
        "state": _state(trainer, test.signal),
        "folder": str(folder.path),
        "step": standing.step,
        "epoch": trainer.loader.epoch,
        "best_step": standing.best_step,
        "scores": {part: without_nan(found) for part, found in scores.items() if found},
        "figures": [str(path) for path in test.figures],
        "weights": None if (found := find_weights(folder.weights)) is None else str(found),
        "mesh": mesh.grid.describe(),
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def _state(trainer: Trainer, signal: str | None) -> str:
    if signal:
        return f"stopped by {signal} at step {trainer.standing.step}; go on with --resume"
    patience = trainer.config.train.patience
    if patience is not None and trainer.standing.num_worse >= patience:
        return f"stopped early, no better in {patience} validations"
    return "finished"
