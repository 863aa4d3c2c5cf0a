"""Loaders that differ from rank to rank, and files that differ from time to time."""

import os
import shutil

import numpy as np
import pytest
import torch.distributed as dist

import hyperslab as hs


@pytest.fixture
def folder(tmp_path):
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", np.ones((1, 8, 4), np.float32))
    return tmp_path


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("augment", [None, "flip"]),
        ("normalize", ["log1p", None]),
        ("prefetch", [1, 2]),
        ("store", ["none", "memory"]),
        ("bad_samples", ["stop", "skip"]),
        ("cuts", [{"height": [0, 3, 8]}, {"height": [0, 4, 8]}]),
        ("as_dict", [True, False]),
    ],
)
def test_arguments_that_differ_are_told_on_all_ranks(name, values, folder):
    mesh = hs.init(height=2, device="cpu")
    loader = hs.Loader(hs.open(folder / "*.npy", axes="CHW"), mesh, **{name: values[mesh.rank]})
    with pytest.raises(hs.CommError, match=f"loaders differ in {name}: rank 0 has .*, rank 1 has"):
        next(iter(loader))


@pytest.mark.ranks(2)
def test_other_files_are_told_on_all_ranks(folder):
    mesh = hs.init(height=2, device="cpu")
    paths = sorted(folder.glob("*.npy"))
    loader = hs.Loader(hs.open(paths if mesh.rank else paths[::-1], axes="CHW"), mesh)
    with pytest.raises(
        hs.CommError, match=r"order: where rank 0 has .*/3\.npy, rank 1 has .*/0\.npy"
    ):
        next(iter(loader))


def on_own_disk(folder, rank):
    """A copy of the folder for each rank, as on nodes with disks of their own."""
    own = folder / f"node{rank}"
    own.mkdir()
    for path in sorted(folder.glob("*.npy")):
        shutil.copy2(path, own / path.name)
    return own


def remove(path):
    path.unlink()


def truncate(path):
    os.truncate(path, 160)


def reshape(path):
    np.save(path, np.ones((1, 8, 5), np.float32))


def touch(path):
    os.utime(path, (0, 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove, r"rank 1 has no file 2\.npy, which rank 0 has at .*node0/2\.npy"),
        (truncate, r"node1/2\.npy is not .*: rank 0 has 256 bytes .*, rank 1 has 160 bytes"),
        (reshape, r"node1/2\.npy is not .*: rank 0 has 256 bytes .*, rank 1 has 288 bytes"),
        (touch, r"node1/2\.npy is not .*, rank 1 has 256 bytes written at 1970-01-01"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_file_that_differs_on_one_rank_is_named_on_all(damage, words, folder):
    mesh = hs.init(height=2, device="cpu")
    own = on_own_disk(folder, mesh.rank)
    if mesh.rank == 1:
        damage(own / "2.npy")
    loader = hs.Loader(hs.open(own / "*.npy", axes="CHW"), mesh)
    with pytest.raises(hs.CommError, match=words):
        next(iter(loader))


@pytest.mark.ranks(2)
def test_arrays_that_differ_are_told_with_their_file(folder):
    mesh = hs.init(height=2, device="cpu")
    own = on_own_disk(folder, mesh.rank)
    if mesh.rank == 1:
        np.save(own / "0.npy", np.ones((1, 4, 8), np.float32))
    os.utime(own / "0.npy", (0, 0))
    loader = hs.Loader(hs.open(own / "*.npy", axes="CHW"), mesh)
    words = r"rank 0 has .*float32 \(1, 8, 4\).* in 0\.npy, rank 1 has .*\(1, 4, 8\)"
    with pytest.raises(hs.CommError, match=words):
        next(iter(loader))


def replace_file(path, value):
    np.save(path.with_name("new.npy"), np.full((1, 8, 4), value, np.float32))
    path.with_name("new.npy").replace(path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("store", ["memory", "none"])
def test_a_file_replaced_after_one_rank_looked_at_it_gives_no_torn_sample(store, folder):
    mesh = hs.init(height=2, device="cpu")
    data = hs.open(folder / "*.npy", axes="CHW")
    if mesh.rank == 0:
        data.read(2)
    dist.barrier()
    if mesh.rank == 0:
        replace_file(folder / "2.npy", 2)
    dist.barrier()
    loader = hs.Loader(data, mesh, shuffle="none", store=store)
    with pytest.raises(hs.HyperslabError, match=r"changed|not the same file"):
        list(loader)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("store", ["memory", "none"])
def test_a_file_replaced_within_an_epoch_is_noticed(store, folder):
    mesh = hs.init(height=2, device="cpu")
    loader = hs.Loader(
        hs.open(folder / "*.npy", axes="CHW"), mesh, shuffle="none", store=store, prefetch=0
    )
    steps = iter(loader)
    next(steps)
    dist.barrier()
    if mesh.rank == 0:
        replace_file(folder / "3.npy", 2)
    dist.barrier()
    next(steps), next(steps)
    with pytest.raises(hs.FormatError, match=r"3\.npy has changed"):
        next(steps)


@pytest.mark.ranks(2)
def test_a_staged_copy_that_was_written_to_is_staged_anew(folder):
    mesh = hs.init(height=2, device="cpu")
    sums = []
    for _ in range(2):
        with hs.Loader(
            hs.open(folder / "*.npy", axes="CHW"), mesh, stage_dir=folder / "staged"
        ) as loader:
            sums.append(sum(float(x.sum()) for x in loader))
        dist.barrier()
        if mesh.rank == 0:
            copies = [p for p in (folder / "staged").iterdir() if p.suffix == ".npy"]
            for copy in copies:
                with copy.open("r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    file.write(b"\x7f" * 8)
        dist.barrier()
    assert sums == [128, 128]


@pytest.mark.ranks(2)
def test_cubes_turn_into_empty_pieces(cubes):
    mesh = hs.init(height=2, device="cpu")
    data = hs.open(cubes, axes="NCDHW")
    loader = hs.Loader(data, mesh, augment="cube", cuts={"height": [0, 0, 6]})
    assert sum(len(x) for x in loader) == 7
