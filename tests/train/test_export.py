"""Files of weights that a plain module loads, with no hyperslab."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError, FormatError
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import ModelConfig
from hyperslab.train.export import export_run, export_state, load_weights

CONFIG = ModelConfig(name="Tied", options={"width": 5})


class Tied(nn.Module):
    """Weights that layers share, and buffers."""

    def __init__(self, width=5):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.conv, self.norm = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)


def seeded_net():
    torch.manual_seed(7)
    return Tied()


def assert_loads(path):
    plain = Tied()
    plain.load_state_dict(load_file(path))
    expected = seeded_net().state_dict()
    assert all(torch.equal(each, expected[key]) for key, each in plain.state_dict().items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard_weights", [False, True])
def test_what_ranks_trained_loads_into_the_plain_module(shard_weights, tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    net = seeded_net()
    if not shard_weights:  # FSDP2 wants them contiguous
        net.to(memory_format=torch.channels_last)
    model = hs.parallelize(net, mesh, shard_weights=shard_weights)
    export_state(model, tmp_path / "w.safetensors", mesh, CONFIG)
    assert_loads(tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.ranks(2)
def test_a_file_that_cannot_be_written_stops_all_ranks(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    with pytest.raises(
        (FormatError, hs.CommError), match=r"gone.* cannot be written: No such file"
    ):
        export_state(hs.parallelize(Tied(), mesh), tmp_path / "gone" / "w", mesh)


def test_the_file_tells_what_it_was_trained_as(tmp_path):
    path = tmp_path / "w.safetensors"
    export_state(seeded_net(), path, hs.init(device="cpu"), CONFIG)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert (about["format"], about["model"]) == ("pt", "Tied")
    assert json.loads(about["options"]) == {"width": 5}


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(ConfigError, match="_extra_state of the model's state is a dict"):
        export_state(Odd(1, 1), tmp_path / "w", hs.init(device="cpu"))


# Runs


def save_run(folder):
    mesh = hs.init(sample=2, device="cpu")
    model = hs.parallelize(seeded_net(), mesh, shard_weights=True)
    with Checkpoints(folder / "checkpoints", mesh) as checkpoints:
        checkpoints.save(4, {"model": model, "values": {"a": 1}})
        with torch.no_grad():
            model.norm.running_mean += 1
        checkpoints.save(5, {"model": model})


@pytest.fixture
def run_folder(tmp_path, team_of):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('model.name = "Tied"\ndata.files = "*.h5"\n')
    team_of(2).run(save_run, folder=folder)
    return folder


def test_a_checkpoint_of_a_run_is_exported_by_one_process(run_folder, tmp_path):
    path = tmp_path / "w.safetensors"
    assert export_run(run_folder, path) == 5
    assert export_run(run_folder, path, step=4) == 4
    assert_loads(path)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 in .*: 4, 5"):
        export_run(run_folder, path, step=3)
    os.truncate(run_folder / "checkpoints/step_00000005/__1_0.distcp", 100)
    with pytest.raises(FormatError, match=r"__1_0\.distcp is damaged: it has 100 bytes of"):
        export_run(run_folder, path)
    assert_loads(path)


def test_a_folder_without_checkpoints_is_told(tmp_path):
    with pytest.raises(FormatError, match=r"is not the folder of a run: there are no checkpoints"):
        export_run(tmp_path, tmp_path / "w")
    with pytest.raises(FormatError, match=r"not the folder of a run: name .* and --step 120"):
        export_run(tmp_path / "checkpoints/step_00000120", tmp_path / "w")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FormatError, match="there is no checkpoint in "):
        export_run(tmp_path, tmp_path / "w")


# Beginning with weights


def test_weights_are_loaded_as_they_were_exported(tmp_path):
    export_state(seeded_net(), tmp_path / "w", hs.init(device="cpu"))
    model = Tied()
    load_weights(model, tmp_path / "w")
    assert torch.equal(model.last.weight, seeded_net().first.weight)
    assert model.last.weight is model.first.weight


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Tied(6), "first.bias is 5 there and 6 here; give the model the options"),
        (lambda: Tied().conv, "it lacks bias, weight; the model has no conv.bias, .* and 8 more"),
        (lambda: nn.ModuleList([Tied()]), "it lacks 0.conv.bias"),
    ],
)
def test_weights_that_do_not_fit_are_told_by_name_and_shape(tmp_path, model, words):
    export_state(seeded_net(), tmp_path / "w", hs.init(device="cpu"))
    with pytest.raises(ConfigError, match=words):
        load_weights(model(), tmp_path / "w")


def test_files_that_are_no_weights_are_told(tmp_path):
    path = tmp_path / "w"
    with pytest.raises(FormatError, match="w cannot be read"):
        load_weights(Tied(), path)
    save_file({"a": torch.ones(1000)}, path)
    os.truncate(path, 1000)
    with pytest.raises(FormatError, match="w is not a safetensors file, or damaged"):
        load_weights(Tied(), path)
    with pytest.raises(FormatError, match=str(tmp_path)):
        load_weights(Tied(), tmp_path)
