import pytest
import torch
from torch import nn

from hyperslab.errors import FormatError
from hyperslab.planner.calibrate import measurable, measure_rank
from hyperslab.planner.cost import Costs, Job
from hyperslab.planner.machine import Link, load_machine
from hyperslab.planner.measured import Calibration, KernelRow, load, path_of, save
from hyperslab.planner.read_network import read_network
from hyperslab.planner.shards import Cut, Shards
from hyperslab.planner.stages import signature, stages


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.LeakyReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.pool(self.act(self.norm(self.conv(x))))
        return y + self.last(y)


@pytest.fixture(scope="module")
def network():
    return read_network(Block(), (2, 8, 8), "block")


def about(**more):
    return Calibration("a GPU", "2.13", "0.1", **more)


def test_layers_that_are_computed_together_are_a_stage(network):
    ops = [[network.layers[number].op for number in stage] for stage in stages(network)]
    assert ops == [["conv2d"], ["batch_norm", "leaky_relu", "max_pool2d"], ["conv2d"], ["add"]]


def test_what_was_measured_wins_and_is_scaled_by_size(network):
    stage = stages(network)[0]
    rows = (KernelRow(1, 32, 1.0, 2.0), KernelRow(1, 128, 4.0, 8.0))
    times = about(kernels={f"fp32: {signature(network, stage)}": rows}).kernel_times

    def of(sizes, batch=1):
        return times(Shards(network, Cut(sizes), batch), 0, "fp32")

    assert of((1, 1, 1, 1, 1)) == pytest.approx((4.0, 8.0))
    assert of((1, 1, 1, 2, 1)) == pytest.approx((2.0, 4.0))
    assert of((1, 1, 1, 1, 1), batch=2) == pytest.approx((8.0, 16.0))
    assert of((1, 1, 1, 8, 1)) == pytest.approx((1.0, 2.0))  # no less than the smallest
    assert times(Shards(network, Cut((1,) * 5), 1), 1, "fp32") is None
    assert times(Shards(network, Cut((1,) * 5), 1), 0, "bf16") is None
    job = Job(network, 1, "fp32", "sgd", source="none")
    costs = Costs(job, load_machine("laptop"), times)
    assert costs.step(Cut((1,) * 5)).layers[0].forward == pytest.approx(4.0)


def test_times_of_as_many_ranks_at_once_are_taken(network):
    name = f"fp32: {signature(network, stages(network)[0])}"
    rows = (KernelRow(1, 128, 4.0, 8.0), KernelRow(4, 32, 3.0, 6.0))
    times = about(kernels={name: rows}).kernel_times
    assert times(Shards(network, Cut((1, 1, 1, 4, 1)), 1), 0, "fp32") == pytest.approx((3.0, 6.0))


def test_a_machine_with_measured_values_tells_so():
    base = load_machine("laptop")
    found = about(links={2: Link(1e-4, 1e9)}, values={"bytes_per_second": 7.0}).machine(base, 2)
    assert (found.inside, found.bytes_per_second) == (Link(1e-4, 1e9), 7.0)
    assert "measured" in found.sources["bytes_per_second"]
    assert found.memory_nbytes == base.memory_nbytes


def test_later_measurements_are_added(tmp_path):
    path = tmp_path / "a" / "b.json"
    first, second = KernelRow(1, 8, 1.0, 2.0), KernelRow(2, 8, 3.0, 4.0)
    save(about(kernels={"x": (first,)}), path)
    save(about(kernels={"x": (second,)}, links={2: Link(1.0, 2.0)}), path)
    save(about(kernels={"y": (first._replace(forward=9.0),)}), path)
    found = load(path)
    assert found.kernels == {"x": (first, second), "y": (first._replace(forward=9.0),)}
    assert found.links == {2: Link(1.0, 2.0)}
    save(about(kernels={"x": (second._replace(numel=16),)}), path)
    assert load(path).kernels["x"] == (first, second._replace(numel=16))


def test_a_damaged_calibration_is_named(tmp_path):
    path = tmp_path / "torn.json"
    path.write_text('{"kernels": ')
    with pytest.raises(FormatError, match=r"torn.json is no calibration"):
        load(path)


def test_a_file_name_has_no_odd_characters():
    assert path_of("NVIDIA H200 (80%)", "2.11+cu130", "0.1").name == (
        "NVIDIA-H200--80--_2.11-cu130_0.1.json"
    )


@pytest.mark.ranks(2)
def test_two_ranks_calibrate_at_the_same_time():
    network = read_network(Block(), (2, 8, 8), "block")
    found = measure_rank(network, "fp32", 2, "cpu", (1, 2))
    assert {*found.kernels} == {f"fp32: {name}" for name in measurable(network)}
    rows = found.kernels[f"fp32: {signature(network, stages(network)[0])}"]
    assert [(row.ranks, row.numel) for row in rows] == [(2, 128), (2, 64)]
    assert all(row.forward > 0 and row.backward > 0 for row in rows)
    assert found.links[2].latency_seconds > 0
    assert torch.__version__ == found.torch
