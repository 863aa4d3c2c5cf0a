"""The samples to train, validate and test on."""

from __future__ import annotations

from collections.abc import Mapping
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
    the same sample.
    """
    data = config.data
    whole = _opened(data, data.files, config)
    named = {name: getattr(data, name) for name in ("validation", "test")}
    shares = {name: part for name, part in named.items() if isinstance(part, int | float)}
    parts = _split(whole, shares, config.train.seed)
    for name, files in named.items():
        if name not in shares and files:
            parts[name] = _opened(data, files, config)
            _check_alike(name, parts[name], whole)
    if data.tile is not None:
        parts = {name: part.tiled(data.tile) for name, part in parts.items()}
    return {name: parts[name] for name in PARTS if name in parts}


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


def _opened(data: DataConfig, files: Any, config: Config) -> Dataset:
    names = ("preset", "sample", "target", "axes", "stats", "format")
    given = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    try:
        paths = find_files(files)
    except FormatError as error:
        if hint := hint_for(config):
            raise FormatError(f"{error}; {hint}") from error
        raise
    found = open_files(paths, **given, **data.options)
    others = {name: open_files(pattern) for name, pattern in data.beside.items()}
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
