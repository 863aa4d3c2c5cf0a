"""How many ranks a run has."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyperslab.cli.machine import find_machine
from hyperslab.cli.selftest import LAUNCHER_VARIABLES
from hyperslab.errors import ConfigError
from hyperslab.layout import AXES

if TYPE_CHECKING:  # the first loads torch
    from hyperslab.comm.launch import Launch
    from hyperslab.train.config import Config


MANY_RANKS, MANY_PER_CORE = 16, 4
"""More of them, in all and for each core, are not started unless asked for by number."""


class RankCount(NamedTuple):
    """A number of ranks to start here."""

    num: int
    why: str
    advice: str = ""
    """What else could be done, where that is likely to be wanted."""


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launch, if torchrun, srun or mpirun started this process.

    Loads torch only where a variable looks like a launcher's.
    """
    if not any(name.startswith(LAUNCHER_VARIABLES) for name in environ):
        return None
    from hyperslab.comm.launch import find_launch

    launch = find_launch(environ)
    return None if launch.launcher == "alone" else launch


def check_launched(launch: Launch, asked: int | None) -> None:
    """Raises if the user asks for another number of ranks than the launcher has started."""
    if asked not in (None, launch.num_ranks):
        raise ConfigError(
            f"--ranks {asked} was asked for, but {launch.launcher} has started "
            f"{launch.num_ranks}: leave out --ranks, or start {asked} with {launch.launcher}"
        )


def count_ranks(config: Config, asked: int | None) -> RankCount:
    """How many ranks to start: those asked for, those of the mesh, or one a GPU."""
    axes = {axis: getattr(config.mesh, axis) for axis in AXES}
    cut = {axis: size for axis, size in axes.items() if size not in (None, 1)}
    product = math.prod(cut.values())
    shown = " x ".join(f"mesh.{axis}={size}" for axis, size in cut.items())
    if asked is not None:
        _check_asked(asked, product, shown, is_fixed=axes["sample"] is not None)
        return RankCount(asked, "--ranks")
    num_gpus = 0 if config.mesh.device == "cpu" else count_gpus()
    if cut or axes["sample"] is not None:
        more = num_gpus // product * product if axes["sample"] is None else 0
        advice = f"--ranks {more} would use {more} of {num_gpus} GPUs" if more > product else ""
        _check_room(product, shown, num_gpus)
        return RankCount(product, shown or "mesh.sample=1", advice)
    # A rank without a sample of its own in a forward pass would only wait.
    useful = min(max(1, num_gpus), config.data.batch_size // config.train.accumulate)
    idle = num_gpus - useful
    advice = f"{idle} more GPUs could share each sample: --set mesh.depth=..." if idle > 0 else ""
    return RankCount(useful, f"{num_gpus} GPUs", advice)


def _check_asked(asked: int, product: int, shown: str, *, is_fixed: bool) -> None:
    if asked % product or (is_fixed and asked != product):
        raise ConfigError(
            f"--ranks {asked} does not fit {shown or 'mesh.sample=1'}: ask for "
            f"{'' if is_fixed else 'a multiple of '}{product}, or change the mesh "
            "(--set mesh.depth=...)"
        )


def _check_room(num: int, shown: str, num_gpus: int) -> None:
    """Raises if a mesh is larger than is likely to be meant for this machine."""
    cores = find_machine()["cpu_cores"]
    if num > max(MANY_RANKS, MANY_PER_CORE * cores, num_gpus):
        raise ConfigError(
            f"{shown} asks for {num} ranks, and this machine has {cores:g} cores and {num_gpus} "
            f"GPUs: start them on several with torchrun or srun, or say --ranks {num} if all "
            "shall run here"
        )


def count_gpus() -> int:
    """The GPUs that torch can use; it is asked only where there is one at all."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()
