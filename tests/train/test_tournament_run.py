"""Tournaments of runs: folders, samples, going on, who has won."""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import hyperslab as hs
from hyperslab.errors import CommError, ConfigError
from hyperslab.io import open as open_files
from hyperslab.train.config import TournamentConfig
from hyperslab.train.process import CAN_GO_ON
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run
from hyperslab.train.tournament.figure import ancestry
from hyperslab.train.tournament.run import check_tournament
from hyperslab.train.tournament.settings import with_values
from hyperslab.train.tournament.shares import divide

SETTINGS = [
    "model.options={size = 16, base_channels = 1, dropout = 0.2, batch_norm = true}",
    "data.batch_size=1",
    "data.validation=0.25",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "train.epochs=3",
    "run.log_every=1",
    "run.tensorboard=false",
    "tournament.trainers=2",
    "tournament.every=2",
    "tournament.held_out=0.3",
    'tournament.ranges={"optimizer.lr" = [1e-4, 1e-2], schedule.power = [1, 2]}',
]


def configured(folder, files, *changes):
    """Eight cubes: two are for validation, two of each trainer's three to train on."""
    return read_config(
        "cosmoflow-64",
        [f"data.files={files['cosmo']}", f"run.folder={folder}", *SETTINGS, *changes],
    )


def matches(folder):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return sorted(lines, key=lambda line: (line["number"], line["trainer"]))


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.ranks(2)
def test_a_tournament_leaves_a_folder_for_each_trainer_and_the_weights_of_the_winner(
    files, tmp_path
):
    hs.init()
    outcome = run(configured(tmp_path / "run", files))
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    best = min(summary["trainers"], key=lambda each: each["score"])
    assert summary["winner"] == best["trainer"]
    assert summary["state"].startswith(f"finished: trainer {best['trainer']} of 2 has the best")
    assert_equal_bits(weights(folder), weights(folder / f"trainer-{best['trainer']}"))
    assert outcome.summary["winner"] == best["trainer"]
    lines = matches(folder)
    assert [(line["number"], line["trainer"]) for line in lines] == [
        (number, trainer) for number in (1, 2, 3) for trainer in (0, 1)
    ]
    assert all(1e-4 <= line["values"]["optimizer.lr"] <= 1e-2 for line in lines)
    assert (folder / "figures" / "tournament.png").read_bytes().startswith(b"\x89PNG")
    for trainer in (0, 1):
        assert json.loads((folder / f"trainer-{trainer}" / "summary.json").read_text())["step"] == 6


@pytest.mark.ranks(2)
def test_a_tournament_goes_on_bit_for_bit_after_it_was_stopped(files, tmp_path):
    """Both from the last match after which both have a checkpoint."""
    hs.init()
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    changes = ["run.figures=false", "data.validation=0", "train.epochs=2"]
    run(configured(straight, files, *changes))
    run(configured(stopped, files, *changes, "train.steps=3"))
    with pytest.raises(ConfigError, match="holds a tournament that reached step 3: continue it"):
        run(configured(stopped, files, *changes))
    run(configured(stopped, files, *changes), resume=True)
    assert matches(stopped) == matches(straight)
    for trainer in (0, 1):
        place = f"trainer-{trainer}"
        assert_equal_bits(weights(stopped / place), weights(straight / place))


@pytest.mark.ranks(4)
@pytest.mark.slow
def test_trainers_of_unlike_meshes_play(files, tmp_path):
    hs.init()
    meshes = "tournament.meshes=[{depth = 2}, {height = 2}]"
    outcome = run(configured(tmp_path, files, meshes, "run.figures=false"))
    assert outcome.summary["state"].startswith("finished")
    assert any(line["adopted"] for line in matches(tmp_path))


@pytest.mark.ranks(2)
def test_a_trainer_whose_loss_is_nan_loses_and_goes_on(files, tmp_path):
    hs.init()
    changes = [
        "tournament.ranges={}",
        'tournament.values={"optimizer.lr" = [1e300, 1e-4]}',
        "optimizer.name=sgd",
        "run.figures=false",
    ]
    run(configured(tmp_path, files, *changes))
    first, second = matches(tmp_path)[:2]
    assert (first["own"], first["adopted"], second["adopted"]) == (None, True, False)
    assert first["values"]["optimizer.lr"] == 1e-4
    assert all(torch.isfinite(weight).all() for weight in weights(tmp_path / "trainer-0").values())


# Before anything starts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('tournament.ranges={"optimizer.learning_rate" = [1, 2]}',
         "'optimizer.learning_rate' is no setting that can change while a model is trained; did "
         "you mean 'optimizer.lr'"),
        ('tournament.ranges={"optimizer.lr" = [0.1, 0.01]}', "goes from 0.1 to 0.01, but its low"),
        ('tournament.ranges={"optimizer.lr" = [-0.1, 0.01]}', "optimizer.lr must be above 0, got"),
        ('tournament.ranges={"optimizer.lr" = 0.1}', "must be the lowest and the highest value"),
        ('tournament.values={"optimizer.lr" = [0.1, 0.2, 0.3]}', "a number for each of 2 trainers"),
        ("tournament.method=ladder", "tournament.method must be one of pairs, population"),
        ('tournament.carry=["weights"]', "tournament.carry must be one of optimizer, step, rng"),
        ("tournament.perturb=0.5", "tournament.perturb must be at least 1, got 0.5"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_played_are_told_before_anything_starts(change, said, files):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        check_tournament(configured("nowhere", files, change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tournament.held_out=1", "tournament.held_out must be from 0 to below 1, got 1.0"),
        ("tournament.every=0", "tournament.every must be at least 1, got 0"),
        ("tournament.meshes=[{depth = 2}]", "1 meshes for 2 trainers: give one for each"),
        ("tournament.meshes=[{deep = 2}, {depth = 2}]", r"tournament.meshes\[0\] has deep = 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, said, files):
    with pytest.raises(ConfigError, match=said):
        configured("nowhere", files, change)


@pytest.mark.ranks(2)
def test_bad_input_stops_all_trainers_with_one_line(files, tmp_path):
    hs.init()
    with pytest.raises(ConfigError, match="2 ranks cannot be divided evenly among trainers = 3"):
        run(configured(tmp_path / "a", files, "tournament.trainers=3"))
    with pytest.raises(ConfigError, match=r"tournament.held_out = 0.0 of 3 samples holds none out"):
        run(configured(tmp_path / "b", files, "tournament.held_out=0"))
    with pytest.raises((ConfigError, CommError), match="needs 2 ranks, but there is 1"):
        run(configured(tmp_path / "c", files, "tournament.meshes=[{depth = 2}, {sample = 1}]"))


def test_hyperparameters_are_settings_of_the_configuration(files):
    config = configured("nowhere", files, "optimizer.options={betas = [0.9, 0.99]}")
    values = {"optimizer.options.betas.1": 0.5, "train.clip": 2.0, "optimizer.options.eps": 1e-3}
    changed = with_values(config, values)
    assert changed.optimizer.options == {"betas": (0.9, 0.5), "eps": 1e-3}
    assert changed.train.clip == 2.0


# Samples


@pytest.mark.parametrize("method", ["pairs", "population"])
def test_shares_and_what_is_held_out_have_no_sample_in_common(method, files):
    whole = open_files(files["cosmo"], preset="cosmoflow")
    config = TournamentConfig(trainers=3, method=method, held_out=0.3)
    parts = [divide(config, 0, trainer, whole) for trainer in range(3)]
    trained = [set(places(part["train"])) for part in parts]
    held = [set(places(part["held_out"])) for part in parts]
    assert len({*map(len, trained)}) == 1
    assert sum(map(len, trained)) == len(set.union(*trained))
    assert not set.union(*trained) & set.union(*held)
    assert (len({*map(frozenset, held)}) == 1) == (method == "population")


def test_trainers_may_all_have_all_samples(files):
    whole = open_files(files["cosmo"], preset="cosmoflow")
    config = TournamentConfig(trainers=3, data="all", held_out=0.25)
    parts = [divide(config, 0, trainer, whole) for trainer in range(3)]
    assert all(places(part["train"]) == places(parts[0]["train"]) for part in parts)
    assert (len(parts[0]["train"]), len(parts[0]["held_out"])) == (6, 2)


def places(part):
    return [part.place_of(index) for index in range(len(part))]


# The picture


def test_the_ancestry_of_the_winner_leads_back_to_where_its_model_began():
    line = {"adopted": True, "partner": None}
    lines = [
        {**line, "number": 1, "step": 10, "trainer": 0, "partner": 2},
        {**line, "number": 2, "step": 20, "trainer": 1, "partner": 0},
        {**line, "number": 2, "step": 20, "trainer": 0, "partner": 1, "adopted": False},
        {**line, "number": 3, "step": 30, "trainer": 1, "partner": 0, "adopted": False},
    ]
    assert ancestry(lines, 1) == [(10, 2), (20, 0), (30, 1)]
    assert ancestry(lines, 2) == [(30, 2)]


# Deaths

STRUCK = """
import os, signal, time
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent


class Struck(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm3d(4), nn.Dropout(0.2), nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        here = f"{os.environ.get('RANK')} {self.steps}"
        if self.training and os.environ.get("STRIKE") in (here, f"all {self.steps}"):
            os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGKILL")))
        if self.training and os.environ.get("JOINS"):
            (HERE / "joined").touch()
        while os.environ.get("WAITS") == here and not (HERE / "joined").exists():
            time.sleep(0.02)
        return self.head(self.drop(self.norm(x)).mean((2, 3, 4)))
"""


def struck(folder, files, *changes):
    """A model in ``folder`` that signals strike, and the command that trains it."""
    (folder / "model.py").write_text(STRUCK)
    command = [sys.executable, "-m", "hyperslab", "train", "cosmoflow-64"]
    command += ["--folder", str(folder / "run")]
    changes = [*SETTINGS[1:], "model.name=model.py:Struck", "run.figures=false", *changes]
    for change in [f"data.files={files['cosmo']}", *changes]:
        command += ["--set", change]
    return command


def start(folder, command, **variables):
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    """What it has told; it must have ended well."""
    told = process.communicate(timeout=400)[1]
    assert process.returncode == 0, told
    return told


@pytest.mark.slow
def test_trainers_play_on_when_one_is_killed_and_it_comes_back(files, tmp_path):
    """It dies between two matches; the others finish, and --resume brings it back."""
    folder = tmp_path / "run"
    changes = ["tournament.trainers=3", "tournament.every=3", "train.epochs=12"]
    command = struck(tmp_path, files, *changes)
    told = ended(start(tmp_path, command, STRIKE="1 5"))
    assert told.count("tournament: trainer 1 ") == 1
    assert "Some trainers did not come to the end: rank 1 was killed by SIGKILL" in told
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["missing"] == [1]
    by_number = pairings(folder)
    assert {trainer for trainer, _ in by_number[1]} == {0, 1, 2}
    assert by_number[3] == by_number[4] == {(0, 2), (2, 0)}
    ended(start(tmp_path, [*command, "--resume"]))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["missing"] == []
    assert {each["step"] for each in summary["trainers"]} == {12}
    assert math.isfinite(summary["trainers"][1]["score"])


@pytest.mark.slow
def test_a_trainer_that_was_killed_joins_the_others_while_they_play(files, tmp_path):
    """The one that is left waits at its eighth step, after the match that it played alone."""
    folder = tmp_path / "run"
    command = struck(tmp_path, files, "tournament.every=3", "train.epochs=6")
    whole = start(tmp_path, command, STRIKE="1 5", WAITS="0 8")
    try:
        while whole.poll() is None and (0, None) not in pairings(folder).get(2, set()):
            time.sleep(0.05)
        back = start(tmp_path, [*command, "--trainer", "1"], JOINS="1")
        assert "Tournament: trainer 1 joins the others from step 3" in ended(back)
        ended(whole)
    finally:
        whole.kill()
    by_number = pairings(folder)
    assert by_number[1] == by_number[3] == by_number[4] == {(0, 1), (1, 0)}
    assert by_number[2] == {(0, None)}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["missing"] == []
    assert {each["step"] for each in summary["trainers"]} == {12}


def pairings(folder):
    """Who has played against whom, by the number of the match."""
    found = {}
    for line in matches(folder) if (folder / "log.jsonl").exists() else ():
        found.setdefault(line["number"], set()).add((line["trainer"], line["partner"]))
    return found


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_tournament_that_was_told_to_stop_goes_on_bit_for_bit(files, tmp_path):
    hs.init()
    (tmp_path / "model.py").write_text(STRUCK)
    model = ["model.options={}", f"model.name={tmp_path / 'model.py'}:Struck"]
    changes = [*model, "run.figures=false", "data.validation=0", "train.epochs=2"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run(configured(straight, files, *changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRIKE", "all 4")
        patch.setenv("SIGNAL", "SIGTERM")
        outcome = run(configured(stopped, files, *changes))
    assert outcome.exit_code == CAN_GO_ON
    assert {line["number"] for line in matches(stopped)} < {1, 2, 3}
    assert run(configured(stopped, files, *changes), resume=True).exit_code == 0
    assert matches(stopped) == matches(straight)
    for place in ("trainer-0", "trainer-1"):
        assert_equal_bits(weights(stopped / place), weights(straight / place))
