"""A run that stops and goes on: nothing is lost, nothing half written is ever read."""

import math
import os
import random
import resource
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import hyperslab as hs
from hyperslab.comm import failure_report
from hyperslab.errors import ConfigError, FormatError
from hyperslab.testing import Team
from hyperslab.train import checkpoints as checkpoints_module
from hyperslab.train.checkpoint_state import random_state, set_random_state
from hyperslab.train.checkpoints import Checkpoints, best_of, find_checkpoints
from hyperslab.train.export import export_state

SHAPE = (4, 1, 6, 4, 4)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).mean((2, 3, 4)))


def begin(mesh, dtype=torch.float32, shard_weights=False):
    torch.manual_seed(0)
    model = hs.parallelize(Net().to(dtype), mesh, shard_weights=shard_weights)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, mesh, steps):
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = (
            hs.shard(torch.randn(*shape, generator=generator, dtype=dtype), mesh)
            for shape in (SHAPE, (4, 1))
        )
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def parts_of(model, optimizer):
    return {"model": model, "optimizer": optimizer, "values": {"random": random_state()}}


def whole(model):
    state = model.state_dict()
    return {
        key: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for key, each in state.items()
    }


def resumed(folder, mesh, dtype=torch.float32, shard_weights=False):
    """A model and an optimizer that have been used, and got another state."""
    model, optimizer = begin(mesh, dtype, shard_weights)
    train(model, optimizer, mesh, [99])
    with Checkpoints(folder, mesh) as checkpoints:
        values = checkpoints.load({"model": model, "optimizer": optimizer})
    set_random_state(values["random"])
    return model, optimizer


def message(call):
    """The error that ``call`` raises, as type and words."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shall see it
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.fixture
def alone():
    return hs.init(device="cpu")


@pytest.fixture
def saved(tmp_path, alone):
    """A folder with one checkpoint, of step 3."""
    model, optimizer = begin(alone)
    train(model, optimizer, alone, [0])
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(3, parts_of(model, optimizer))
    return tmp_path


def load_into(folder, mesh, model=None, optimizer=None):
    with Checkpoints(folder, mesh) as checkpoints:
        parts = {"model": model or Net()}
        return checkpoints.load(parts | ({"optimizer": optimizer} if optimizer else {}))


# Going on


@pytest.mark.ranks
@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("axes", "shard_weights"),
    [
        ({"depth": 2}, True),
        ({"sample": 1}, False),
        ({"channel": 3}, False),
        ({"sample": 2}, False),
        ({"sample": 2, "channel": 2}, True),
        ({"depth": 2}, False),
    ],
)
def test_ten_steps_are_five_and_five_to_the_bit(axes, shard_weights, tmp_path):
    mesh = hs.init(**axes, device="cpu")
    model, optimizer = begin(mesh, shard_weights=shard_weights)
    train(model, optimizer, mesh, range(5))
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(5, parts_of(model, optimizer))
        train(model, optimizer, mesh, range(5, 10))  # while it is written
    straight = whole(model)
    model, optimizer = resumed(tmp_path, mesh, shard_weights=shard_weights)
    train(model, optimizer, mesh, range(5, 10))
    assert all(torch.equal(each, straight[key]) for key, each in whole(model).items())


def save_and_go_on(folder, axes, shard_weights, device="cpu"):
    mesh = hs.init(**axes, device=device)
    model, optimizer = begin(mesh, torch.float64, shard_weights)
    train(model, optimizer, mesh, range(3))
    with Checkpoints(folder / "checkpoints", mesh) as checkpoints:
        checkpoints.save(3, parts_of(model, optimizer))
    train(model, optimizer, mesh, range(3, 6))
    export_state(model, folder / "end", mesh)
    return load_file(folder / "end")


def load_and_go_on(folder, axes, shard_weights, device="cpu"):
    mesh = hs.init(**axes, device=device)
    model, optimizer = resumed(folder / "checkpoints", mesh, torch.float64, shard_weights)
    train(model, optimizer, mesh, range(3, 6))
    export_state(model, folder / "end", mesh)
    return load_file(folder / "end")


ONE, HALVES = ({"sample": 1}, False), ({"depth": 2}, False)
QUARTERS, SHARDED = ({"sample": 2, "depth": 2}, True), ({"height": 2}, True)
CHANNELS, SHARDED_CHANNELS = ({"channel": 4}, False), ({"sample": 2, "channel": 2}, True)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (HALVES, ONE),
        (HALVES, QUARTERS),
        (QUARTERS, SHARDED),
        (SHARDED, ONE),
        (ONE, CHANNELS),
        (CHANNELS, ({"channel": 2}, False)),
        (({"channel": 2}, False), CHANNELS),
        (({"channel": 3}, False), ONE),
        (CHANNELS, SHARDED_CHANNELS),
        (SHARDED_CHANNELS, HALVES),
    ],
)
def test_a_run_goes_on_on_another_mesh(there, here, tmp_path, team_of):
    straight, resumed = (
        team_of(math.prod(axes.values())).run(
            go_on, folder=tmp_path, axes=axes, shard_weights=shard_weights
        )[0]
        for go_on, (axes, shard_weights) in ((save_and_go_on, there), (load_and_go_on, here))
    )
    for key, each in resumed.items():
        torch.testing.assert_close(each, straight[key], rtol=1e-8, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize(("there", "here"), [(ONE, HALVES), (HALVES, SHARDED), (SHARDED, ONE)])
def test_a_run_goes_on_on_a_gpu(there, here, tmp_path):
    ends = []
    for go_on, (axes, shard_weights) in ((save_and_go_on, there), (load_and_go_on, here)):
        with Team(math.prod(axes.values()), timeout_seconds=120) as team:
            ends.append(team.run(go_on, tmp_path, axes, shard_weights, device="cuda")[0])
    for key, each in ends[1].items():
        torch.testing.assert_close(each, ends[0][key], rtol=1e-8, atol=1e-8)


@pytest.mark.ranks(2)
def test_random_numbers_go_on_and_are_the_same_on_all_ranks(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    model, optimizer = begin(mesh)
    train(model, optimizer, mesh, range(2))
    with Checkpoints(tmp_path, mesh) as checkpoints:
        random.seed(mesh.rank)
        np.random.seed(mesh.rank)  # noqa: NPY002
        checkpoints.save(2, parts_of(model, optimizer))
        drawn = [torch.rand(3).tolist(), random.random(), np.random.rand()]  # noqa: NPY002
        values = checkpoints.load({})
        set_random_state(values["random"])
        again = [torch.rand(3).tolist(), random.random(), np.random.rand()]  # noqa: NPY002
        both = checkpoints._channel.tell_all((drawn, again))
    assert both[0][0][0] == both[1][0][0], "dropout has drawn alike on both ranks"
    assert both[0][1] == both[1][1] == both[0][0]


@pytest.mark.ranks(2)
def test_what_all_ranks_have_is_written_once(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    model = hs.parallelize(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)), mesh)
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(1, {"model": model})
    sizes = [path.stat().st_size for path in tmp_path.glob("step_00000001/*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 40_000
    assert sum(sizes) < 90_000


# Optimizers


def test_an_optimizer_that_has_not_begun_stays_so(tmp_path, alone):
    model, optimizer = begin(alone)
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(0, parts_of(model, optimizer))
        train(model, optimizer, alone, [0])
        checkpoints.load({"model": model, "optimizer": optimizer})
    assert not optimizer.state


def test_groups_rates_and_dtypes_of_an_optimizer_come_back(tmp_path, alone):
    model = nn.Linear(2, 2).double()
    groups = [{"params": [model.weight], "lr": 0.1 / 3}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), amsgrad=True)
    model(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"] = torch.ones(2)  # float32, as some optimizers keep it
    optimizer.state[model.bias]["history"] = [torch.arange(3), (1, None)]
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer})
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        other = torch.optim.AdamW(groups)
        checkpoints.load({"model": model, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1 / 3
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    assert other.param_groups[1]["amsgrad"]
    for key, each in optimizer.state[model.weight].items():
        assert torch.equal(each, other.state[model.weight][key])
    assert other.state[model.bias]["exp_avg"].dtype == torch.float32
    assert torch.equal(other.state[model.bias]["history"][0], torch.arange(3))
    assert other.state[model.bias]["history"][1] == (1, None)


def test_what_cannot_be_saved_without_pickling_is_refused(tmp_path, alone):
    checkpoints = Checkpoints(tmp_path, alone)
    with pytest.raises(ConfigError, match="values/a/1 cannot be saved: it is a set"):
        checkpoints.save(1, {"values": {"a": [0, {1}]}})


# Which ones stay


def test_the_newest_and_the_best_stay(tmp_path, alone):
    with Checkpoints(tmp_path, alone, keep=2) as checkpoints:
        for step in (10, 20, 30, 40, 50):
            checkpoints.save(step, {"values": {"step": step}}, is_best=step in (10, 20))
        assert checkpoints.steps() == [20, 40, 50]
        checkpoints.save(60, {"values": {}}, is_best=True)
        assert checkpoints.steps() == [20, 50, 60], "20 is the best for who goes on from 50"
        checkpoints.save(50, {"values": {}})  # by a run that went back
        assert checkpoints.steps() == [20, 50]
        assert best_of(find_checkpoints(tmp_path), until=50) == 20
        assert checkpoints.load({}, step=20) == {"step": 20}
        with pytest.raises(ConfigError, match=r"no checkpoint of step 30 in .*: 20, 50"):
            checkpoints.load({}, step=30)


def test_a_step_saved_again_is_replaced_and_stays_the_best(tmp_path, alone):
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(10, {"values": {"try": 1}}, is_best=True)
        checkpoints.save(10, {"values": {"try": 2}})
        assert checkpoints.load({}) == {"try": 2}
        assert best_of(find_checkpoints(tmp_path), until=10) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_a_run_that_went_back_leaves_no_later_steps(tmp_path, alone):
    with Checkpoints(tmp_path, alone, keep=3) as checkpoints:
        for step in (10, 20, 30, 15):
            checkpoints.save(step, {"values": {}})
        assert checkpoints.steps() == [10, 15]


def test_what_a_killed_run_left_is_neither_read_nor_kept(tmp_path, alone):
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(10, {"values": {"step": 10}})
    shutil.copytree(tmp_path / "step_00000010", tmp_path / "step_00000020.partial")
    (tmp_path / "step_00000010").rename(tmp_path / "step_00000010.replaced")
    with Checkpoints(tmp_path, alone) as checkpoints:
        assert checkpoints.steps() == [10], "a replacement that was cut short is undone"
        checkpoints.save(20, {"values": {"step": 20}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000020"]


def test_a_checkpoint_has_its_name_only_when_all_of_it_is_on_the_disk(tmp_path, alone, disk_log):
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(2, 2), "values": {"step": 1}})
    folder = tmp_path / "step_00000001"
    named = disk_log.when_named(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "manifest.json",
    ]
    for path in folder.iterdir():
        assert disk_log.when_synced(path) < named, path
    assert disk_log.when_named(folder / "manifest.json") < disk_log.when_synced(folder) < named
    assert named < disk_log.when_synced(tmp_path)


class WithExtra(nn.Linear):
    """Keeps a dict of tensors beside its weights."""

    seen = None

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_tensors_of_an_extra_state_come_back(tmp_path, alone):
    net, other = WithExtra(2, 2), WithExtra(2, 2)
    net.seen = torch.arange(3)
    with Checkpoints(tmp_path, alone) as checkpoints:
        checkpoints.save(1, {"model": net})
        checkpoints.load({"model": other})
    assert other.seen.tolist() == [0, 1, 2]
    assert torch.equal(other.weight, net.weight)


# Damage


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", cut, "__0_0.distcp is damaged: it has [0-9]+ bytes of [0-9]+; remove"),
        ("__0_0.distcp", flip, "__0_0.distcp is damaged: its bytes are not those"),
        (".metadata", os.remove, ".metadata cannot be read .No such file or directory.: remove"),
        (".metadata", flip, ".metadata is damaged"),
        ("manifest.json", cut, "manifest.json cannot be read"),
        ("manifest.json", flip, "manifest.json (is damaged|cannot be read|is not of the kind)"),
        ("manifest.json", os.remove, "step_00000003 is no checkpoint: it has no manifest.json"),
    ],
)
def test_damage_is_told_by_file(saved, alone, name, damage, words):
    damage(saved / "step_00000003" / name)
    with pytest.raises(FormatError, match=words):
        load_into(saved, alone)


@pytest.mark.ranks(2)
def test_damage_is_told_alike_on_all_ranks(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    model, optimizer = begin(mesh)
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(1, parts_of(model, optimizer))
        checkpoints.wait()
        if mesh.rank == 0:
            flip(tmp_path / "step_00000001" / "__1_0.distcp")
        told = checkpoints._channel.tell_all(message(lambda: checkpoints.load({"model": model})))
    assert told[0] == told[1]
    assert told[0][0] == "FormatError"
    assert "__1_0.distcp is damaged" in told[0][1]


def test_an_empty_folder_has_no_checkpoints(tmp_path, alone):
    with Checkpoints(tmp_path / "new", alone) as checkpoints:
        assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
        with pytest.raises(FormatError, match=r"there is no checkpoint in .*new"):
            checkpoints.load({})


# What does not fit


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: Net(8),
            "conv.weight is 4x1x3x3x3 float32 in the checkpoint and 8x1x3x3x3 float32",
        ),
        (lambda: Net().double(), "conv.weight is 4x1x3x3x3 float32 in .* and 4x1x3x3x3 float64"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "0.weight is missing in the checkpoint and 2x2"),
    ],
)
def test_weights_that_do_not_fit_are_told_by_name_and_shape(saved, alone, model, words):
    with pytest.raises(ConfigError, match=words):
        load_into(saved, alone, model())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters()),
            "state of Adam, and the optimizer is SGD",
        ),
        (lambda model: torch.optim.Adam([*model.parameters()][::-1]), "6 weights .*another order"),
    ],
)
def test_another_optimizer_is_refused(saved, alone, make, words):
    model = Net()
    with pytest.raises(ConfigError, match=words):
        load_into(saved, alone, model, make(model))


# Faults


@pytest.mark.ranks(2)
def test_a_file_that_cannot_be_written_is_told_on_all_ranks_by_the_next_call(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    model = hs.parallelize(nn.Linear(200, 200), mesh)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(1, {"model": model})
        checkpoints.wait()
        if mesh.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        checkpoints.save(2, {"model": model})
        told = message(lambda: checkpoints.save(3, {"model": model}))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        told = checkpoints._channel.tell_all(told)
        assert checkpoints.steps() == [1]
        checkpoints.save(4, {"model": model})
        assert checkpoints.steps() == [1, 4]
    assert told[0] == told[1]
    assert "step_00000002 was not written" in told[0][1]
    assert "larger than files may be" in told[0][1]


def test_a_folder_that_is_gone_is_told(tmp_path, alone):
    checkpoints = Checkpoints(tmp_path / "run", alone)
    shutil.rmtree(tmp_path / "run")
    checkpoints.save(1, {"values": {}})
    with pytest.raises(FormatError, match=r"step_00000001 was not written: .*No such file"):
        checkpoints.wait()


def lose_a_rank_in_a_save(folder):
    failure_report.REPORT_TIMEOUT_SECONDS = 0.3  # the dead have nothing to say
    mesh = hs.init(depth=2, device="cpu", timeout_seconds=60)
    model = hs.parallelize(nn.Linear(2, 2), mesh)
    checkpoints = Checkpoints(folder, mesh)
    checkpoints.save(1, {"model": model})
    checkpoints.wait()
    if mesh.rank == 1:
        checkpoints_module.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(2, {"model": model})
    return message(checkpoints.close)


def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint_and_nobody_waiting(tmp_path):
    with Team(2) as team:
        kind, words = team.run(lose_a_rank_in_a_save, folder=tmp_path, may_die=[1])[0]
    assert kind == "CommError"
    assert "step_00000002 was not written: rank 0 lost contact while writing" in words
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
