"""``hyperslab plan``: the best partition, before any GPU is booked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from hyperslab.cli.output import print_news, print_result
from hyperslab.errors import ConfigError
from hyperslab.planner.cost import Job, KernelTimes
from hyperslab.planner.machine import PRECISIONS, Machine, known_machines
from hyperslab.planner.memory import STATES
from hyperslab.planner.network import Network, load_shipped, shipped_names
from hyperslab.planner.planning import ANY_MACHINE, AUTO, SOURCES, find_machine, make_job
from hyperslab.planner.report import MOST_ROWS, run_sentence, to_dict, to_parts
from hyperslab.planner.scaling import MOST_GPUS, best_gpus, fewest_gpus, training_run
from hyperslab.planner.search import Found, search
from hyperslab.train.config import Config, ModelConfig
from hyperslab.train.preset_list import PRESETS
from hyperslab.train.read_config import apply_changes, read_config

EXAMPLES = """\b
Examples:
  hyperslab plan cosmoflow-512                 on how many GPUs does it fit, and how fast is it?
  hyperslab plan cosmoflow-512 --gpus 64 --machine dgx-h100 --batch 16
  hyperslab plan cosmoflow-512 --gpus 64 --machine dgx-h100 --batch 16 --html plan.html
  hyperslab plan cosmoflow-512 --machine lassen --batch 4 --fewest
  hyperslab plan unet3d --machine perlmutter --batch 32 --efficiency 0.7
  hyperslab plan cosmoflow-512 --gpus 64 --machine dgx-h100 --samples 10017 --epochs 130
  hyperslab plan my_module:make_net --input 1x512x512x512 --gpus 8 --machine mine.toml
  hyperslab plan nets.py:Net --set model.options.width=32 --input 3x2048x2048 --gpus 4
  hyperslab plan cosmoflow-512 --gpus 64 --json | jq .best.mesh
  hyperslab plan calibrate cosmoflow-128      measure this machine first
"""

MOST_TRIED = 512
"""GPUs, for a share of ideal speed."""

SUBCOMMANDS = {"calibrate": "hyperslab.cli.plan_calibrate"}
"""What ``plan`` can do besides: the name of each, and the module that holds it under its name."""


class PlanCommand(click.Command):
    """Takes a network, or the name of a subcommand, which then takes the rest."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if not args or args[0] not in SUBCOMMANDS:
            return super().make_context(info_name, args, parent, **extra)
        name = args[0]
        command: click.Command = getattr(import_module(SUBCOMMANDS[name]), name)
        return command.make_context(f"{info_name} {name}", args[1:], parent, **extra)


def read_shape(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    extents = value.split("x")
    if not all(each.isdecimal() and int(each) for each in extents):
        raise click.BadParameter(
            f"{value!r} is not channels and extents joined by 'x', such as 4x512x512x512"
        )
    return tuple(map(int, extents))


@click.command(cls=PlanCommand, epilog=EXAMPLES)
@click.argument("name")
@click.option(
    "--gpus",
    type=click.IntRange(1),
    help="GPUs to train on; default: the fewest on which it fits. With --fewest and --efficiency, "
    "the most that are tried.",
)
@click.option(
    "--machine",
    metavar="NAME",
    help=f"One of {', '.join(known_machines())}, or a TOML file; default: this one, if "
    f"measured, else {ANY_MACHINE}.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Samples in a step, over all GPUs; default: those of the preset, else 1.",
)
@click.option(
    "--input",
    "shape",
    metavar="SHAPE",
    callback=read_shape,
    help="The shape of a sample, channels first, such as 1x512x512x512.",
)
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a setting, such as model.options.size=256. May be repeated.",
)
@click.option("--precision", type=click.Choice([AUTO, *PRECISIONS]), help="Of products.")
@click.option("--optimizer", type=click.Choice([*STATES]), help="What keeps numbers for weights.")
@click.option(
    "--source",
    type=click.Choice(SOURCES),
    default="memory",
    show_default=True,
    help="Where samples are read from: the file system, disks of the nodes, memory of the ranks.",
)
@click.option("--fewest", is_flag=True, help="Find the fewest GPUs on which it fits.")
@click.option(
    "--efficiency",
    type=float,
    metavar="SHARE",
    help="Find the most GPUs that have this share of ideal speed, such as 0.7.",
)
@click.option("--samples", type=click.IntRange(1), help="Of an epoch: tells hours and GPU-hours.")
@click.option(
    "--epochs", type=click.IntRange(1), default=1, show_default=True, help="Of the whole run."
)
@click.option(
    "--max-rows", type=click.IntRange(1), default=MOST_ROWS, show_default=True, help="Meshes shown."
)
@click.option("--layers", is_flag=True, help="Show every operator of the best mesh.")
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw scaling curves here."
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with all of it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON rather than a table.")
def plan(
    name: str,
    gpus: int | None,
    machine: str | None,
    batch: int | None,
    shape: tuple[int, ...] | None,
    changes: tuple[str, ...],
    precision: str | None,
    optimizer: str | None,
    source: str,
    fewest: bool,
    efficiency: float | None,
    samples: int | None,
    epochs: int,
    max_rows: int,
    layers: bool,
    png: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest way to train a network on GPUs that need not be there.

    NAME is a preset (hyperslab train --list shows them), a TOML file as for hyperslab train, or a
    class or function of yours that makes a module: package.module:Name or path/to/file.py:Name.
    Nothing is computed: the network runs once on tensors without values, and every way to cut it
    over the GPUs is weighed by what kernels, messages, memory and reading take on the machine.
    """
    if fewest and efficiency is not None:
        raise click.UsageError("--fewest and --efficiency are two questions: ask one.")
    chosen, measured = find_machine(machine, gpus or 1)
    config = None if ":" in name else read_config(name, changes)
    network = find_network(name, config, shape, changes)
    job = make_job(
        network,
        batch or (config.data.batch_size if config else 1),
        chosen,
        precision=precision or (config.train.precision if config else AUTO),
        optimizer=optimizer or _optimizer(config),
        source=source,
    )
    found = _answer(job, chosen, measured, gpus, fewest, efficiency)
    if not found.candidates and not as_json:
        raise ConfigError(found.sentence)
    run = training_run(found, samples, epochs) if samples and found.candidates else None
    notes = [Text(), Text(run_sentence(run, samples, epochs))] if run and samples else []
    content = to_dict(found, max_rows) | ({"run": asdict(run)} if run else {})
    print_result(content, as_json, *to_parts(found, max_rows, layers=layers), *notes)
    _write(found, png, html, max_rows)
    if not found.candidates:
        raise click.exceptions.Exit(1)


def _answer(
    job: Job,
    machine: Machine,
    measured: KernelTimes | None,
    gpus: int | None,
    fewest: bool,
    efficiency: float | None,
) -> Found:
    """For ``gpus``, or for as many as the question asks for."""
    if efficiency is not None:
        return best_gpus(job, machine, efficiency, gpus or MOST_TRIED, measured)
    if gpus is None or fewest:
        most = gpus or MOST_GPUS
        gpus = fewest_gpus(job, machine, most) or most
    return search(job, machine, gpus, measured)


def _optimizer(config: Config | None) -> str:
    """That of a configuration; one of the user's own is taken for Adam."""
    name = config.optimizer.name if config else "adam"
    if name == "sgd" and config and config.optimizer.options.get("momentum"):
        return "momentum"
    return name if name in STATES else "adam"


def find_network(
    name: str, config: Config | None, shape: tuple[int, ...] | None, changes: Sequence[str]
) -> Network:
    """From the list of operators that is shipped where there is one, else from the model."""
    preset = PRESETS.get(name)
    if preset and not changes and shape in (None, preset.shape) and name in shipped_names():
        return load_shipped(name)
    shape = shape or (preset.shape if preset else None)
    if shape is None:
        raise ConfigError(f"{name} needs the shape of a sample, such as --input 1x512x512x512")
    model = config.model if config else _own_model(name, changes)
    from hyperslab.planner.read_network import read_network
    from hyperslab.train.model import build_without_values

    return read_network(build_without_values(model), shape, name)


def _own_model(name: str, changes: Sequence[str]) -> ModelConfig:
    tables = apply_changes({"model": {"name": name}}, changes)
    if others := [table for table in tables if table != "model"]:
        raise ConfigError(f"--set {others[0]}: a module has settings of model.options alone")
    return ModelConfig(**tables["model"])


def _write(found: Found, png: Path | None, html: Path | None, max_rows: int) -> None:
    if png and found.candidates:
        from hyperslab.planner.curves import draw_curves

        draw_curves(found, png)
        print_news(f"Curves: {png}", err=True)
    if html and found.candidates:
        from hyperslab.planner.page import write_page

        write_page(found, html, max_rows)
        print_news(f"Page: {html}", err=True)
