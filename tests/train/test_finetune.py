"""The encoder of a pre-trained run with a head: what it takes from the run, and from where."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyperslab.errors import ConfigError
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

ALIKE = [
    "data.batch_size=3",
    "data.validation=0.2",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "optimizer.name=sgd",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]
KINDS = {
    "conv": (
        ["autoencoder-conv", "model.options={channels = [4, 4], activation = 'elu'}"],
        "cosmo",
        [
            "finetune.hidden=[6]",
            "finetune.standardize=true",
            "finetune.pool=moments",
            "finetune.encoder_rate=0.3",
        ],
    ),
    "dense": (
        ["autoencoder-dense", "model.options={inputs = 12288, hidden = [8, 6], tied = true}"],
        "images",
        ["task.kind=classification", "task.names=[]", "finetune.outputs=10"],
    ),
}
MESHES = [{"sample": 2}, {"height": 2}, {"channel": 2}, {"channel": 2, "sample": 2}]


@pytest.fixture(scope="module")
def pretrained(files, tmp_path_factory):
    """Folders of pre-trained runs, by kind."""
    found = {}
    for kind, ((preset, *changes), data, _) in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind) / "pretrained"
        where = [f"data.files={files[data]}", f"run.folder={found[kind]}"]
        stages = ["stages.epochs=1", "train.epochs=1", "stages.kl=0"]
        run(read_config(preset, [*ALIKE, *changes, *stages, *where]))
    return found


def tune(kind, pretrained, folder, *changes, axes=(), resume=False):
    mesh = [f"mesh.{axis}={num}" for axis, num in dict(axes).items()]
    found = [f"finetune.run={pretrained[kind]}", f"run.folder={folder}", "train.epochs=2"]
    asked = [
        *ALIKE,
        "data.labelled_fraction=0.9",
        *KINDS[kind][2],
        *found,
        "train.evaluate_every=1",
        *mesh,
        *changes,
    ]
    return run(read_config("finetune", asked), resume=resume)


def numbers(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {f"{line['kind']} {line['step']}": line["loss"] for line in lines}


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(pretrained, tmp_path_factory):
    found = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in KINDS}
    for kind, folder in found.items():
        tune(kind, pretrained, folder)
    return found


def test_model_data_and_seed_are_those_of_the_run(pretrained):
    before = read_config(str(pretrained["dense"]))
    config = read_config("finetune", [f"finetune.run={pretrained['dense']}"])
    assert config.model == before.model
    assert config.data.files == before.data.files
    assert config.data.labelled_fraction == 0.05
    assert config.train.precision == "fp64"
    own = read_config("finetune", [f"finetune.run={pretrained['dense']}", "data.files=a.h5"])
    assert own.data.files == "a.h5"


def test_a_file_of_ones_own_may_say_no_more_than_what_is_new(pretrained, tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(
        f'[finetune]\nrun = "{pretrained["conv"]}"\noutputs = 4\n[data]\nlabelled_fraction = 0.5\n'
    )
    config = read_config(path)
    assert config.model == read_config(str(pretrained["conv"])).model
    assert config.data.labelled_fraction == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_encoder_stays_that_of_the_run(kind, pretrained, tmp_path):
    tune(kind, pretrained, tmp_path / "run", "finetune.frozen=true")
    before, after = weights(pretrained[kind]), weights(tmp_path / "run")
    encoder = [key for key in after if key.startswith("encoder.")]
    assert len(encoder) == 4
    assert all(torch.equal(before[key], after[key]) for key in encoder)
    assert any(key.startswith("head.") for key in after)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_that_is_not_frozen_learns_too(kind, pretrained, alone):
    before, after = weights(pretrained[kind]), weights(alone[kind])
    assert not torch.equal(before["encoder.0.0.weight"], after["encoder.0.0.weight"])
    torch.testing.assert_close(
        before["encoder.0.0.weight"], after["encoder.0.0.weight"], rtol=0, atol=0.05
    )


@pytest.fixture
def expected(alone, kind):
    return alone[kind]


@pytest.mark.every(4)
@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(axes, kind, pretrained, tmp_path, expected):
    tune(kind, pretrained, tmp_path / "run", axes=axes)
    assert numbers(tmp_path / "run") == pytest.approx(numbers(expected), rel=1e-10)
    torch.testing.assert_close(weights(tmp_path / "run"), weights(expected), rtol=1e-10, atol=1e-10)


def test_a_stopped_run_goes_on_without_the_pretrained_one(pretrained, alone, tmp_path):
    copied = {"conv": tmp_path / "copy"}
    shutil.copytree(pretrained["conv"], copied["conv"])
    tune("conv", copied, tmp_path / "run", "train.steps=2")
    saved = str(tmp_path / "run")
    shutil.rmtree(copied["conv"])
    run(read_config(saved, ["train.steps=none"]), resume=True)
    assert weights(tmp_path / "run").keys() == weights(alone["conv"]).keys()
    for key, theirs in weights(alone["conv"]).items():
        assert torch.equal(weights(tmp_path / "run")[key], theirs)


def test_from_scratch_needs_no_run(files, tmp_path):
    asked = [*ALIKE, f"data.files={files['cosmo']}", f"run.folder={tmp_path / 'run'}"]
    small = ["model.options={channels = [4, 4]}", "train.epochs=1", "data.labelled_fraction=1"]
    outcome = run(read_config("finetune", [*asked, *small, "finetune.from_scratch=true"]))
    assert outcome.summary["state"] == "finished"


def refused(pretrained, folder, words, *changes, kind="conv"):
    with pytest.raises(ConfigError, match=words):
        tune(kind, pretrained, folder, *changes)
    assert not folder.exists()


def test_what_does_not_fit_is_told_before_anything_is_written(pretrained, tmp_path, files):
    folder = tmp_path / "run"
    refused(pretrained, folder, "conv.0.*|encoder.0.0.weight is 4x4x4x4x4 float64 there and 8x4",
            "model.options.channels=[8, 4]")  # fmt: skip
    refused(pretrained, folder, "float64 there and .* float32 here", "train.precision=fp32")
    refused(pretrained, folder, "cannot take samples of 3x64x64", f"data.files={files['images']}",
            "data.preset=images", "task.kind=classification", "finetune.outputs=10")  # fmt: skip
    refused(pretrained, folder, "which the last batch of 4 by 3 has", "data.labelled_fraction=0.7")
    refused(pretrained, folder, "2 labels|labelled_fraction = 0.01 of 6 samples",
            "data.labelled_fraction=0.01")  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("encoder_rate=0", "encoder_rate must be above 0, got 0.0: .* finetune.frozen"),
        ("pool=max", "finetune.pool must be one of mean, moments, got 'max'"),
    ],
)
def test_what_a_head_cannot_do_is_told(asked, words):
    with pytest.raises(ConfigError, match=words):
        read_config("finetune", [f"finetune.{asked}"])


def test_a_lower_rate_of_the_encoder_keeps_it_closer_to_what_it_was(pretrained, tmp_path):
    """One step further than the first, in which a head of zeros gives the encoder no gradients."""
    changes = ("finetune.hidden=[]", "train.steps=2")
    moved = {}
    for rate in (1.0, 0.25):
        folder = tmp_path / str(rate)
        tune("conv", pretrained, folder, *changes, f"finetune.encoder_rate={rate}")
        before, after = weights(pretrained["conv"]), weights(folder)
        moved[rate] = after["encoder.0.0.weight"] - before["encoder.0.0.weight"]
    assert moved[1.0].abs().max() > 0
    torch.testing.assert_close(moved[0.25], 0.25 * moved[1.0], rtol=1e-6, atol=1e-12)


def test_a_missing_run_is_told_by_the_key_to_set(files, tmp_path):
    with pytest.raises(ConfigError, match=r"finetune.run = 'runs/nowhere' is not the folder"):
        read_config("finetune", ["finetune.run=runs/nowhere"])
    asked = [f"data.files={files['cosmo']}", "mesh.device=cpu", "data.labelled_fraction=1"]
    with pytest.raises(ConfigError, match=r"finetune.run is not set: .*--set finetune.run=runs"):
        run(read_config("finetune", [*asked, f"run.folder={tmp_path / 'run'}"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text(
        f'base = "autoencoder-conv"\n[data]\nfiles = "{files["cosmo"]}"\n'
    )
    with pytest.raises(ConfigError, match="there are no checkpoints in it"):
        run(read_config("finetune", [f"finetune.run={tmp_path / 'empty'}", *asked]))


def test_other_held_back_samples_than_those_of_the_run_are_told(pretrained, tmp_path, capsys):
    tune("conv", pretrained, tmp_path / "run", "train.seed=3")
    assert "are not those that" in capsys.readouterr().err
    tune("conv", pretrained, tmp_path / "same")
    assert "are not those that" not in capsys.readouterr().err
    assert Path(tmp_path / "same" / "summary.json").exists()
