"""``hyperslab data synth``: make samples up, in the schemas of known data sets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click

from hyperslab.cli.data_options import JSON, Decorator
from hyperslab.cli.machine import Machine, find_machine
from hyperslab.cli.output import counted, progress_bar
from hyperslab.errors import ConfigError
from hyperslab.io.spec import shown_shape
from hyperslab.partial import shown_nbytes
from hyperslab.synth import (
    Climate,
    Collisions,
    Images,
    Meshes,
    Production,
    Recipe,
    Universes,
    Volumes,
    produce,
)


def size_option(num: int, default: str, text: str, *, one_for_all: bool = False) -> Decorator:
    """An option for ``num`` lengths joined by x; where they may be equal, one stands for all."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        parts = value.lower().split("x")
        if len(parts) == 1 and one_for_all:
            parts *= num
        if len(parts) != num or not all(part.isdecimal() and int(part) for part in parts):
            either = f"{default} or " if one_for_all else ""
            example = "x".join([default] * num) if one_for_all else default
            raise click.BadParameter(f"{value!r} is not a size such as {either}{example}")
        return tuple(map(int, parts))

    return click.option("--size", default=default, show_default=True, callback=parsed, help=text)


def synth_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what all commands here take beside their sizes and counts."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command


_OPTIONS = (
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of chance."),
    click.option(
        "--jobs",
        type=click.IntRange(1),
        help="Processes; default: one a core, as far as memory goes.",
    ),
    click.option("--overwrite", is_flag=True, help="Make files anew that are there already."),
    JSON,
)
OUT = click.argument("out", type=click.Path(file_okay=False, path_type=Path))


def number_option(name: str, default: int, text: str) -> Decorator:
    return click.option(name, type=click.IntRange(1), default=default, show_default=True, help=text)


def checked_equal(size: tuple[int, ...], name: str) -> int:
    if len(set(size)) > 1:
        raise click.BadParameter(f"{shown_shape(size)} is not {name}", param_hint="'--size'")
    return size[0]


EXAMPLES = """\b
Examples:
  hyperslab data synth cosmo --size 128 --count 64 cosmo
  hyperslab data synth hep --count 1024 --per-file 128 hep
  hyperslab data synth climate --size 384x576 --count 20 climate
  hyperslab data synth mesh --size 512 --count 100 mesh
  hyperslab data synth volumes --size 96x128x128 volumes
  hyperslab data synth images --count 10000 images
"""
COSMO_EXAMPLES = """\b
Examples:
  hyperslab data synth cosmo cosmo                          16 universes of 128x128x128
  hyperslab data synth cosmo --size 512 --count 4 --jobs 2 cosmo
  hyperslab data synth cosmo --size 64 --count 1000 --seed 1 --json cosmo > made.json
"""
HEP_EXAMPLES = """\b
Examples:
  hyperslab data synth hep hep                              256 images in 4 files
  hyperslab data synth hep --count 7090 --per-file 709 hep
  hyperslab data synth hep --size 64 --count 512 --per-file 512 hep
"""
CLIMATE_EXAMPLES = """\b
Examples:
  hyperslab data synth climate climate                      8 maps of 768x1152
  hyperslab data synth climate --size 192x288 --count 100 climate
"""
MESH_EXAMPLES = """\b
Examples:
  hyperslab data synth mesh mesh                            8 meshes of 1024x1024
  hyperslab data synth mesh --size 2048 --count 32 mesh
  hyperslab data synth mesh --size 256 --block 32 --count 500 mesh
"""
VOLUMES_EXAMPLES = """\b
Examples:
  hyperslab data synth volumes volumes                      16 volumes of 128x128x128
  hyperslab data synth volumes --size 64x96x96 --count 200 volumes
"""
IMAGES_EXAMPLES = """\b
Examples:
  hyperslab data synth images images                        1024 images in 4 files
  hyperslab data synth images --size 64 --count 50000 --per-file 5000 images
"""

USABLE = 0.8
"""Of the memory that this process may have: the rest is for others, and for files being written."""


@click.group(epilog=EXAMPLES)
def synth() -> None:
    """Make samples up, from physics and geometry, as HDF5 files in the schemas of known data sets.

    A file depends on its number, the seed and the sizes alone. A run that was broken off is taken
    up where it was: whole files are kept.
    """


@synth.command(epilog=COSMO_EXAMPLES)
@size_option(3, "128", "Cells of 1 Mpc/h along each dim, up to 1024.", one_for_all=True)
@number_option("--count", Universes.count, "Universes, one a file.")
@number_option("--particles", Universes.particles, "Per cell, on average: 1, 8, 27, ...")
@OUT
@synth_options
def cosmo(
    size: tuple[int, ...], count: int, particles: int, seed: int, out: Path, **how: Any
) -> None:
    """Make universes in folder OUT, in the schema of CosmoFlow.

    Particles are moved by gravity in the (truncated) Zel'dovich approximation, from a Gaussian
    random field with the power spectrum of Eisenstein and Hu, and counted in cells at redshifts 0,
    0.5, 1.5 and 3. Drawn evenly are Omega_m from 0.25 to 0.35, sigma_8 from 0.78 to 0.95, n_s from
    0.9 to 1 and H_0 from 63 to 77; they are what a network can learn to tell.

    A universe takes about 0.15 GiB of memory and 0.6 s of a core at 128, 0.6 GiB and 6 s at 256,
    3.6 GiB and 60 s at 512; files have 16 MiB, 128 MiB and 1 GiB.
    """
    recipe = Universes(
        size=checked_equal(size, "a cube"), count=count, particles=particles, seed=seed
    )
    _run(recipe, out, preset="cosmoflow", **how)


@synth.command(epilog=HEP_EXAMPLES)
@size_option(2, "224", "Cells along the beam and around it.", one_for_all=True)
@number_option("--count", Collisions.count, "Images, in all files.")
@number_option("--per-file", Collisions.per_file, "Images in a file.")
@OUT
@synth_options
def hep(size: tuple[int, int], count: int, per_file: int, seed: int, out: Path, **how: Any) -> None:
    """Make collisions as a calorimeter sees them in folder OUT, in the schema of HEPCNN.

    Half are background, two jets and what radiates from them, with a falling spectrum; half are
    signal, two heavy particles that decay to three jets each. Channels are the energy in the inner
    and in the outer calorimeter and the number of tracks.
    """
    recipe = Collisions(shape=size, count=count, per_file=per_file, seed=seed)
    _run(recipe, out, preset="hepcnn", **how)


@synth.command(epilog=CLIMATE_EXAMPLES)
@size_option(2, "768x1152", "Cells from south to north and around the Earth.")
@number_option("--count", Climate.count, "Maps, one a file.")
@OUT
@synth_options
def climate(size: tuple[int, int], count: int, seed: int, out: Path, **how: Any) -> None:
    """Make maps of weather in folder OUT, in the schema of the climate benchmark.

    Each has 16 fields of the whole Earth and a mask: 1 in tropical cyclones, 2 in atmospheric
    rivers, 0 elsewhere, with about the fractions of the real data.
    """
    _run(Climate(shape=size, count=count, seed=seed), out, preset="climate", **how)


@synth.command(epilog=MESH_EXAMPLES)
@size_option(2, "1024", "Cells along each dim, a multiple of the block.", one_for_all=True)
@number_option("--count", Meshes.count, "Meshes, one a file.")
@number_option(
    "--block", Meshes.block, "Cells along each dim of a block, of which the target tells."
)
@OUT
@synth_options
def mesh(size: tuple[int, int], count: int, block: int, seed: int, out: Path, **how: Any) -> None:
    """Make meshes that are about to tangle in folder OUT, as codes for flows meet them.

    A mesh of quadrilaterals goes with a gas of two materials in which eddies turn, spread and draw
    together and layers slide. Its 18 channels are displacement, velocity and acceleration of nodes,
    and density, pressure, shape, vorticity and more of cells. To be foreseen is the fraction of
    each block's cells that will be turned inside out within 1, 2, 3 and 4 steps.

    A mesh takes about 0.7 GiB of memory and 0.6 s of a core at 1024, four times that at 2048.
    """
    recipe = Meshes(size=checked_equal(size, "a square"), count=count, seed=seed, block=block)
    _run(recipe, out, preset="mesh", **how)


@synth.command(epilog=VOLUMES_EXAMPLES)
@size_option(3, "128", "Voxels along depth, height and width.", one_for_all=True)
@number_option("--count", Volumes.count, "Volumes, one a file.")
@OUT
@synth_options
def volumes(size: tuple[int, int, int], count: int, seed: int, out: Path, **how: Any) -> None:
    """Make volumes with label maps in folder OUT, bodies as a magnetic resonance scanner sees them.

    Organs are bent ellipsoids with a texture, among others that are not marked; the image has
    uneven illumination, mixtures at surfaces, and noise. Labels are 1 in the liver, 2 in the
    kidneys, 3 in lesions of either, 0 elsewhere.
    """
    _run(Volumes(shape=size, count=count, seed=seed), out, preset="volumes", **how)


@synth.command(epilog=IMAGES_EXAMPLES)
@size_option(2, "224", "Pixels along height and width.", one_for_all=True)
@number_option("--count", Images.count, "Images, in all files.")
@number_option("--per-file", Images.per_file, "Images in a file.")
@OUT
@synth_options
def images(
    size: tuple[int, int], count: int, per_file: int, seed: int, out: Path, **how: Any
) -> None:
    """Make labelled images in folder OUT: things of ten shapes among clutter.

    Pose, size, colour, pattern, light and background tell nothing of the class: disc, ring, square,
    triangle, flower, cross, crescent, gear, spiral or dumbbell.
    """
    recipe = Images(shape=size, count=count, per_file=per_file, seed=seed)
    _run(recipe, out, preset="images", **how)


def _run(
    recipe: Recipe, out: Path, *, preset: str, jobs: int | None, overwrite: bool, as_json: bool
) -> None:
    fitting = jobs_that_fit(recipe, find_machine())
    with progress_bar("Making files") as progress:
        production = produce(
            recipe, out, jobs=jobs or fitting, overwrite=overwrite, on_progress=progress
        )
    pattern = str(out / recipe.file_name(0).replace("000000", "*"))
    report = _report(recipe, production, pattern, preset)
    click.echo(json.dumps(report, indent=2) if as_json else _sentence(production, pattern, preset))


def jobs_that_fit(recipe: Recipe, machine: Machine) -> int:
    """A process for each core, unless memory is for fewer; raises if it is for none."""
    usable = int(USABLE * machine["memory_nbytes"])
    if recipe.memory_nbytes > usable:
        raise ConfigError(
            f"making one such file takes about {shown_nbytes(recipe.memory_nbytes)} of memory, "
            f"and this process may use {shown_nbytes(usable)}: choose a smaller size"
        )
    return max(1, min(int(machine["cpu_cores"]), usable // recipe.memory_nbytes))


def _report(recipe: Recipe, production: Production, pattern: str, preset: str) -> dict[str, Any]:
    return {
        **dataclasses.asdict(production),
        "files": pattern,
        "preset": preset,
        "recipe": dataclasses.asdict(cast(Any, recipe)),
    }


def _sentence(production: Production, pattern: str, preset: str) -> str:
    made = (
        f"Made {counted(production.made, 'file')}, {shown_nbytes(production.nbytes)}, in "
        f"{production.seconds:.1f} s on {counted(production.jobs, 'process')}; "
        f"{counted(production.kept, 'file')} had been made before."
    )
    return f"{made}\nTo open: hs.open({pattern!r}, preset={preset!r})"
