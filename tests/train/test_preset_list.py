import functools
import json
import math
from importlib import resources

import pytest
import torch
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.io import PRESETS as SCHEMAS
from hyperslab.models import DenseAutoencoder, build, describe
from hyperslab.train.preset_list import PRESETS, hint_for
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

EACH = pytest.mark.parametrize("name", PRESETS)


def test_every_file_is_listed_and_every_preset_has_one():
    files = (resources.files("hyperslab.train") / "presets").iterdir()
    assert {file.name for file in files} == {f"{name}.toml" for name in PRESETS}


@EACH
def test_the_list_tells_the_truth(name):
    preset, config = PRESETS[name], read_config(name)
    assert config.data.preset == preset.schema in SCHEMAS
    with torch.device("meta"):
        model = build(config.model.name, config.model.options)
    found = describe(model, preset.shape)
    assert found.num_parameters == preset.num_parameters
    assert found.forward_flops / 1e9 == pytest.approx(preset.gflop, rel=0.002)
    assert getattr(model, "size", preset.shape[-1]) == preset.shape[-1]
    if isinstance(model, DenseAutoencoder):
        assert model.inputs == math.prod(preset.shape)
    else:
        assert model.in_channels == preset.shape[0]


@EACH
def test_the_command_that_makes_data_up_is_one(name, tmp_path):
    arguments = PRESETS[name].synth.split()
    (tmp_path / "file").touch()
    asked = ["data", "synth", *arguments, str(tmp_path / "file")]  # no folder: it makes nothing
    result = CliRunner().invoke(main, asked)
    assert "is a file" in " ".join(result.stderr.split()), result.stderr


@pytest.mark.parametrize(
    ("source", "changes", "command"),
    [
        ("cosmoflow-128", [], "cosmo --size 128 --count 64 cosmo"),
        ("cosmoflow-64", ["model.options.size=32"], "cosmo --size 32 --count 256 cosmo"),
        ("cosmoflow-64", ['data.files=["my data/a*.h5"]'], "cosmo --size 64 --count 256 'my data'"),
        ("climate", ["data.files=*.h5"], "climate --count 32 ."),
        ("mesh-2k", [], "mesh --size 2048 --count 32 mesh"),
        ("autoencoder-wide", [], "images --size 256 --count 1024 images256"),
    ],
)
def test_the_next_step_without_data_is_told(source, changes, command):
    hint = hint_for(read_config(source, changes))
    assert hint == f"to make some up: hyperslab data synth {command}"


def test_for_data_of_an_unknown_schema_there_is_no_such_step():
    assert hint_for(read_config("cosmoflow-128", ["data.preset=none"])) is None
    assert hint_for(read_config("cosmoflow-128", ["data.preset=cosmoflow-cdhw"])) is None


def test_climate_weighs_classes_by_how_rare_they_are():
    weights = read_config("climate").task.class_weights
    products = [w * share for w, share in zip(weights, (0.982, 0.00071, 0.017), strict=True)]
    assert products == pytest.approx([products[0]] * 3, rel=1e-3)
    assert sum(weights) == pytest.approx(1, abs=1e-5)


# Every preset, small, trained for some steps on several meshes: the same losses on all

COSMOFLOW = ("cosmo", ["model.options={size = 16, base_channels = 1}"])
WIDE = ("images", ['model.options={inputs = 12288, hidden = [6], output = "sigmoid"}'])
SMALL = {
    "cosmoflow-64": COSMOFLOW,
    "cosmoflow-128": COSMOFLOW,
    "cosmoflow-256": COSMOFLOW,
    "cosmoflow-512": COSMOFLOW,
    "hepcnn": ("hep", ["model.options={channels = 4}"]),
    "climate": (
        "climate",
        ["model.options={growth = 2, blocks = [1, 2], base_channels = 4, dropout = 0.2}"],
    ),
    "mesh-1k": ("mesh-1k", ["model.options={base_channels = 2, outputs = 4}"]),
    "mesh-2k": ("mesh-2k", ["model.options={base_channels = 2, outputs = 4}"]),
    "unet3d": ("volumes", ["model.options={classes = 4, base_channels = 2, levels = 3}"]),
    "resnet50": (
        "images",
        ["model.options={classes = 10, base_channels = 4}", "optimizer.lr=1e-4"],
    ),
    "autoencoder-wide": WIDE,
    "autoencoder-dense": (
        "images",
        [
            'model.options={inputs = 12288, hidden = [6, 4], activation = "sigmoid"}',
            "stages.epochs=[0, 0]",
        ],
    ),
    "autoencoder-conv": ("cosmo", ["model.options={channels = [4, 4]}", "stages.epochs=[0, 0]"]),
    "finetune": (
        "cosmo",
        [
            "model.options={channels = [4, 4]}",
            "data.labelled_fraction=1",
            "finetune.from_scratch=true",
        ],
    ),
}
"""The kind of files, and settings that make the network small."""

ALIKE = [
    "data.batch_size=4",
    "data.validation=0.1",
    "data.test=0",
    "mesh.device=cpu",
    "train.precision=fp64",
    "train.epochs=1",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]
AXES = ("sample", "channel", "depth", "height", "width")
MESHES = {"space": {"space": 2}, "sample": {"sample": 2}, "both": {"sample": 2, "space": 2}}
QUICK = {"cosmoflow-64", "hepcnn", "unet3d"}


def numbers(preset, files, folder, axes, *more):
    """The losses of two steps, of 4 and of 3 samples, and the scores after them."""
    kind, changes = SMALL[preset]
    space = "depth" if kind in ("cosmo", "volumes") else "height"
    named = {space if axis == "space" else axis: num for axis, num in axes.items()}
    mesh = [f"mesh.{axis}={named.get(axis, 1)}" for axis in AXES]
    where = [f"data.files={files[kind]}", f"run.folder={folder}"]
    run(read_config(preset, [*changes, *ALIKE, *mesh, *where, *more]))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = {f"step {line['step']}": line["loss"] for line in lines if line["kind"] == "step"}
    [scores] = (line for line in lines if line["kind"] == "scores")
    return losses | {k: v for k, v in scores.items() if isinstance(v, float) and k != "time"}


SMALL_PRESETS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL
]


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """The numbers of one process, of a preset."""
    return functools.cache(lambda name: numbers(name, files, tmp_path_factory.mktemp(name), {}))


def test_no_preset_is_left_out():
    assert set(PRESETS) == set(SMALL)


@pytest.mark.parametrize("preset", SMALL_PRESETS)
def test_one_process_trains_and_gives_numbers(alone, preset):
    assert {"step 1", "step 2", "loss"} <= alone(preset).keys()


@pytest.fixture
def expected(alone, preset):
    return alone(preset)


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("preset", SMALL_PRESETS)
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(axes, preset, files, tmp_path, expected):
    found = numbers(preset, files, tmp_path / "run", axes)
    assert found == pytest.approx(expected, rel=1e-7, nan_ok=True)


CUTS = {
    "channel": ({"channel": 2}, []),
    "blocks": ({"channel": 2, "sample": 2}, ["plan.*.split=blocks"]),
    "mixed": (
        {"channel": 2, "sample": 2},
        ['plan."encoder.*".split=blocks', "plan.decoder.channel=4"],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("preset", ["autoencoder-wide"])
@pytest.mark.parametrize(("axes", "plan"), CUTS.values(), ids=CUTS)
def test_matrices_that_ranks_share_give_the_numbers_of_one_process(
    axes, plan, preset, files, tmp_path, expected
):
    found = numbers(preset, files, tmp_path / "run", axes, *plan)
    assert found == pytest.approx(expected, rel=1e-7)
