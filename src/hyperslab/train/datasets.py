"""The samples to train, validate and test on."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import Dataset, open as open_files
from hyperslab.io.opening import find_files
from hyperslab.io.schedule import permutation
from hyperslab.store import Loader, Normalize
from hyperslab.train.config import Config, DataConfig
from hyperslab.train.preset_list import hint_for

PARTS = ("train", "validation", "test")


def open_parts(config: Config) -> dict[str, Dataset]:
    """The parts that have samples, by name.

    Samples are given to parts before they are cut into tiles, so that no two parts have tiles of
    the same sample. Files that are named for validation or test are not trained on.
    """
    data = config.data
    named = {name: getattr(data, name) for name in ("validation", "test")}
    shares = {name: part for name, part in named.items() if isinstance(part, int | float)}
    others = {name: find_files(files) for name, files in named.items() if name not in shares}
    whole = _opened(data, _files_to_train(config, others))
    parts = _split(whole, shares, config.train.seed)
    for name, paths in others.items():
        parts[name] = _opened(data, paths)
        _check_alike(name, parts[name], whole)
    if data.tile is not None:
        parts = {name: part.tiled(data.tile) for name, part in parts.items()}
    return {name: parts[name] for name in PARTS if name in parts}


def digest(part: Dataset) -> int:
    """The same for the same samples in the same order, wherever their folder lies."""
    places = (part.place_of(index) for index in range(len(part)))
    return zlib.crc32("\n".join(f"{path.name} {number}" for path, number in places).encode())


def check_same_parts(before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raises if samples that a run has learned from would now be for validation or test."""
    changed = [name for name in PARTS if before.get(name) != now.get(name)]
    if changed:
        raise ConfigError(
            f"the samples for {' and '.join(changed)} are not those that the run was begun with: "
            "data.files, data.validation, data.test, data.tile and train.seed must stay as they "
            "were, or begin anew in another folder"
        )


def make_loader(
    part: Dataset, config: Config, mesh: Mesh, *, training: bool = False, once: bool = False
) -> Loader:
    """The batches of one forward pass each: augmented and shuffled for training alone.

    What is read ``once`` is not kept in memory.
    """
    data, micro_batch = config.data, config.data.batch_size // config.train.accumulate
    return Loader(
        part,
        mesh,
        batch_size=micro_batch if training else data.eval_batch_size or micro_batch,
        shuffle=data.shuffle if training else "none",
        augment=data.augment if training else None,
        drop_last=data.drop_last and training,
        store="none" if once else data.store,
        prefetch=data.prefetch,
        seed=config.train.seed,
        normalize=_normalize(data.normalize),
        dtype=torch.float64 if config.train.precision == "fp64" else torch.float32,
        as_dict=True,
        bad_samples=data.bad_samples,
        memory_budget=data.memory_budget,
        spill_dir=data.spill_dir,
        preload=data.preload and training,
        stage_dir=data.stage_dir,
        transport=data.transport,
        threads=data.threads,
    )


def _files_to_train(config: Config, others: Mapping[str, list[Path]]) -> list[Path]:
    try:
        paths = find_files(config.data.files)
    except FormatError as error:
        if hint := hint_for(config):
            raise FormatError(f"{error}; {hint}") from error
        raise
    kept = {path.resolve(): name for name, files in others.items() for path in files}
    if len(kept) < sum(map(len, others.values())):
        raise ConfigError("data.validation and data.test name the same file: give each its own")
    left = [path for path in paths if path.resolve() not in kept]
    if not left:
        raise ConfigError(
            f"data.validation and data.test name all {len(paths)} files of data.files: there is "
            "nothing left to train on"
        )
    return left


def _opened(data: DataConfig, paths: list[Path]) -> Dataset:
    names = ("preset", "sample", "target", "axes", "stats", "format")
    given = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    found = open_files(paths, external=data.external, **given, **data.options)
    others = {
        name: open_files(pattern, external=data.external) for name, pattern in data.beside.items()
    }
    return found.beside(**others) if others else found


def _split(whole: Dataset, shares: Mapping[str, float], seed: int) -> dict[str, Dataset]:
    """Every share that is not 0 gets a sample at least."""
    drawn = permutation(len(whole), seed).tolist()
    parts: dict[str, Dataset] = {}
    for name, share in shares.items():
        num = max(1, round(share * len(whole))) if share else 0
        chosen, drawn = drawn[:num], drawn[num:]
        if chosen:
            parts[name] = whole.take(sorted(chosen))
    if not drawn:
        asked = " and ".join(f"data.{name} = {share}" for name, share in shares.items() if share)
        raise ConfigError(
            f"{asked} leave none of {len(whole)} samples to train on: add samples, or set them to 0"
        )
    return {"train": whole.take(sorted(drawn)), **parts}


def _check_alike(name: str, part: Dataset, whole: Dataset) -> None:
    if part.shape != whole.shape:
        raise ConfigError(
            f"data.{name} has samples of {part.shape}, but those to train on have {whole.shape}"
        )


def _normalize(given: str | Mapping[str, Any] | None) -> str | Normalize | None:
    if not isinstance(given, Mapping):
        return given
    try:
        return Normalize(**given)
    except TypeError as error:
        raise ConfigError(
            f"data.normalize takes scale, log1p, mean, std and from_file, got {dict(given)}"
        ) from error
