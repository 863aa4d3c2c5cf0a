"""Every preset, small, trained for some steps on several meshes: the same losses on all."""

import json

import pytest

from hyperslab.train.preset_list import list_presets
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

COSMOFLOW = ["model.options.size=32", "model.options.base_channels=2", "data.files=cosmo"]
SMALL = {
    "cosmoflow-64": COSMOFLOW,
    "cosmoflow-128": COSMOFLOW,
    "cosmoflow-256": COSMOFLOW,
    "cosmoflow-512": COSMOFLOW,
    "hepcnn": ["model.options.filters=8", "data.files=hep"],
    "climate": ["model.options.blocks=[2,2,2]", "model.options.growth=4", "data.files=climate"],
    "mesh-1k": ["model.options.width=0.05", "data.files=mesh"],
    "mesh-2k": ["model.options.width=0.05", "data.files=mesh"],
    "unet3d": ["model.options.base_channels=4", "model.options.levels=3", "data.files=volumes"],
    "resnet50": ["model.options.classes=10", "data.files=images"],
}
ALIKE = [
    "data.batch_size=3",
    "data.validation=0.25",
    "data.test=0",
    "data.memory_budget=none",
    "mesh.device=cpu",
    "train.precision=fp64",
    "train.accumulate=1",
    "train.epochs=1",
    "train.checkpoint_activations=[]",
    "run.log_every=1",
    "run.tensorboard=false",
    "run.figures=false",
]
MESHES = [{"sample": 2}, {"height": 2}, {"sample": 2, "height": 2}]


def losses(preset, files, folder, axes):
    """Of every step, and the scores of validation."""
    changes = [*SMALL[preset], *ALIKE, f"run.folder={folder}/run"]
    changes = [c.replace(f"files={k}", f"files={p}") for c in changes for k, p in files.items()]
    config = read_config(preset, [*changes, *(f"mesh.{axis}={n}" for axis, n in axes.items())])
    run(config)
    lines = map(json.loads, (folder / "run" / "log.jsonl").read_text().splitlines())
    return [value for line in lines for value in numbers(line)]


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    return {p: losses(p, files, tmp_path_factory.mktemp(p), {}) for p in SMALL}


def test_no_preset_is_left_out():
    assert {preset.name for preset in list_presets()} == set(SMALL)
