from importlib import resources

import pytest
import torch
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.io import PRESETS as SCHEMAS
from hyperslab.models import build, describe
from hyperslab.train.preset_list import PRESETS, hint_for, list_presets
from hyperslab.train.read_config import read_config

EACH = pytest.mark.parametrize("name", PRESETS)


def test_every_file_is_listed_and_every_preset_has_one():
    files = (resources.files("hyperslab.train") / "presets").iterdir()
    assert {file.name for file in files} == {f"{preset.name}.toml" for preset in list_presets()}


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
