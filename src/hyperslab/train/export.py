"""Weights as plain safetensors files, which need no hyperslab to be read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hyperslab
from hyperslab.comm.agree import run_on_all
from hyperslab.comm.collectives import gather_pieces
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.train.checkpoint_folder import check_files, read_manifest
from hyperslab.train.checkpoint_state import TENSOR, empties, put_together
from hyperslab.train.checkpoint_tensors import read_chunks, read_index
from hyperslab.train.checkpoints import choose_step, find_checkpoints
from hyperslab.train.config import ModelConfig
from hyperslab.train.read_config import read_config
from hyperslab.train.weight_files import SHARD_NBYTES, WeightFiles, find_weights, index_path


def export_state(
    model: nn.Module,
    path: Path,
    mesh: Mesh,
    config: ModelConfig | None = None,
    *,
    shard_nbytes: int = SHARD_NBYTES,
) -> None:
    """Writes the whole ``state_dict`` of ``model``, as the plain module would have it.

    The file's metadata tells the model's name and options by ``config``. Rank 0 writes; weights
    that are cut come to it a piece at a time. More than ``shard_nbytes`` are several files.

    Collective over all ranks.
    """
    state = model.state_dict()
    _check_tensors(state)
    run_on_all(lambda: _write_pieces(state, path, mesh, config, shard_nbytes), mesh)


def _write_pieces(
    state: Mapping[str, Tensor],
    path: Path,
    mesh: Mesh,
    config: ModelConfig | None,
    shard_nbytes: int,
) -> None:
    pieces = gather_pieces(state, mesh)
    try:
        if mesh.rank == 0:
            with WeightFiles(path, state, _about(config), shard_nbytes) as files:
                for key, start, values in pieces:
                    files.write(key, start, values)
    finally:
        for _ in pieces:  # after an error too: others are about to send theirs
            pass


def export_run(
    run_folder: Path, file: Path, step: int | None = None, *, shard_nbytes: int = SHARD_NBYTES
) -> int:
    """Writes the weights of a run's checkpoint, the newest or that of ``step``, which it returns.

    One process is enough, whatever the mesh of the run: it holds one piece at a time, as some rank
    of the run held it.
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
    with torch.device("meta"):
        state = put_together(tree, empties(tree))
    _check_tensors(state)
    keys = {leaf[TENSOR]: key for key, leaf in tree.items()}
    with WeightFiles(file, state, _about(config), shard_nbytes) as files:
        for name, box, values in read_chunks({name: index[name] for name in keys}, found[step]):
            files.write(keys[name], [span.start for span in box.spans], values)
    return step


def _about(config: ModelConfig | None) -> dict[str, str]:
    """What the files tell of themselves."""
    about = {"format": "pt", "hyperslab": hyperslab.__version__}
    if config is not None:
        about |= {"model": config.name, "options": json.dumps(dict(config.options))}
    return about


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
        if find_weights(path) == index_path(path):
            listed = json.loads(index_path(path).read_text("utf-8"))["weight_map"].values()
            parts = [load_file(path.with_name(Path(name).name)) for name in sorted({*listed})]
            return {key: each for part in parts for key, each in part.items()}
        return load_file(path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, AttributeError) as error:
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
