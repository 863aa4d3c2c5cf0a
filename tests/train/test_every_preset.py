"""Every preset, small, trained for some steps on several meshes: the same losses on all."""

import functools
import json

import pytest

from hyperslab.train.preset_list import list_presets
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

COSMOFLOW = ("cosmo", ["model.options={size = 16, base_channels = 1}"])
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
MESHES = {"space": {"space": 2}, "sample": {"sample": 2}, "both": {"sample": 2, "space": 2}}
QUICK = {"cosmoflow-64", "hepcnn", "unet3d"}


def numbers(preset, files, folder, axes):
    """The losses of two steps, of 4 and of 3 samples, and the scores after them."""
    kind, changes = SMALL[preset]
    space = "depth" if kind in ("cosmo", "volumes") else "height"
    named = {space if axis == "space" else axis: num for axis, num in axes.items()}
    mesh = [f"mesh.{axis}={named.get(axis, 1)}" for axis in ("sample", "depth", "height", "width")]
    where = [f"data.files={files[kind]}", f"run.folder={folder}"]
    run(read_config(preset, [*changes, *ALIKE, *mesh, *where]))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = {f"step {line['step']}": line["loss"] for line in lines if line["kind"] == "step"}
    [scores] = (line for line in lines if line["kind"] == "scores")
    return losses | {k: v for k, v in scores.items() if isinstance(v, float) and k != "time"}


PRESETS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """The numbers of one process, of a preset."""
    return functools.cache(lambda name: numbers(name, files, tmp_path_factory.mktemp(name), {}))


def test_no_preset_is_left_out():
    assert {preset.name for preset in list_presets()} == set(SMALL)


@pytest.mark.parametrize("preset", PRESETS)
def test_one_process_trains_and_gives_numbers(alone, preset):
    assert {"step 1", "step 2", "loss"} <= alone(preset).keys()


@pytest.fixture
def expected(alone, preset):
    return alone(preset)


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_numbers_of_one_process(axes, preset, files, tmp_path, expected):
    found = numbers(preset, files, tmp_path / "run", axes)
    assert found == pytest.approx(expected, rel=1e-7, nan_ok=True)
