"""``hyperslab train`` and ``export``: from a configuration to weights, scores and pictures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.table import Table
from rich.text import Text

from hyperslab.cli.local_ranks import (
    RankCount,
    check_launched,
    count_ranks,
    find_launcher,
    run_ranks,
)
from hyperslab.cli.output import draw, print_answer, print_news, print_result
from hyperslab.cli.rank_errors import (
    FOLDER,
    begin_rank,
    first_cause,
    read_errors,
    stopped_by,
    told_once,
)
from hyperslab.errors import ConfigError
from hyperslab.train.config import Config
from hyperslab.train.preset_list import PRESETS, hint_for
from hyperslab.train.process import CAN_GO_ON, COMMAND, user_command
from hyperslab.train.read_config import SAVED_AS, config_name, read_config
from hyperslab.train.write_config import config_to_toml

EXAMPLES = """\b
Examples:
  hyperslab train --list                               which presets are there?
  hyperslab data synth cosmo --size 64 --count 256 cosmo
  hyperslab train cosmoflow-64                         trains on them, into runs/cosmoflow-64
  hyperslab train cosmoflow-64 --set mesh.depth=2      two local ranks share each cube
  hyperslab train cosmoflow-64 --set mesh=auto --ranks 2    the planner chooses the mesh
  hyperslab train cosmoflow-64 --set tournament.trainers=4  four play against each other
  hyperslab train cosmoflow-64 --resume                goes on where it was stopped
  hyperslab train cosmoflow-128 --show > mine.toml     all settings, to be edited
  hyperslab train mine.toml --set data.batch_size=8 --set 'data.files="big/*.h5"'
  hyperslab train mine.toml --set optimizer.options.betas=[0.9,0.99] --set train.clip=none
  torchrun --nproc-per-node 4 -m hyperslab train mine.toml --set mesh.depth=4
  srun --ntasks 64 hyperslab train mine.toml --folder /scratch/run7 --resume
"""

GO_ON = "the same command with --resume goes on from the last checkpoint, if there is one"


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="[CONFIG]", required=False)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a setting, such as data.batch_size=8; words need no quotes. May be repeated.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Local processes to start; default: as many as the mesh asks for, else one a GPU.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    help="The folder to write to; default: runs/ and the name of CONFIG.",
)
@click.option(
    "--run",  # the old name of --folder, which torchrun takes for its own --run-path
    "old_folder",
    type=click.Path(file_okay=False),
    hidden=True,
)
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint, if there is one.")
@click.option(
    "--trainer",
    type=click.IntRange(0),
    help="Start this trainer of a tournament alone, from its checkpoint: the others still play.",
)
@click.option("--show", is_flag=True, help="Print all settings as TOML, and do not train.")
@click.option("--list", "listing", is_flag=True, help="List the presets, and do not train.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
@click.pass_context
def train(
    ctx: click.Context,
    source: str | None,
    changes: tuple[str, ...],
    ranks: int | None,
    folder: str | None,
    old_folder: str | None,
    resume: bool,
    trainer: int | None,
    show: bool,
    listing: bool,
    as_json: bool,
) -> None:
    """Train as CONFIG says: a TOML file, a preset, or the folder of an earlier run.

    Starts local processes by itself where the mesh asks for several, or runs as one of those that
    torchrun, srun or mpirun started. A TOML file may begin with base = "cosmoflow-128" and then
    says only what is different. Files of data are looked for from the current folder.

    On SIGINT (Ctrl-C), SIGTERM or SIGUSR1 it writes a checkpoint and ends with exit code 75: the
    same command with --resume goes on.
    """
    begin_rank()
    if listing:
        _print_presets(as_json)
        return
    if source is None:
        raise click.UsageError(
            "Name a configuration: a TOML file, a preset (hyperslab train --list shows them) or "
            "the folder of a run."
        )
    if show:
        _print_config(read_config(source, changes), as_json)
        return
    folder = folder or old_folder
    with_traceback = bool(ctx.parent and ctx.parent.params.get("traceback"))
    launch = find_launcher()
    if launch:
        with told_once(launch, with_traceback=with_traceback):
            check_launched(launch, ranks)
            config = _config(source, changes, folder)
            code = _run(config, resume, as_json, trainer, rank=launch.rank)
    else:
        config = _config(source, changes, folder)
        _check_trainer(config, trainer)
        chosen = count_ranks(config, ranks, is_one_trainer=trainer is not None)
        if chosen.num > 1 or chosen.advice:
            print_news(_announcement(chosen), err=True)
        if chosen.num == 1:
            code = _run(config, resume, as_json, trainer, rank=0)
        else:
            flags = {"--traceback": with_traceback, "train": True}
            flags |= {"--resume": resume, "--json": as_json}
            words = [word for word, is_set in flags.items() if is_set]
            words += [] if trainer is None else ["--trainer", str(trainer)]
            num_groups = config.tournament.trainers if trainer is None else 1
            code = _start(config, chosen.num, words, num_groups)
    ctx.exit(code)


def _config(source: str, changes: Sequence[str], folder: str | None) -> Config:
    config = read_config(source, changes)
    folder = folder or config.run.folder or f"runs/{config_name(source)}"
    return replace(config, run=replace(config.run, folder=folder))


def _announcement(chosen: RankCount) -> str:
    many = f"{chosen.num} local ranks" if chosen.num > 1 else "one rank"
    return f"Starting {many} ({chosen.why}){f'; {chosen.advice}' if chosen.advice else ''}"


def _check_trainer(config: Config, trainer: int | None) -> None:
    """Raises if one trainer is asked for that is not among those of the tournament."""
    num = config.tournament.trainers
    if trainer is not None and (num == 1 or trainer >= num):
        raise ConfigError(
            f"--trainer {trainer} is one of a tournament's, from 0 to tournament.trainers - 1, and "
            f"tournament.trainers = {num}"
        )


def _run(config: Config, resume: bool, as_json: bool, trainer: int | None, *, rank: int) -> int:
    """Trains as one rank, and returns the exit code; one rank prints what came of it."""
    from hyperslab.train.run import run

    _check_trainer(config, trainer)
    if trainer is None:
        outcome = run(config, resume=resume, ends_process=True)
    else:
        outcome = run(config, resume=True, ends_process=True, trainer=trainer)
    if rank == 0 if config.tournament.trainers == 1 else outcome.is_told:
        print_news(json.dumps(outcome.summary, indent=2) if as_json else draw(outcome.report()))
    return outcome.exit_code


def _start(config: Config, num_ranks: int, arguments: Sequence[str], num_groups: int) -> int:
    """Trains on local ranks, and returns the exit code.

    They read the configuration as it is now, whatever becomes of its files while they start.
    """
    with TemporaryDirectory(prefix="hyperslab-train-") as name:
        source = Path(name) / SAVED_AS
        source.write_text(config_to_toml(config), encoding="utf-8")
        # -P: modules of the current folder do not take the place of Python's own.
        command = [sys.executable, "-P", "-m", "hyperslab", *arguments, str(source)]
        environ = {**os.environ, FOLDER: name, COMMAND: user_command()}
        outcome = run_ranks(
            command, num_ranks, environ=environ, until_exit=True, num_groups=num_groups
        )
        errors = read_errors(Path(name))
    if not any(ending.is_failure for ending in outcome.endings):
        return max(ending.code for ending in outcome.endings)
    if num_groups > 1 and outcome.has_whole_group(num_ranks // num_groups):
        print_news(
            f"Some trainers did not come to the end: {first_cause(outcome, errors)}", err=True
        )
        return max(ending.code for ending in outcome.endings if not ending.is_failure)
    if signal := stopped_by(outcome, errors):
        print_news(f"Stopped at once by {signal}; {GO_ON}", err=True)
        return CAN_GO_ON
    print_news(f"Error: {first_cause(outcome, errors)}", err=True)
    return 1


# What can be printed without training


def _print_config(config: Config, as_json: bool) -> None:
    text = json.dumps(asdict(config), indent=2, default=str) if as_json else config_to_toml(config)
    print_answer(text.rstrip())


def _print_presets(as_json: bool) -> None:
    presets = [*PRESETS.values()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("preset", "learns", "input", "parameters", "GFLOP", "data"):
        table.add_column(name, no_wrap=name != "learns")
    for preset in presets:
        config = read_config(preset.name)
        numbers = (f"{preset.num_parameters:,}", f"{preset.gflop:,}")
        row = (preset.name, preset.about, preset.input, *numbers)
        table.add_row(*map(Text, (*row, str(config.data.files))))
    example = hint_for(read_config(presets[0].name))
    hint = Text(f"\nNo data yet? For {presets[0].name}, {example}")
    print_result([asdict(preset) for preset in presets], as_json, table, hint)


EXPORT_EXAMPLES = """\b
Examples:
  hyperslab export runs/cosmoflow-64 weights.safetensors
  hyperslab export runs/cosmoflow-64 early.safetensors --step 100
"""


@click.command(epilog=EXPORT_EXAMPLES)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(0), help="Of which checkpoint; default: the last.")
@click.option(
    "--shard-size",
    default="5GiB",
    show_default=True,
    help="Larger weights go to several files beside FILE, and FILE.index.json lists them.",
)
def export(run: Path, file: Path, step: int | None, shard_size: str) -> None:
    """Write the weights of the run in folder RUN to FILE, in the safetensors format.

    They are those of the plain module, whatever mesh it was trained on: safetensors.torch.load_file
    and load_state_dict load them without hyperslab.
    """
    from hyperslab.store.budget import parse_nbytes
    from hyperslab.train.export import export_run
    from hyperslab.train.weight_files import find_weights

    step = export_run(run, file, step, shard_nbytes=parse_nbytes(shard_size))
    click.echo(f"Wrote the weights of step {step} to {find_weights(file) or file}")
