"""Runs in stages: the same numbers however they are cut, wherever they stop, codes made once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.models import StackedAutoencoder
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

ALIKE = [
    "data.batch_size=3",
    "data.validation=0.2",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "stages.epochs=[2,2]",
    "stages.noise=[0.2,0.1]",
    "stages.l1=1e-2",
    "optimizer.name=sgd",  # adam makes much of gradients that are nothing but rounding
    "optimizer.lr=0.05",
    "optimizer.options.momentum=0.9",
    "train.epochs=1",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]
CASES = {
    "conv": (
        "autoencoder-conv",
        "cosmo",
        "model.options={channels = [4, 4], activation = 'elu', tied = true}",
    ),
    "norm": ("autoencoder-conv", "cosmo", "model.options={channels = [4, 4], batch_norm = true}"),
    "dense": (
        "autoencoder-dense",
        "images",
        "model.options={inputs = 12288, hidden = [8, 6], activation = 'sigmoid', tied = true}",
        "stages.kl=1e-2",
    ),
    "free": ("autoencoder-dense", "images", "model.options={inputs = 12288, hidden = [8, 6]}"),
}
"""The preset, its kind of files, and settings that make the network small."""
MESHES = {
    "sample": ({"sample": 2}, []),
    "height": ({"height": 2}, []),
    "channel": ({"channel": 2}, []),
    "blocks": ({"channel": 2, "height": 2}, ["plan.*.split=blocks"]),
    "samples-blocks": ({"channel": 2, "sample": 2}, ["plan.*.split=blocks"]),
    "sample-height": ({"sample": 2, "height": 2}, []),
}


def train(case, files, folder, axes, *changes, resume=False):
    preset, kind, *own = CASES[case]
    mesh = [f"mesh.{axis}={num}" for axis, num in axes.items()]
    where = [f"data.files={files[kind]}", f"run.folder={folder}"]
    kl = ["stages.kl=0"] if preset == "autoencoder-dense" else []
    asked = [*ALIKE, *kl, *own, *mesh, *where, *changes]
    return run(read_config(preset, asked), resume=resume)


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def numbers(folder):
    """The losses of all steps, and of validations but those where a run was stopped."""
    lines = [line for line in log(folder) if line["kind"] == "step" or line["step"] % 2 == 0]
    return {f"{line['kind']} {line['step']} {line.get('stage')}": line["loss"] for line in lines}


def assert_alike(ours, theirs):
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-10, abs=1e-12)
    one, other = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def assert_same_bits(ours, theirs):
    assert numbers(ours) == numbers(theirs)
    one, other = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert all(torch.equal(one[key], other[key]) for key in other)


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """Folders of runs of one process, by case."""
    made = {}

    def folder_of(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case) / "run"
            train(case, files, made[case], {})
        return made[case]

    return folder_of


@pytest.fixture
def serial(alone, case):
    return alone(case)


def test_every_stage_and_then_all_together_make_steps(alone):
    """Six samples, two steps an epoch: stages of two epochs and two, then one."""
    stages = [line["stage"] for line in log(alone("conv")) if line["kind"] == "step"]
    assert stages == [0] * 4 + [1] * 4 + [2] * 2
    summary = json.loads((alone("conv") / "summary.json").read_text())
    assert (summary["step"], summary["epoch"], summary["state"]) == (10, 5, "finished")


@pytest.mark.every(11)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("axes", "plan"), MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(axes, plan, case, files, tmp_path, serial):
    if plan and "conv" in CASES[case][0]:
        plan = []
    train(case, files, tmp_path / "run", axes, *plan)
    assert_alike(tmp_path / "run", serial)


def test_a_frozen_encoder_runs_once_for_each_sample_and_no_more(files, tmp_path, monkeypatch):
    calls = []
    forward = StackedAutoencoder.forward

    def counted(self, x, *, stages=None, noise=0.0, want="output"):
        calls.append((stages, want, x.shape[0]))
        return forward(self, x, stages=stages, noise=noise, want=want)

    monkeypatch.setattr(StackedAutoencoder, "forward", counted)
    train("norm", files, tmp_path / "run", {})
    coded = [num for stages, want, num in calls if want == "code" and stages == (0, 1)]
    assert sum(coded) == 8  # six to train on and two for validation
    order = [stages for stages, *_ in calls]
    last = len(order) - 1 - order[::-1].index((1, 2))
    assert (0, 1) not in order[order.index((1, 2)) : last]
    trained = [n for stages, want, n in calls if stages == (1, 2) and want == "both"]
    assert sum(trained) == 2 * 8


@pytest.mark.every(3)
@pytest.mark.parametrize("step", [3, 4, 7, 9])
def test_a_run_that_was_stopped_in_any_stage_goes_on_with_the_same_bits(
    step, files, tmp_path, alone
):
    train("norm", files, tmp_path / "run", {}, f"train.steps={step}")
    assert log(tmp_path / "run")[-1]["step"] == step
    train("norm", files, tmp_path / "run", {}, resume=True)
    assert_same_bits(tmp_path / "run", alone("norm"))


@pytest.fixture
def half(files, tmp_path, case, step):
    """A run of one process that was stopped in a stage."""
    train(case, files, tmp_path / "run", {}, f"train.steps={step}")
    return tmp_path / "run"


@pytest.mark.every(9)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("axes", "plan"), [MESHES[name] for name in ("sample-height", "channel", "blocks")]
)
@pytest.mark.parametrize("step", [3, 7, 9])
@pytest.mark.parametrize("case", ["dense", "conv"])
def test_a_run_goes_on_on_another_mesh_in_any_stage(axes, plan, step, case, files, half, serial):
    plan = [] if case == "conv" else plan
    train(case, files, half, axes, *plan, resume=True)
    assert_alike(half, serial)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["stages.epochs=[2,2,2]"], "has 3 entries, and the model has 2 pairs"),
        (["stages.noise=[0.1]"], "has 1 entries, and the model has 2 pairs"),
        (["model.name=cosmoflow", "model.options={size=16}"], "the model is .*CosmoFlow: use"),
        (["stages.kl=1e-3"], "for codes from 0 to 1, and these go from -"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(changes, words, files, tmp_path):
    with pytest.raises(ConfigError, match=words):
        train("conv", files, tmp_path / "run", {}, *changes)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["task.kind=regression"], "set task.kind = 'reconstruction'"),
        (["train.shard_weights=true"], "FSDP2"),
        (["stages.noise=1"], "stages.noise must be from 0 to below 1, got 1"),
        (["stages.kl=1", "data.batch_size=4", "train.accumulate=2"], "train.accumulate = 2"),
        (["finetune.outputs=2"], "set stages.epochs = none"),
        (["stages.rho=1"], "stages.rho must be between 0 and 1"),
        (["stages.epochs=-1"], "stages.epochs must be at least 0"),
    ],
)
def test_settings_that_exclude_each_other_are_told(changes, words):
    with pytest.raises(ConfigError, match=words):
        read_config("autoencoder-conv", changes)


def damage(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def test_a_sample_that_cannot_be_read_has_no_code(files, tmp_path):
    for path in Path(files["cosmo"]).parent.glob("*.h5"):
        shutil.copy(path, tmp_path)
    damage(sorted(tmp_path.glob("*.h5"))[3])
    changes = [f"data.files={tmp_path}/*.h5", "data.bad_samples=skip"]
    with pytest.raises(HyperslabError, match="have no code, as they could not be read"):
        train("conv", files, tmp_path / "run", {}, *changes)
