import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError, FormatError, HyperslabError
from hyperslab.synth import Climate, Collisions, Universes, produce
from hyperslab.synth.production import make_file

UNIVERSES = Universes(size=8, count=4)


def test_files_of_others_are_not_overwritten_unasked(tmp_path):
    with h5py.File(tmp_path / "cosmo_000002.h5", "w") as file:
        file["full"] = 1
    with pytest.raises(ConfigError, match="was not made by this command"):
        produce(UNIVERSES, tmp_path)
    with h5py.File(tmp_path / "cosmo_000002.h5", "w") as file:
        file.attrs["made_with"] = 7
    with pytest.raises(ConfigError, match="was not made by this command"):
        produce(UNIVERSES, tmp_path)
    (tmp_path / "cosmo_000001.h5").write_bytes(b"not hdf5")
    with pytest.raises(FormatError, match=r"cosmo_000001.h5 exists and cannot be read"):
        produce(UNIVERSES, tmp_path)


def test_a_truncated_file_is_noticed(tmp_path):
    produce(UNIVERSES, tmp_path)
    path = tmp_path / "cosmo_000000.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="cannot be read"):
        produce(UNIVERSES, tmp_path)


RECIPES = [
    Universes(size=16, count=3),
    Collisions(shape=(16, 24), count=7, per_file=3),
    Climate(shape=(24, 32), count=3),
]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.every(3)
@dataclass(frozen=True)
class Broken:
    """Files of which the second cannot be made."""

    how: str
    num_files: int = 3
    memory_nbytes: int = 1

    def file_name(self, index):
        return f"broken_{index}.h5"

    def file_nbytes(self, index):
        return 1000

    def settings(self, index):
        return {"index": index}

    def fill(self, file, index):
        file["x"] = np.zeros(1000)
        if index == 1 and self.how == "raises":
            raise ConfigError("no second file")
        if index == 1 and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 1 and self.how == "fills the disk":
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_files_are_the_same_bytes_whoever_makes_them(recipe, tmp_path):
    produce(recipe, tmp_path / "one")
    produce(recipe, tmp_path / "two", jobs=2)
    make_file(recipe, tmp_path, 1)
    assert len(contents(tmp_path / "one")) == recipe.num_files
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    name = recipe.file_name(1)
    assert (tmp_path / name).read_bytes() == contents(tmp_path / "one")[name]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_files_take_the_space_that_was_foretold(recipe, tmp_path):
    produce(recipe, tmp_path)
    for index in range(recipe.num_files):
        size = (tmp_path / recipe.file_name(index)).stat().st_size
        assert size <= recipe.file_nbytes(index) <= size + 2**14


def test_seeds_and_numbers_make_different_universes(tmp_path):
    produce(UNIVERSES, tmp_path / "a")
    produce(Universes(size=8, count=4, seed=1), tmp_path / "b")
    arrays = []
    for path in [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]:
        with h5py.File(path) as file:
            arrays.append(file["full"][:].tobytes())
    assert len(set(arrays)) == 8


def test_whole_files_are_kept_and_missing_ones_made(tmp_path):
    produce(UNIVERSES, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "cosmo_000001.h5").unlink()
    told = []
    report = produce(UNIVERSES, tmp_path, on_progress=lambda *numbers: told.append(numbers))
    assert (report.made, report.kept) == (1, 3)
    assert told == [(3, 4), (4, 4)]
    assert contents(tmp_path) == before


def test_more_files_can_be_added_later(tmp_path):
    produce(Universes(size=8, count=2), tmp_path)
    assert produce(UNIVERSES, tmp_path).made == 2


def test_files_made_with_other_settings_are_not_taken_for_ours(tmp_path):
    produce(UNIVERSES, tmp_path)
    with pytest.raises(ConfigError, match=r"cosmo_000000.h5 was made with seed=0, not seed=5"):
        produce(Universes(size=8, count=4, seed=5), tmp_path)
    report = produce(Universes(size=8, count=4, seed=5), tmp_path, overwrite=True)
    assert report.made == 4


def test_a_disk_that_is_too_small_is_noticed_before_the_first_file(tmp_path, monkeypatch):
    disk = namedtuple("disk", ["f_bavail", "f_frsize"])
    monkeypatch.setattr("os.statvfs", lambda path: disk(256, 4096))
    with pytest.raises(FormatError, match=r"has too little room: .* 1.0 MiB are free"):
        produce(UNIVERSES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.every(3)
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "no second file"), ("fills the disk", "the disk is full: .*broken_1.h5")],
)
def test_a_file_that_fails_leaves_nothing_behind(how, words, jobs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # where a new process finds this module
    with pytest.raises(HyperslabError, match=words):
        produce(Broken(how), tmp_path, jobs=jobs)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "broken_1.h5").exists()


def test_a_process_that_is_killed_is_named_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(HyperslabError, match="ended too early, as happens when memory runs out"):
        produce(Broken("dies"), tmp_path, jobs=2)
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".cosmo_000000.h5.0123456789ab.part").write_bytes(b"half")
    produce(UNIVERSES, tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_and_leaves_whole_files_only(tmp_path):
    command = "from hyperslab.cli.main import main; main()"
    options = ["data", "synth", "cosmo", "--size", "64", "--count", "500", "--jobs", "2"]
    run = subprocess.Popen(
        [sys.executable, "-c", command, *options, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts jobs in the background makes them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("cosmo_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert not list(tmp_path.glob(".*"))
    for path in tmp_path.iterdir():
        with h5py.File(path) as file:
            assert file["full"].shape == (64, 64, 64, 4)
