"""Whole runs: what they give, how they go on, that it does not matter how they are cut."""

import json
import os
import shutil
from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import load_file

from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.models import CosmoFlow
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

SETTINGS = [
    "model.options={size = 16, base_channels = 1, dropout = 0.2, batch_norm = true}",
    "data.batch_size=2",
    "data.validation=0",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "train.epochs=2",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]


def train(folder, files, *changes, resume=False):
    """Eight cubes, four steps an epoch."""
    changes = [f"data.files={files['cosmo']}", f"run.folder={folder}", *SETTINGS, *changes]
    return run(read_config("cosmoflow-64", changes), resume=resume)


def log(folder, kind="step"):
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    return [line["loss"] for line in log(folder)]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    """Two epochs on one process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(folder, files)
    return folder


def test_a_run_leaves_weights_scores_and_a_log(files, tmp_path):
    """Of eight cubes two are for validation: three steps an epoch."""
    folder = tmp_path / "run"
    outcome = train(folder, files, "data.validation=0.2")
    assert outcome.exit_code == 0
    assert outcome.summary["state"] == "finished"
    assert (outcome.summary["step"], outcome.summary["epoch"]) == (6, 2)
    assert json.loads((folder / "summary.json").read_text()) == outcome.summary
    assert [line["step"] for line in log(folder)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in log(folder, "scores")] == [3, 6]
    assert outcome.summary["scores"]["validation"]["mse/sigma_8"] > 0


def test_the_exported_weights_load_into_the_plain_module(straight):
    plain = CosmoFlow(size=16, base_channels=1, batch_norm=True).double()
    plain.load_state_dict(weights(straight))
    assert plain(torch.ones(2, 4, 16, 16, 16, dtype=torch.float64)).shape == (2, 4)


def check_resumed(folder, files, axes, step):
    """Stops at ``step``, goes on, and compares with a run that did not stop."""
    cut = [f"mesh.{axis}={num}" for axis, num in axes.items()]
    train(folder / "whole", files, *cut)
    train(folder / "parts", files, *cut, f"train.steps={step}")
    assert [line["step"] for line in log(folder / "parts")] == [*range(1, step + 1)]
    train(folder / "parts", files, *cut, resume=True)
    assert losses(folder / "parts") == losses(folder / "whole")
    assert_equal_bits(weights(folder / "parts"), weights(folder / "whole"))


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_was_stopped_and_goes_on_has_the_same_bits(files, tmp_path, step):
    check_resumed(tmp_path, files, {}, step)


@pytest.mark.ranks
@pytest.mark.every(4)
@pytest.mark.parametrize("axes", [{"depth": 2}, {"sample": 2}, {"channel": 2}])
def test_a_run_on_several_ranks_that_goes_on_has_the_same_bits(axes, files, tmp_path):
    check_resumed(tmp_path, files, axes, 3)


@pytest.fixture
def half(files, tmp_path):
    """A run of one process that was stopped in the middle of an epoch."""
    train(tmp_path / "half", files, "train.steps=2")
    return tmp_path / "half"


@pytest.mark.ranks
@pytest.mark.every(5)
@pytest.mark.parametrize(
    "axes", [{"depth": 2}, {"sample": 2, "height": 2}, {"channel": 2}, {"channel": 2, "depth": 2}]
)
def test_a_run_goes_on_on_another_mesh(axes, files, half, straight):
    train(half, files, *(f"mesh.{axis}={num}" for axis, num in axes.items()), resume=True)
    assert losses(half) == pytest.approx(losses(straight), rel=1e-9)
    assert_close(weights(half), weights(straight))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_sharded_weights_learn_the_same_and_go_on_replicated(files, tmp_path, straight):
    train(tmp_path / "run", files, "mesh.depth=2", "train.shard_weights=true", "train.steps=4")
    train(tmp_path / "run", files, "mesh.sample=2", resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(straight), rel=1e-9)
    assert_close(weights(tmp_path / "run"), weights(straight))


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_cut_weights_that_are_sharded_learn_the_same_and_go_on_whole(files, tmp_path, straight):
    cut = ["mesh.sample=2", "mesh.channel=2", "train.shard_weights=true"]
    train(tmp_path / "run", files, *cut, "train.steps=4")
    train(tmp_path / "run", files, "mesh.depth=4", resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(straight), rel=1e-9)
    assert_close(weights(tmp_path / "run"), weights(straight))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_cut_weights_are_clipped_and_their_passes_accumulated(files, tmp_path):
    shared = [PLAIN, "mesh.channel=2", "data.batch_size=4", "train.clip=0.05"]
    train(tmp_path / "one", files, *shared)
    train(tmp_path / "two", files, *shared, "train.accumulate=2")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    norms = [line["grad_norm"] for line in log(tmp_path / "two")]
    assert norms == pytest.approx([line["grad_norm"] for line in log(tmp_path / "one")], rel=1e-9)


PLAIN = "model.options={size = 16, base_channels = 1, dropout = 0.0}"


@pytest.mark.ranks(2)
def test_passes_that_are_accumulated_are_one_step(files, tmp_path):
    """Seven samples in batches of four: the last step of an epoch has a pass less."""
    shared = [PLAIN, "mesh.sample=2", "data.batch_size=4", "data.test=0.1", "train.clip=0.05"]
    train(tmp_path / "one", files, *shared)
    train(tmp_path / "four", files, *shared, "train.accumulate=4")
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert_close(weights(tmp_path / "four"), weights(tmp_path / "one"))
    norms = [line["grad_norm"] for line in log(tmp_path / "four")]
    assert norms == pytest.approx([line["grad_norm"] for line in log(tmp_path / "one")], rel=1e-9)


def test_activations_that_are_computed_again_change_nothing(files, tmp_path, straight):
    train(tmp_path / "run", files, 'train.checkpoint_activations=["features.*"]')
    assert_equal_bits(weights(tmp_path / "run"), weights(straight))


def test_depth_first_tiles_change_nothing_but_rounding(files, tmp_path, straight):
    train(tmp_path / "run", files, 'train.depth_first=["features.0.conv", "features.1.pool"]')
    assert_close(weights(tmp_path / "run"), weights(straight))


def test_bfloat16_is_refused_on_cpus_where_torch_has_wrong_gradients(files, tmp_path):
    with pytest.raises(ConfigError, match="'bf16' is for GPUs"):
        train(tmp_path / "run", files, "train.precision=bf16")


def test_a_run_that_gets_no_better_stops_early_and_exports_the_best(files, tmp_path):
    settings = ["data.validation=0.2", "optimizer.lr=1e-30", "train.patience=2", "train.epochs=9"]
    outcome = train(tmp_path / "run", files, PLAIN, *settings)
    assert outcome.summary["state"] == "stopped early, no better in 2 validations"
    assert outcome.summary["epoch"] < 9
    again = train(tmp_path / "run", files, PLAIN, *settings, resume=True)
    assert again.summary["step"] == outcome.summary["step"]


def test_weights_of_another_run_can_be_the_start(files, tmp_path, straight):
    train(
        tmp_path / "run", files, f"model.weights={straight}/model.safetensors", "optimizer.lr=1e-30"
    )
    assert_close(
        {k: v for k, v in weights(tmp_path / "run").items() if v.ndim > 1},
        {k: v for k, v in weights(straight).items() if v.ndim > 1},
    )


def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_checkpoint(files, tmp_path):
    words = "at step 2, with a learning rate of .* hold finite values alone: lower optimizer"
    with pytest.raises(HyperslabError, match=words):
        train(tmp_path / "run", files, PLAIN, "optimizer.name=sgd", "optimizer.lr=1e200")
    assert not list((tmp_path / "run" / "checkpoints").glob("step_????????"))


@pytest.fixture
def spoiled(files, tmp_path):
    """The cubes, with a NaN in the last row of the third."""
    folder = tmp_path / "spoiled"
    shutil.copytree(Path(files["cosmo"]).parent, folder)
    paths = sorted(folder.glob("*.h5"))
    for path in paths:
        with h5py.File(path, "r+") as file:
            cubes = file["full"][...].astype("float32")  # whole numbers know no NaN
            cubes.reshape(-1)[-1] = float("nan") if path == paths[2] else 0
            del file["full"]
            file["full"] = cubes
    return {"cosmo": str(folder / "*.h5")}, paths[2]


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{"depth": 1}, {"depth": 2}])
def test_a_sample_that_makes_the_loss_nan_is_named_on_all_ranks(axes, spoiled, tmp_path):
    spoiled_files, third = spoiled
    changes = [f"mesh.depth={axes['depth']}", "data.shuffle=none", "run.log_every=3"]
    with pytest.raises(HyperslabError) as error:
        train(tmp_path / "run", spoiled_files, *changes)
    told = str(error.value)
    assert told.startswith(f"the loss became nan at step 2: sample 2 (number 0 in {third}) holds ")
    assert "nan in array 'full'; mend or remove it" in told


def test_a_folder_that_holds_a_run_is_not_written_to_unasked(files, straight):
    with pytest.raises(ConfigError, match=r"reached step 8: continue it with --resume"):
        train(straight, files)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["task.target=label"], "'label' is not among the targets of the data, which are unitPar"),
        (["model.options={size = 64}"], "of 64x64x64 and is given 16x16x16"),
        (["model.name=cosmoflo"], "cosmoflow"),
        (["task.kind=classification"], "the target of shape (2, 4)"),
        (["data.batch_size=3", "train.accumulate=2"], "cannot be cut into"),
        (["train.shard_weights=true", "train.channels_last=true"], "train.channels_last = false"),
        (["train.shard_weights=true", "optimizer.name=lamb"], "choose adam, adamw or sgd"),
        (["data.normalize={men = 1.0}"], "takes scale, log1p, mean, std and from_file"),
        (["data.tile=5"], "5"),
    ],
)
def test_settings_that_cannot_work_are_told_in_one_line(files, tmp_path, changes, words):
    with pytest.raises(HyperslabError) as error:
        train(tmp_path / "run", files, *changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def check_accumulated(folder, preset, changes):
    """One pass a step, and several, are the same."""
    for name, num in (("one", 1), ("many", 2)):
        more = [f"train.accumulate={num}", f"run.folder={folder / name}"]
        run(read_config(preset, [*SETTINGS[1:], *changes, *more]))
    assert losses(folder / "many") == pytest.approx(losses(folder / "one"), rel=1e-9)
    assert_close(weights(folder / "many"), weights(folder / "one"))


def test_weights_of_samples_and_classes_count_over_all_passes_of_a_step(files, tmp_path):
    changes = ["data.batch_size=4", "model.options={channels = 2, dropout = 0.0}"]
    changes += [f"data.files={files['hep']}", "task.class_weights=[0.2, 3.0]"]
    check_accumulated(tmp_path, "hepcnn", changes)


def test_cells_count_over_all_passes_of_a_step(files, tmp_path):
    options = "{growth = 2, blocks = [1, 1], base_channels = 2, dropout = 0.0}"
    changes = [f"data.files={files['climate']}", f"model.options={options}", "data.batch_size=4"]
    check_accumulated(tmp_path, "climate", changes)


def test_short_batches_are_dropped_whole(files, tmp_path):
    """Seven samples are one batch of four: a pass of two more is none."""
    options = ["data.batch_size=4", "data.drop_last=true", "data.test=0.1"]
    changes = [f"data.files={files['cosmo']}", PLAIN, *options]
    check_accumulated(tmp_path, "cosmoflow-64", changes)
    assert len(losses(tmp_path / "many")) == 2


def test_a_resumed_run_takes_the_settings_that_are_given_now(files, tmp_path):
    for name, decay in (("same", 0.1), ("other", 10.0)):
        alike = [PLAIN, "optimizer.name=adamw", "train.epochs=1"]
        train(tmp_path / name, files, *alike, "optimizer.weight_decay=0.1")
        more = [f"optimizer.weight_decay={decay}", "train.epochs=2"]
        train(tmp_path / name, files, *alike, *more, resume=True)
    ours, theirs = weights(tmp_path / "same"), weights(tmp_path / "other")
    assert float(theirs["head.2.weight"].norm()) < float(ours["head.2.weight"].norm())


def test_the_rate_follows_epochs_when_the_batch_size_changes(files, tmp_path):
    alike = [PLAIN, "schedule.decay=polynomial", "schedule.decay_epochs=none", "train.epochs=4"]
    train(tmp_path / "run", files, *alike, "train.steps=8")
    train(tmp_path / "run", files, *alike, "data.batch_size=4", resume=True)
    rates = [line["lr"] for line in log(tmp_path / "run")]
    assert rates == pytest.approx([5e-4 * (1 - i / 16) for i in [*range(8), 8, 10, 12, 14]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.seed=5", "the samples for train and validation are not those"),
        ("optimizer.options={amsgrad = true}", "optimizer.options.amsgrad = true, but"),
        ("model.options={size = 16, base_channels = 2}", "in the checkpoint"),
    ],
)
def test_a_run_that_cannot_go_on_as_told_stays_as_it_was(files, tmp_path, change, words):
    folder = tmp_path / "run"
    train(folder, files, PLAIN, "data.validation=0.2", "train.epochs=1")
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with pytest.raises(ConfigError, match=words):
        train(folder, files, PLAIN, "data.validation=0.2", change, resume=True)
    assert {path: path.read_bytes() for path in before} == before


def test_files_for_validation_are_not_trained_on(files, tmp_path):
    pattern = files["cosmo"].replace("*", "*[01]")
    changes = [PLAIN, f"data.validation={pattern}", "train.epochs=1"]
    train(tmp_path / "run", files, *changes)
    assert len(losses(tmp_path / "run")) == 3
    with pytest.raises(ConfigError, match="name the same file"):
        train(tmp_path / "other", files, *changes, f"data.test={pattern}")
    with pytest.raises(ConfigError, match="name all 8 files"):
        train(tmp_path / "other", files, PLAIN, f"data.validation={files['cosmo']}")


@pytest.mark.parametrize("bad", [2, 3, 7])
def test_a_pass_that_could_not_be_read_is_missing_from_its_step_alone(files, tmp_path, bad):
    copies = tmp_path / "cosmo"
    shutil.copytree(Path(files["cosmo"]).parent, copies)
    os.truncate(sorted(copies.iterdir())[bad], 1000)
    options = ["data.batch_size=4", "data.bad_samples=skip", "data.shuffle=none"]
    for name, num in (("one", 1), ("many", 4)):
        chosen = [f"data.files={copies}/*.h5", f"train.accumulate={num}"]
        train(tmp_path / name, files, PLAIN, *options, *chosen, "train.epochs=2")
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


# Dense layers that ranks share

WIDE = [
    "model.name=autoencoder",
    'model.options={inputs = 12288, hidden = [5, 3], output = "sigmoid"}',
    "data.preset=images",
    "task.kind=reconstruction",
    "train.clip=0.001",
]
BLOCKS = ["mesh.channel=2", "mesh.sample=2", "plan.*.split=blocks"]


def train_wide(folder, files, *changes, resume=False):
    where = [f"data.files={files['images']}", f"run.folder={folder}"]
    config = read_config("autoencoder-wide", [*where, *SETTINGS[1:], *WIDE, *changes])
    return run(config, resume=resume)


@pytest.fixture(scope="module")
def straight_wide(files, tmp_path_factory):
    """Two epochs on one process."""
    folder = tmp_path_factory.mktemp("straight") / "wide"
    train_wide(folder, files)
    return folder


def assert_goes_on(folder, straight):
    assert losses(folder) == pytest.approx(losses(straight), rel=1e-9)
    assert_close(weights(folder), weights(straight))


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.every(3)
@pytest.mark.parametrize("then", [["mesh.channel=4"], ["mesh.sample=4"], [*BLOCKS]])
def test_blocks_go_on_on_another_mesh(then, files, tmp_path, straight_wide):
    train_wide(tmp_path / "run", files, *BLOCKS, "train.steps=3")
    train_wide(tmp_path / "run", files, "train.steps=6", *then, resume=True)
    train_wide(tmp_path / "run", files, *BLOCKS, resume=True)
    assert_goes_on(tmp_path / "run", straight_wide)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_passes_of_blocks_are_accumulated(files, tmp_path):
    train_wide(tmp_path / "one", files, *BLOCKS, "train.epochs=1")
    train_wide(tmp_path / "two", files, *BLOCKS, "train.epochs=1", "train.accumulate=2")
    assert_goes_on(tmp_path / "two", tmp_path / "one")


def test_a_plan_that_names_no_module_is_told_in_one_line(files, tmp_path):
    with pytest.raises(ConfigError, match=r"^plan: no module is named 'encodr'; there are encoder"):
        train_wide(tmp_path / "run", files, "plan.encodr.split=blocks")
