"""The samples to train, validate and test on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io import Dataset, open as open_files
from hyperslab.io.opening import find_named_files, open_target
from hyperslab.io.pairing import BY_ORDER, NamedFile, pair_files
from hyperslab.io.schedule import permutation
from hyperslab.store import Loader, Normalize
from hyperslab.train.config import Config, DataConfig
from hyperslab.train.preset_list import hint_for

PARTS = ("train", "validation", "test", "held_out")


Divide = Callable[[Dataset], dict[str, Dataset]]
"""What makes several parts of the samples to train on."""


def open_parts(config: Config, divide: Divide | None = None) -> dict[str, Dataset]:
    """The parts that have samples, by name; ``divide`` may make more of those to train on.

    Samples are given to parts before they are cut into tiles, so that no two parts have tiles of
    the same sample. Files that are named for validation or test are not trained on.
    """
    data = config.data
    named = {name: getattr(data, name) for name in ("validation", "test")}
    shares = {name: part for name, part in named.items() if isinstance(part, int | float)}
    others = {name: find_named_files(part) for name, part in named.items() if name not in shares}
    files = {"train": _files_to_train(config, others), **others}
    partners = _partners(data, files)
    whole = _opened(data, files["train"], partners["train"])
    parts = _split(whole, shares, config.train.seed)
    for name in others:
        parts[name] = _opened(data, files[name], partners[name])
        _check_alike(name, parts[name], whole)
    if divide is not None:
        parts |= divide(parts["train"])
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


def _files_to_train(config: Config, others: Mapping[str, list[NamedFile]]) -> list[NamedFile]:
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


Partners = dict[str, list[Path]]
"""The files beside those of a part, in their order, by the name of the array."""


def _partners(data: DataConfig, files: Mapping[str, list[NamedFile]]) -> dict[str, Partners]:
    """The files of targets that belong to each part's files, by name.

    Parts whose targets lie in one place share its files: none of them may be left over.
    """
    found: dict[str, Partners] = {part: {} for part in files}
    for name in data.beside:
        for pattern, parts in _places(data, name, files).items():
            if data.pair_by == BY_ORDER and len(parts) > 1:
                raise ConfigError(
                    f"data.pair_by = {BY_ORDER!r} does not tell which of {pattern} belong to "
                    f"{' and which to '.join(parts)}: give data.{parts[1]}_beside its own"
                )
            paths = iter(_paired(data, name, pattern, {part: files[part] for part in parts}))
            for part in parts:
                found[part][name] = list(islice(paths, len(files[part])))
    return found


def _paired(
    data: DataConfig, name: str, pattern: str, files: Mapping[str, list[NamedFile]]
) -> list[Path]:
    """The partners of the files of several parts, one after the other."""
    together = [file for of_part in files.values() for file in of_part]
    others = find_named_files(pattern)
    try:
        return pair_files(together, others, name, data.pair_by, setting="data.pair_by")
    except ConfigError as error:
        *_, last = files
        hint = f"; those of {last} alone are named by data.{last}_beside" if len(files) > 1 else ""
        raise ConfigError(f"data.beside: {error}{hint}") from error


def _places(data: DataConfig, name: str, parts: Iterable[str]) -> dict[str, list[str]]:
    """The parts whose targets called ``name`` lie in the files of each pattern."""
    own = {"validation": data.validation_beside, "test": data.test_beside}
    found: dict[str, list[str]] = {}
    for part in parts:
        found.setdefault(own.get(part, {}).get(name, data.beside[name]), []).append(part)
    return found


def _opened(data: DataConfig, files: Sequence[NamedFile], partners: Partners) -> Dataset:
    names = ("preset", "sample", "target", "stats", "format")
    given = {name: getattr(data, name) for name in names if getattr(data, name) is not None}
    axes, of_partners = _split_axes(data, partners)
    paths = [file.path for file in files]
    found = open_files(paths, axes=axes, external=data.external, **given, **data.options)
    others = {
        name: open_target(paths, found.spec, of_partners.get(name), external=data.external)
        for name, paths in partners.items()
    }
    return found.beside(by=BY_ORDER, **others) if others else found


def _split_axes(
    data: DataConfig, partners: Partners
) -> tuple[str | Mapping[str, str] | None, Mapping[str, str]]:
    """The axes of arrays in the files themselves, and of those beside them."""
    if not isinstance(data.axes, Mapping):
        return data.axes, {}
    here = {name: letters for name, letters in data.axes.items() if name not in partners}
    beside = {name: letters for name, letters in data.axes.items() if name in partners}
    return here or None, beside


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
