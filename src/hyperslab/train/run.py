"""One run: from a configuration to a folder with weights, scores and pictures."""

from __future__ import annotations

import math
import random
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

from hyperslab.comm.mesh import Mesh, init
from hyperslab.errors import ConfigError
from hyperslab.io import Dataset
from hyperslab.models import build
from hyperslab.nn import parallelize
from hyperslab.train.activations import checkpoint_activations
from hyperslab.train.batch import Roles
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import Config
from hyperslab.train.datasets import make_loader, open_parts
from hyperslab.train.evaluate import evaluate
from hyperslab.train.export import export_state, load_weights
from hyperslab.train.figures import draw_curves
from hyperslab.train.loop import Trainer
from hyperslab.train.named import find_named
from hyperslab.train.optimizers import make_optimizer
from hyperslab.train.precision import float32_products, forward_context
from hyperslab.train.progress import TrainProgress
from hyperslab.train.read_config import config_to_toml
from hyperslab.train.recorder import Recorder
from hyperslab.train.run_folder import RunFolder
from hyperslab.train.schedule import RateFactor
from hyperslab.train.stop_signals import StopSignals
from hyperslab.train.task import make_task

STOPPED = 75
"""The exit code of a run that a signal stopped and that can go on (EX_TEMPFAIL)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    summary: dict[str, Any]
    exit_code: int = 0

    def table(self) -> Table:
        """The scores of each part that was evaluated."""
        parts = self.summary["scores"]
        table = Table(title=f"{self.summary['folder']}: {self.summary['state']}")
        table.add_column("score")
        for name in parts:
            table.add_column(name, justify="right")
        for key in dict.fromkeys(key for scores in parts.values() for key in scores):
            found = (scores.get(key) for scores in parts.values())
            table.add_row(key, *("" if score is None else f"{score:.4g}" for score in found))
        return table


def run(config: Config, *, resume: bool = False) -> Outcome:
    """Trains, validates and tests as ``config`` says, and writes all of it to the run's folder.

    Collective over all ranks, which torchrun, srun, mpirun or the caller has started.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        mesh = init(**asdict(config.mesh))
        stack.enter_context(float32_products(config.train.precision))
        context = forward_context(config.train.precision, mesh.device)
        signals = stack.enter_context(StopSignals(mesh))
        parts = open_parts(config)
        model = make_model(config, mesh, parts["train"])
        path = Path(config.run.folder or f"runs/{config.model.name.rpartition(':')[2]}")
        folder = stack.enter_context(
            RunFolder.begin(path, config_to_toml(config), mesh, resume=resume)
        )
        trainer = _trainer(config, mesh, model, parts, folder, signals, context, stack)
        if resume and trainer.resume():
            trainer.progress.say(f"Going on from step {trainer.standing.step}")
        trainer.recorder.begin(trainer.standing.step)
        signal = trainer.fit()
        trainer.checkpoints.wait()
        test = _Test(signal=signal) if signal else _test(trainer, parts, mesh, folder)
        summary = _summary(trainer, mesh, folder, test)
        summary["seconds"] = round(time.monotonic() - start, 1)
        if mesh.rank == 0:
            folder.write_summary(summary)
    return Outcome(summary, STOPPED if test.signal else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """What came of the samples that were kept for the end."""

    part: str | None = None
    scores: dict[str, float] = field(default_factory=dict)
    figures: list[Path] = field(default_factory=list)
    signal: str | None = None
    """That stopped the run before."""


def make_model(config: Config, mesh: Mesh, data: Dataset) -> nn.Module:
    """The model on all ranks, with equal weights, drawn by the run's seed.

    Collective over all ranks.
    """
    seed, settings = config.train.seed, config.train
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - for the code of users
    torch.manual_seed(seed)
    model = _built(config)
    if settings.precision == "fp64":
        model.double()
    if config.model.weights is not None:
        load_weights(model, Path(config.model.weights))
    if settings.channels_last:
        formats = {3: torch.channels_last, 4: torch.channels_last_3d}
        layout = formats.get(len(data.shape), torch.contiguous_format)
        model.to(memory_format=layout)  # type: ignore[call-overload]
    checkpoint_activations(model, settings.checkpoint_activations)
    return parallelize(
        model, mesh, shard_weights=settings.shard_weights, batch_stats=settings.batch_stats
    )


def _built(config: Config) -> nn.Module:
    name, options = config.model.name, config.model.options
    if ":" not in name:
        return build(name, options)
    make = find_named(name, "model.name")
    try:
        model = make(**options)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be made with model.options = {dict(options)}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name = {name!r} gives a {type(model).__name__}, not a module")
    return model


def _trainer(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    parts: dict[str, Dataset],
    folder: RunFolder,
    signals: StopSignals,
    context: AbstractContextManager[object],
    stack: ExitStack,
) -> Trainer:
    loader = stack.enter_context(make_loader(parts["train"], config, mesh, training=True))
    validation = None
    if "validation" in parts:
        validation = stack.enter_context(make_loader(parts["validation"], config, mesh))
    steps_per_epoch = math.ceil(len(loader) / config.train.accumulate)
    num_steps = min(config.train.epochs * steps_per_epoch, config.train.steps or math.inf)
    return Trainer(
        config=config,
        model=model,
        optimizer=make_optimizer(model, config.optimizer),
        rate=RateFactor(config.schedule, steps_per_epoch, config.train.epochs),
        task=make_task(config.task),
        roles=Roles.of(parts["train"], config.task),
        loader=loader,
        validation=validation,
        context=context,
        checkpoints=stack.enter_context(
            Checkpoints(folder.checkpoints, mesh, keep=config.run.keep)
        ),
        recorder=stack.enter_context(Recorder(folder, mesh, tensorboard=config.run.tensorboard)),
        progress=stack.enter_context(
            TrainProgress(int(num_steps), steps_per_epoch, show=mesh.rank == 0)
        ),
        signals=signals,
    )


def _test(trainer: Trainer, parts: dict[str, Dataset], mesh: Mesh, folder: RunFolder) -> _Test:
    """What the best weights are worth on samples kept for the end; they are exported too.

    Collective over all ranks.
    """
    config, best = trainer.config, trainer.standing.best_step
    if best is not None and best != trainer.standing.step:
        trainer.checkpoints.load({"model": trainer.model}, step=best)
    export_state(trainer.model, folder.weights, mesh, config.model)
    part = next((name for name in ("test", "validation") if name in parts), None)
    scores: dict[str, float] = {}
    drawn: list[Path] = []
    if part is not None:
        trainer.progress.say(f"Evaluating on the {part} part ({len(parts[part])} samples)")
        with make_loader(parts[part], config, mesh, once=True) as loader:
            meter = evaluate(
                trainer.model,
                loader,
                trainer.task,
                trainer.roles,
                trainer.context,
                is_stopped=trainer.signals.poll,
            )
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
        "scores": {part: _plain(found) for part, found in scores.items() if found},
        "figures": [str(path) for path in test.figures],
        "weights": None if test.signal else str(folder.weights),
        "mesh": mesh.grid.describe(),
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def _plain(scores: dict[str, float]) -> dict[str, float | None]:
    """Scores as JSON has them, which knows no NaN."""
    return {name: score if math.isfinite(score) else None for name, score in scores.items()}


def _state(trainer: Trainer, signal: str | None) -> str:
    if signal:
        return f"stopped by {signal} at step {trainer.standing.step}; go on with --resume"
    patience = trainer.config.train.patience
    if patience is not None and trainer.standing.num_worse >= patience:
        return f"stopped early, no better in {patience} validations"
    return "finished"
