"""The encoder of a pre-trained run with a head: built, and given the run's weights, on any mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hyperslab.comm.agree import run_on_all
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import Dataset
from hyperslab.models import EncoderHead
from hyperslab.train.checkpoint_folder import Manifest, check_files, read_manifest
from hyperslab.train.checkpoint_state import TENSOR, dtype_of, shape_of
from hyperslab.train.checkpoint_tensors import read_index, read_tensors
from hyperslab.train.checkpoints import VALUES, choose_step, find_checkpoints
from hyperslab.train.config import Config
from hyperslab.train.datasets import PARTS
from hyperslab.train.stages import check_stack

ENCODER = "encoder."
"""How the names of its weights begin, in a stack and beside a head."""


def check_run_is_named(config: Config) -> None:
    asked = config.finetune
    if asked.is_asked and asked.run is None and not asked.from_scratch:
        raise ConfigError(
            "finetune.run is not set: name the folder of a pre-trained run, such as --set "
            "finetune.run=runs/autoencoder-conv (or finetune.from_scratch=true, to compare)"
        )


def with_head(model: nn.Module, config: Config, data: Dataset) -> EncoderHead:
    """The encoder of ``model`` with the head that ``config`` asks for."""
    asked = config.finetune
    size = config.data.batch_size // config.train.accumulate
    if asked.standardize and len(data) % size == 1 and not config.data.drop_last:
        raise ConfigError(
            "finetune.standardize has no variance of one sample, which the last batch of "
            f"{len(data)} by {size} has: choose another data.batch_size, or data.drop_last = true"
        )
    outputs = asked.outputs or len(config.task.names)
    if not outputs:
        raise ConfigError(
            "finetune.outputs is not set: give the number of values or classes that the head is to "
            "give, or their names in task.names"
        )
    return EncoderHead(
        check_stack(model, "[finetune] takes the encoder of"),
        data.shape,
        outputs,
        hidden=asked.hidden,
        cells=asked.cells,
        pool=asked.pool,
        standardize=asked.standardize,
        dropout=asked.dropout,
        frozen=asked.frozen,
    )


def rate_factors(config: Config) -> dict[str, float]:
    """What the learning rates of weights are multiplied by, by how their names begin."""
    return {ENCODER: config.finetune.encoder_rate} if config.finetune.is_asked else {}


def load_encoder(model: nn.Module, run: Path, mesh: Mesh) -> list[str]:
    """Gives the encoder in ``model`` the weights that ``run`` ended with, or has reached so far.

    Each rank reads its part of them, whatever the mesh of the run. Returns what the user should
    know. Collective over all ranks, and errors are the same on all.
    """
    return run_on_all(lambda: _load(model, run, mesh), mesh)


def _load(model: nn.Module, run: Path, mesh: Mesh) -> list[str]:
    folder, values = find_weights_of(run)
    manifest = read_manifest(folder)
    mine = sorted(manifest.files)[mesh.rank :: mesh.num_ranks]
    check_files(folder, {name: manifest.files[name] for name in mine})
    state = {k: v for k, v in model.state_dict().items() if k.startswith(ENCODER)}
    saved = {k: leaf for k, leaf in _tensors(manifest, folder).items() if k.startswith(ENCODER)}
    _check_alike(state, saved, run)
    tensors = {leaf[TENSOR]: state[key].detach() for key, leaf in saved.items()}
    read_tensors(tensors, read_index(folder, manifest), folder)
    return [f"The encoder is that of {run} at step {manifest.step}", *_warnings(run, values)]


def find_weights_of(run: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint with the best weights of a run's last stage, and the values of the newest."""
    if not (run / "checkpoints").is_dir():
        raise ConfigError(
            f"finetune.run = {str(run)!r} is not the folder of a run: there are no checkpoints in "
            f"it (looked from {Path.cwd()})"
        )
    found = find_checkpoints(run / "checkpoints")
    newest = found[choose_step(found, None, run)]
    values = _plain(read_manifest(newest).trees.get(VALUES, {}))
    best = values.get("standing", {}).get("best_step")
    return found.get(best, newest), values


def _plain(tree: Any) -> dict[str, Any]:
    """The values that JSON holds by itself: where the run stood."""
    return tree if isinstance(tree, dict) else {}


def _tensors(manifest: Manifest, folder: Path) -> dict[str, Mapping[str, Any]]:
    tree = manifest.trees.get("model")
    if not isinstance(tree, dict):
        raise FormatError(f"{folder} holds no model: it holds {', '.join(manifest.trees)}")
    return {k: each for k, each in tree.items() if isinstance(each, dict) and TENSOR in each}


def _check_alike(
    own: Mapping[str, Tensor], saved: Mapping[str, Mapping[str, Any]], run: Path
) -> None:
    for key in [*own, *(key for key in saved if key not in own)]:
        here = (tuple(own[key].shape), own[key].dtype) if key in own else None
        there = (shape_of(saved[key]), dtype_of(saved[key])) if key in saved else None
        if here != there:
            raise ConfigError(
                f"{run} does not fit: {key} is {_shown(there)} there and {_shown(here)} here; "
                "leave [model] out, so that it is that of the run, and train.precision too"
            )


def _shown(found: tuple[tuple[int, ...], Any] | None) -> str:
    if found is None:
        return "missing"
    return f"{'x'.join(map(str, found[0])) or 'a number'} {str(found[1]).removeprefix('torch.')}"


def _warnings(run: Path, values: Mapping[str, Any]) -> list[str]:
    if (run / "summary.json").is_file():
        state = json.loads((run / "summary.json").read_text()).get("state")
        if state and not state.startswith("stopped by"):
            return []
    stage = values.get("standing", {}).get("stage", 0)
    return [f"Warning: {run} has not come to its end: it is in stage {stage + 1}"]


def tell_unlike_parts(digests: Mapping[str, int], run: Path) -> list[str]:
    """A warning if samples that are held back here may have been learned from in ``run``."""
    _, values = find_weights_of(run)
    before = values.get("parts", {})
    unlike = [n for n in PARTS[1:] if n in digests and before.get(n) != digests[n]]
    if not unlike:
        return []
    return [
        f"Warning: the samples for {' and '.join(unlike)} are not those that {run} held back: it "
        "may have learned from them, without labels; keep train.seed and the data as they were"
    ]
