"""The samples to train, validate and test on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import Dataset, open as open_files
from hyperslab.io.finding import find_named_files
from hyperslab.io.manifest import SourceFile
from hyperslab.io.pairing import BY_ORDER, BY_ROW
from hyperslab.io.sharing import as_seen_here
from hyperslab.io.targets import Targets
from hyperslab.store import Loader, Normalize
from hyperslab.train.config import Config, DataConfig
from hyperslab.train.labelled import take_labelled
from hyperslab.train.preset_list import hint_for
from hyperslab.train.task import Roles

PARTS = ("train", "validation", "test", "held_out")


Divide = Callable[[Dataset], dict[str, Dataset]]
"""What makes several parts of the samples to train on."""


def open_parts(
    config: Config, mesh: Mesh | None = None, divide: Divide | None = None
) -> dict[str, Dataset]:
    """The parts that have samples, by name; ``divide`` may make more of those to train on.

    Samples are given to parts before they are cut into tiles, so that no two parts have tiles of
    the same sample. Files that are named for validation or test are not trained on. Rank 0 of
    ``mesh`` looks at the files for all. Collective over its ranks.
    """
    if mesh is None or mesh.num_ranks == 1:
        return _parts(config, divide)
    found = mesh.ask_first(
        lambda: {name: part.manifest for name, part in _parts(config, divide).items()}
    )
    return {name: Dataset(as_seen_here(manifest)) for name, manifest in found.items()}


def _parts(config: Config, divide: Divide | None) -> dict[str, Dataset]:
    data = config.data
    named = {name: getattr(data, name) for name in ("validation", "test")}
    shares = {name: part for name, part in named.items() if isinstance(part, int | float)}
    others = {name: find_named_files(part) for name, part in named.items() if name not in shares}
    files = {"train": _files_to_train(config, others), **others}
    opened: dict[str, Dataset] = {}
    for together in _groups(data, files):
        opened |= _opened(data, {part: files[part] for part in together})
    parts = _split(opened["train"], shares, config.train.seed)
    parts["train"] = _labelled(parts["train"], config)
    for name in others:
        parts[name] = opened[name]
        _check_alike(name, parts[name], opened["train"])
    if divide is not None:
        parts |= divide(parts["train"])
    if data.tile is not None:
        parts = {name: part.tiled(data.tile) for name, part in parts.items()}
    return {name: parts[name] for name in PARTS if name in parts}


def _labelled(part: Dataset, config: Config) -> Dataset:
    """The samples whose labels are to be used; tiles of a sample go together."""
    classes = None
    if config.task.kind == "classification" and config.data.labelled_fraction < 1:
        classes = Roles.of(part, config.task).target
    fraction, seed = config.data.labelled_fraction, config.train.seed
    return take_labelled(part, fraction, seed, classes=classes)


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


def _files_to_train(config: Config, others: Mapping[str, list[SourceFile]]) -> list[SourceFile]:
    try:
        found = find_named_files(config.data.files)
    except FormatError as error:
        if hint := hint_for(config):
            raise FormatError(f"{error}; {hint}") from error
        raise
    kept = {file.path.resolve() for files in others.values() for file in files}
    if len(kept) < sum(map(len, others.values())):
        raise ConfigError("data.validation and data.test name the same file: give each its own")
    left = [file for file in found if file.path.resolve() not in kept]
    if not left:
        raise ConfigError(
            f"data.validation and data.test name all {len(found)} files of data.files: there is "
            "nothing left to train on"
        )
    return left


def _groups(data: DataConfig, files: Mapping[str, object]) -> list[list[str]]:
    """The parts whose targets lie in the same files: together they leave none of these over."""
    own = {"validation": data.validation_beside, "test": data.test_beside}
    groups: dict[tuple[str, ...], list[str]] = {}
    for part in files:
        beside = {**data.beside, **own.get(part, {})}
        groups.setdefault(tuple(beside.values()), []).append(part)
    if data.pair_by in (BY_ORDER, BY_ROW):
        for places, (first, *more) in groups.items():
            if places and more:
                raise ConfigError(
                    f"data.pair_by = {data.pair_by!r} does not tell which of {places[0]} belong to "
                    f"{first} and which to {' and which to '.join(more)}: give "
                    f"data.{more[0]}_beside its own"
                )
    return list(groups.values())


def _opened(data: DataConfig, files: Mapping[str, Sequence[SourceFile]]) -> dict[str, Dataset]:
    """Parts whose targets lie in the same files."""
    *_, last = files
    own = getattr(data, f"{last}_beside", {})
    names = ("preset", "sample", "target", "stats", "format")
    given = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    axes, of_targets = _split_axes(data)
    paths = [file for of_part in files.values() for file in of_part]
    whole = open_files(paths, axes=axes, external=data.external, **given, **data.options)
    targets = Targets(
        beside={**data.beside, **own},
        pair_by=data.pair_by,
        columns=data.columns,
        key=data.key,
        attributes=data.attributes,
    )
    try:
        whole = targets.put_beside(
            whole, of_targets, external=data.external, setting="data.pair_by"
        )
    except ConfigError as error:
        hint = f"; those of {last} alone are named by data.{last}_beside" if len(files) > 1 else ""
        raise ConfigError(f"data.beside: {error}{hint}") from error
    return _by_part(whole, files)


def _by_part(whole: Dataset, files: Mapping[str, Sequence[SourceFile]]) -> dict[str, Dataset]:
    """The samples in the files of each part."""
    if len(files) == 1:
        return dict.fromkeys(files, whole)
    ends = np.cumsum([len(of_part) for of_part in files.values()])
    part_of = np.searchsorted(ends, whole.manifest.places[:, 0, 0], side="right")
    return {
        name: whole.take(np.flatnonzero(part_of == number)) for number, name in enumerate(files)
    }


def _split_axes(
    data: DataConfig,
) -> tuple[str | Mapping[str, str] | None, Mapping[str, str]]:
    """The axes of arrays in the files themselves, and of those beside them."""
    if not isinstance(data.axes, Mapping):
        return data.axes, {}
    here = {name: letters for name, letters in data.axes.items() if name not in data.beside}
    beside = {name: letters for name, letters in data.axes.items() if name in data.beside}
    return here or None, beside


def _split(whole: Dataset, shares: Mapping[str, float], seed: int) -> dict[str, Dataset]:
    asked = {name: share for name, share in shares.items() if share}
    if len(whole) <= len(asked):
        words = " and ".join(f"data.{name} = {share}" for name, share in asked.items())
        raise ConfigError(
            f"{words} leave none of {len(whole)} samples to train on: add samples, or set them to 0"
        )
    return whole.split(seed=seed, **asked, train=1 - sum(asked.values()))


def _check_alike(name: str, part: Dataset, whole: Dataset) -> None:
    part.reader(0, part.spec.name)  # raises if it is not like the first of those beside it
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
