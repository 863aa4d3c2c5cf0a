"""Weights as plain safetensors files, which need no hyperslab to be read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import hyperslab
from hyperslab.comm.agree import run_on_all
from hyperslab.comm.collectives import gather_whole
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.partial import partial_file
from hyperslab.train.checkpoint_folder import check_files, read_manifest
from hyperslab.train.checkpoint_state import empties, put_together
from hyperslab.train.checkpoint_tensors import read_index, read_tensors
from hyperslab.train.checkpoints import choose_step, find_checkpoints
from hyperslab.train.config import ModelConfig
from hyperslab.train.read_config import read_config


def export_state(
    model: nn.Module, path: Path, mesh: Mesh, config: ModelConfig | None = None
) -> None:
    """Writes the whole ``state_dict`` of ``model``, as the plain module would have it.

    The file's metadata tells the model's name and options by ``config``. Rank 0 writes.

    Collective over all ranks.
    """
    state = model.state_dict()
    _check_tensors(state)
    gathered = {key: gather_whole(each, mesh) for key, each in state.items()}
    whole = {key: each for key, each in gathered.items() if each is not None}
    run_on_all(lambda: write_weights(whole, path, config) if mesh.rank == 0 else None, mesh)


def export_run(run_folder: Path, file: Path, step: int | None = None) -> int:
    """Writes the weights of a run's checkpoint, the newest or that of ``step``, which it returns.

    One process is enough, whatever the mesh of the run.
    """
    _check_run(run_folder)
    found = find_checkpoints(run_folder / "checkpoints")
    step = choose_step(found, step, run_folder)
    config = read_config(str(run_folder), []).model
    manifest = read_manifest(found[step])
    check_files(found[step], manifest.files)
    if "model" not in manifest.trees:
        raise FormatError(f"{found[step]} holds no model: it holds {', '.join(manifest.trees)}")
    tree = manifest.trees["model"]
    index = read_index(found[step], manifest)
    tensors = empties(tree)
    read_tensors(tensors, index, found[step])
    state = put_together(tree, tensors)
    _check_tensors(state)
    write_weights(state, file, config)
    return step


def _check_run(folder: Path) -> None:
    """Raises if ``folder`` is not that of a run."""
    if (folder / "checkpoints").is_dir():
        return
    if match := re.fullmatch(r"step_0*(\d+)", folder.resolve().name):
        raise FormatError(
            f"{folder} is a checkpoint, not the folder of a run: name the run's folder and "
            f"--step {match[1]}"
        )
    raise FormatError(f"{folder} is not the folder of a run: there are no checkpoints in it")


def write_weights(state: Mapping[str, Tensor], path: Path, config: ModelConfig | None) -> None:
    """Writes tensors to a file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    about = {"format": "pt", "hyperslab": hyperslab.__version__}
    if config is not None:
        about |= {"model": config.name, "options": json.dumps(dict(config.options))}
    with partial_file(path) as (part, _):
        try:
            save_file(_separate(state), part, metadata=about)
            _publish(part)
        except (SafetensorError, ValueError, KeyError) as error:
            raise FormatError(f"{path} could not be written: {error}") from error


def _publish(path: Path) -> None:
    """Puts a file on the disk and lets others read it, as far as this process lets them.

    ``save_file`` makes a file of its own under that name, for the owner alone.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_weights(model: nn.Module, path: Path) -> None:
    """Gives a plain ``model`` the weights in ``path``, which must be exactly its own."""
    state = _read(path)
    own = model.state_dict()
    _check_names(path, state, own)
    for key, there in state.items():
        if there.shape != own[key].shape:
            shapes = ["x".join(map(str, each.shape)) or "a number" for each in (there, own[key])]
            raise ConfigError(
                f"{path} does not fit the model: {key} is {shapes[0]} there and {shapes[1]} here; "
                "give the model the options that it was trained with"
            )
    model.load_state_dict(state)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FormatError(f"{path} is not a safetensors file, or damaged: {error}") from error


def _check_names(path: Path, state: Iterable[str], own: Iterable[str]) -> None:
    missing, unexpected = sorted({*own} - {*state}), sorted({*state} - {*own})
    wrong = [
        f"{what} {', '.join(keys[:3])}" + f" and {len(keys) - 3} more" * (len(keys) > 3)
        for what, keys in (("it lacks", missing), ("the model has no", unexpected))
        if keys
    ]
    if wrong:
        raise ConfigError(f"{path} does not fit the model: {'; '.join(wrong)}")


def _check_tensors(state: Mapping[str, Any]) -> None:
    for key, each in state.items():
        if not isinstance(each, Tensor):
            raise ConfigError(
                f"{key} of the model's state is a {type(each).__name__}, and safetensors files "
                "hold tensors only: make it a buffer"
            )


def _separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each with memory of its own: weights that layers share are repeated."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, each in state.items():
        place = each.untyped_storage().data_ptr()
        separate[key] = each.clone() if place in seen else each
        separate[key] = separate[key].contiguous()
        seen.add(place)
    return separate
