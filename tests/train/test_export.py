"""Files of weights that a plain module loads, with no hyperslab."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import hyperslab as hs
from hyperslab.errors import ConfigError, FormatError
from hyperslab.models import DenseAutoencoder
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.config import ModelConfig
from hyperslab.train.export import export_run, export_state, load_weights
from hyperslab.train.weight_files import WeightFiles

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


# Matrices that no process holds whole


def wide():
    torch.manual_seed(7)
    with torch.device("meta"):
        return DenseAutoencoder(13, (7, 5))


def save_wide(folder):
    mesh = hs.init(channel=2, sample=2, device="cpu")
    model = hs.parallelize(wide(), mesh, plan={"*": {"split": "blocks"}})
    with Checkpoints(folder / "checkpoints", mesh) as checkpoints:
        checkpoints.save(4, {"model": model})
    return {key: whole(each) for key, each in model.state_dict().items()}


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def load_all(path):
    """As other programs read files that an index lists."""
    listed = json.loads(path.with_name(f"{path.name}.index.json").read_text())
    found = {}
    for name in {*listed["weight_map"].values()}:
        part = load_file(path.with_name(name))
        assert all(listed["weight_map"][key] == name for key in part)
        found |= part
    assert listed["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[key]) for key, each in found.items())


def test_blocks_are_exported_a_block_at_a_time(tmp_path, team_of, monkeypatch):
    (tmp_path / "config.toml").write_text('model.name = "autoencoder"\ndata.files = "*.h5"\n')
    expected = team_of(4).run(save_wide, folder=tmp_path)[0]
    sizes = []
    write = WeightFiles.write
    monkeypatch.setattr(
        WeightFiles,
        "write",
        lambda self, *args: (sizes.append(args[2].numel()), write(self, *args)),
    )
    path = tmp_path / "w.safetensors"
    export_run(tmp_path, path)
    assert_equal(load_file(path), expected)
    assert max(sizes) == 7 * 4  # of 13 x 7, over 2 x 2
    export_run(tmp_path, path, shard_nbytes=400)
    names = sorted(each.name for each in tmp_path.glob("w-*"))
    assert names[0] == f"w-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 2
    assert_equal(load_all(path), expected)
    plain = DenseAutoencoder(13, (7, 5))
    load_weights(plain, path)
    assert_equal(plain.state_dict(), expected)
    export_run(tmp_path, path)  # one file again, which counts
    assert not path.with_name("w.safetensors.index.json").exists()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shard_nbytes", [400, 1 << 30])
def test_ranks_export_blocks_that_none_of_them_puts_together(tmp_path, shard_nbytes):
    mesh = hs.init(channel=2, sample=2, device="cpu")
    model = hs.parallelize(wide(), mesh, plan={"*": {"split": "blocks"}})
    path = tmp_path / "w.safetensors"
    expected = {key: whole(each) for key, each in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", None)
        export_state(model, path, mesh, shard_nbytes=shard_nbytes)
    assert_equal(load_all(path) if shard_nbytes == 400 else load_file(path), expected)


@pytest.mark.ranks(4)
def test_a_disk_that_is_full_halfway_stops_all_ranks(tmp_path):
    mesh = hs.init(channel=2, sample=2, device="cpu")
    model = hs.parallelize(wide(), mesh, plan={"*": {"split": "blocks"}})
    pwrite, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises((FormatError, hs.CommError), match="the disk is full"):
            export_state(model, tmp_path / "w", mesh)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8])
def test_every_dtype_is_written_as_safetensors_has_it(dtype, tmp_path):
    tensors = {"number": torch.ones((), dtype=dtype), "none": torch.ones(0, 3, dtype=dtype)}
    tensors |= {"first": torch.ones(3, dtype=torch.uint8), "box": torch.ones(3, 4, 5, dtype=dtype)}
    tensors["box"][1, 2:, 3] = 0
    with WeightFiles(tmp_path / "w", tensors, {}) as files:
        for key, each in tensors.items():
            for i, part in enumerate(each.split(2) if each.ndim else [each]):
                files.write(key, (2 * i, *[0] * (each.ndim - 1))[: each.ndim], part)
    assert_equal(load_file(tmp_path / "w"), tensors)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"hold no torch.complex128 \(a\)"):
        WeightFiles(tmp_path / "w", {"a": torch.ones(1, dtype=torch.complex128)}, {})
