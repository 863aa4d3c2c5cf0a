"""The arithmetic of times, on machines with round numbers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hyperslab.layout import Grid, Layout, Split, Window, cut_evenly, plan_windows
from hyperslab.planner.cost import Costs, Job
from hyperslab.planner.machine import Link, Machine
from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Cut, Shards

SAME = Window(3, 1, 1, 1)
MACHINE = Machine(
    name="round",
    gpu="round",
    memory_nbytes=1e9,
    bytes_per_second=1e9,
    flops_per_second={"fp32": 1e9, "tf32": 1e9, "bf16": 1e9},
    kernel_seconds=1e-9,
    launch_seconds=1e-9,
    step_seconds=1e-9,
    half_channels=1e-9,
    variation=1e-9,
    fuses=False,
    gpus_per_node=4,
    inside=Link(1e-3, 1e6),
    between=Link(1e-2, 1e5),
    nics_per_node=2,
    trees=False,
    host_bytes_per_second=1e6,
    files_bytes_per_second=1e6,
    all_files_bytes_per_second=4e6,
    disk_bytes_per_second=1e6,
)


def network(num_weights=0, num_tensors=1, size=32):
    """Two convolutions of planes."""
    layers = (
        Layer("a", "conv2d", "conv", (INPUT,), (8, size, size), (SAME, SAME), flops=1000 * size),
        Layer("b", "conv2d", "conv", (0,), (4, size, size), (SAME, SAME), flops=1000 * size),
    )
    return Network("planes", (2, size, size), layers, num_weights, num_tensors)


def costs(machine=MACHINE, batch=8, **options):
    options = {"precision": "fp32", "source": "none"} | options
    net = options.pop("net", None) or network()
    return Costs(Job(net, batch, **options), machine)


def cut(sample=1, channel=1, height=1, width=1):
    return Cut((sample, channel, 1, height, width))


# Halos


def received(sizes, windows, shape, rank):
    """The elements that a rank of a grid receives for a convolution, by the plans it runs."""
    axes = ("depth", "height", "width")
    splits = [
        Split(axis, cut_evenly(extent, num)) if num > 1 else None
        for axis, extent, num in zip(axes, shape[1:], sizes, strict=True)
    ]
    plan = plan_windows(
        Grid((1, 1, *sizes)),
        rank,
        Layout((1, *shape), (None, None, *splits)),
        (None, None, *windows),
    )
    return sum(math.prod(m.box.shape) for m in plan.exchange.receives)


@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(6, 14)] * 3),
    st.sampled_from([SAME, Window(5, 1, 2, 1), Window(3, 2, 1, 1), Window(2, 2, 0, 1)]),
)
def test_halo_bytes_bound_what_ranks_receive(sizes, extents, window):
    windows, shape = (window,) * 3, (2, *extents)
    made = tuple(window.output_extent(extent) for extent in extents)
    net = Network("", shape, (Layer("", "conv", "conv", (INPUT,), (2, *made), windows),), 0)
    job = costs(net=net, batch=1)
    nbytes = job.layer(Shards(net, Cut((1, 1, *sizes)), 1), 0).nbytes
    most = max(received(sizes, windows, shape, rank) for rank in range(math.prod(sizes)))
    assert nbytes >= 2 * 4 * most  # forward and backward


def test_halo_bytes_are_those_of_a_rank_amid_others():
    net = Network(
        "", (2, 12, 12, 12), (Layer("", "c", "conv", (INPUT,), (2, 12, 12, 12), (SAME,) * 3),), 0
    )
    nbytes = costs(net=net).layer(Shards(net, Cut((1, 1, 3, 3, 3)), 1), 0).nbytes
    assert nbytes == 2 * 4 * 2 * (6**3 - 4**3)
    assert nbytes == 2 * 4 * received((3, 3, 3), (SAME,) * 3, (2, 12, 12, 12), 13)


def test_a_face_is_sent_at_the_rate_of_its_link():
    layer = costs(batch=1).layer(Shards(network(), cut(height=4), 1), 0)
    rows = 2 * 32 * 2 * 4  # channels, width, above and below, bytes
    assert layer.exchange == pytest.approx(2 * (1e-3 + rows / 1e6))


@pytest.mark.parametrize(
    ("sizes", "axis", "rate", "latency"),
    [
        ({"height": 4}, "height", 1e6, 1e-3),  # inside a node
        ({"sample": 2, "height": 4}, "height", 1e6, 1e-3),
        ({"height": 8}, "height", 1e5, 1e-2),  # one rank at each border, with a NIC to itself
        ({"height": 4, "width": 2}, "height", 1e5, 1e-2),  # two ranks, two NICs
        ({"height": 4, "width": 4}, "height", 5e4, 1e-2),  # four ranks share two NICs
        ({"height": 4, "width": 4}, "width", 1e6, 1e-3),
    ],
)
def test_ranks_that_leave_a_node_share_its_nics(sizes, axis, rate, latency):
    link = costs()._link(cut(**sizes), axis)
    assert (link.bytes_per_second, link.latency_seconds) == (rate, latency)


def test_an_exchange_is_hidden_behind_a_long_kernel():
    slow = replace(MACHINE, flops_per_second=dict.fromkeys(MACHINE.flops_per_second, 1e3))
    shards = Shards(network(), cut(height=4), 1)
    assert costs(slow, batch=1).layer(shards, 0).exposed == pytest.approx(0, abs=1e-8)
    exposed = costs(MACHINE, batch=1).layer(shards, 0)
    assert 0.9 * exposed.exchange < exposed.exposed <= exposed.exchange


# Sums over ranks


def test_a_ring_within_a_node():
    assert costs().all_reduce(4, 4e6) == pytest.approx(2 * 3 / 4 * 4 + 1e-3 + 6 * 1e-3)


def test_a_ring_over_nodes_leaves_each_node_once_in_each_round():
    seconds = costs().all_reduce(16, 2e5)
    moved = 2 * 15 / 16 * 2e5 / 2e5  # by both NICs
    assert seconds == pytest.approx(moved + 1e-2 + 8 * 1e-2 + 22 * 1e-3)


def test_trees_take_fewer_hops():
    trees = costs(replace(MACHINE, trees=True))
    assert trees.all_reduce(64, 0) == pytest.approx(1e-2 + 2 * 4 * 1e-2 + 2 * 1e-3)
    assert trees.all_reduce(64, 0) < costs().all_reduce(64, 0)


def test_hops_may_take_less_than_messages():
    quick = replace(MACHINE, inside=Link(1e-3, 1e6, 1e-5))
    assert costs(quick).all_reduce(4, 0) == pytest.approx(1e-3 + 6e-5)


def test_ranks_with_other_channels_share_the_nics():
    alone, shared = costs().all_reduce(16, 2e5), costs().all_reduce(16, 2e5, local=2)
    assert shared - alone == pytest.approx(2 * 15 / 16 * (2e5 / 1e5 - 1) + 8 * (1e-2 - 1e-3))


@pytest.mark.parametrize(
    ("sizes", "local"),
    [
        ({"sample": 16}, 4),
        ({"sample": 8, "channel": 2}, 2),
        ({"sample": 2, "channel": 8}, 1),
        ({"channel": 2, "height": 4}, 4),
        ({"channel": 4, "height": 2}, 2),
    ],
)
def test_how_many_ranks_of_the_same_channels_lie_in_a_node(sizes, local):
    assert costs()._local(cut(**sizes)) == local


@given(st.integers(2, 512), st.floats(0, 1e9), st.booleans())
def test_more_bytes_or_ranks_never_take_less(num, nbytes, trees):
    one = costs(replace(MACHINE, trees=trees))
    assert one.all_reduce(num, 2 * nbytes) >= one.all_reduce(num, nbytes)
    assert one.all_reduce(2 * num, nbytes) >= one.all_reduce(num, nbytes) * 0.999


def test_gradients_are_hidden_but_for_the_last_message():
    net = network(num_weights=1000, num_tensors=10)
    job = costs(net=net, bucket_nbytes=0)
    whole = job.all_reduce(4, 4000, messages=10)
    assert job._gradients(cut(sample=4), 4000, backward=0.0) == pytest.approx(whole)
    assert job._gradients(cut(sample=4), 4000, backward=1e-2) == pytest.approx(whole - 1e-2)
    last = job.all_reduce(4, 0)
    assert job._gradients(cut(sample=4), 4000, backward=9.0) == pytest.approx(last)


def test_buckets_are_fewer_messages_than_tensors():
    net = network(num_weights=1000, num_tensors=10)
    one, each = costs(net=net, bucket_nbytes=4000), costs(net=net, bucket_nbytes=0)
    assert each._gradients(cut(sample=4), 4000, 0) - one._gradients(cut(sample=4), 4000, 0) == (
        pytest.approx(9 * 7e-3)
    )


def test_one_rank_sums_nothing():
    step = costs(net=network(num_weights=1000)).step(cut())
    assert step.gradients == step.reductions == step.halos == 0


# Kernels


def test_the_slowest_of_many_gpus_is_waited_for():
    varied = replace(MACHINE, variation=0.1)
    one, four, many = (costs(varied, batch=64).step(cut(sample=n)) for n in (1, 4, 64))
    assert one.slowest == pytest.approx(0, abs=1e-9)
    assert four.slowest / four.kernels == pytest.approx(0.103, abs=0.003)  # of normal numbers
    assert many.slowest / many.kernels == pytest.approx(0.235, abs=0.003)


def test_processes_take_turns_on_cores():
    shared = replace(MACHINE, cores_per_node=2)
    for ranks, turns in ((1, 1), (2, 1), (4, 2), (8, 2)):
        own = costs(batch=8).step(cut(sample=ranks)).kernels
        assert costs(shared, batch=8).step(cut(sample=ranks)).kernels == pytest.approx(turns * own)


def test_measured_times_win():
    measured = Costs(Job(network(), 8), MACHINE, lambda shards, number, precision: (0.25, 0.5))
    assert measured.step(cut()).kernels == 2 * 0.75


def test_few_channels_slow_a_convolution():
    half = replace(MACHINE, half_channels=8)
    assert costs(half)._efficiency(Shards(network(), cut(), 1), 0, network().layers[0]) == (
        pytest.approx(2 / 10 * 8 / 16)
    )
    cut_in_two = Shards(network(), cut(channel=2), 1)  # inputs are gathered, outputs cut
    assert costs(half)._efficiency(cut_in_two, 0, network().layers[0]) == (
        pytest.approx(2 / 10 * 4 / 12)
    )


@given(st.sampled_from(["sample", "height", "width"]), st.integers(0, 3))
def test_more_ranks_never_have_more_to_compute(axis, power):
    one, more = (costs(batch=16).step(cut(**{axis: 2**p})).kernels for p in (power, power + 1))
    assert more <= one


# Data


def test_reading_is_hidden_behind_a_step_that_takes_longer():
    sample = 2 * 32 * 32 * 2  # bytes
    step = costs(batch=1, source="disk").step(cut())
    rest = step.seconds - step.data
    assert step.seconds == pytest.approx(sample / 1e6)
    assert costs(batch=1).step(cut()).seconds == pytest.approx(rest)


def test_all_nodes_share_the_file_system():
    net, sample = network(), 2 * 32 * 32 * 2
    job = costs(net=net, batch=32, source="files")
    assert job._data(Shards(net, cut(sample=4), 32)) == pytest.approx(32 * sample / 1e6)
    assert job._data(Shards(net, cut(sample=32), 32)) == pytest.approx(4 * sample / 5e5)


def test_a_whole_sample_goes_through_one_gpu_before_the_step():
    whole = 2 * 32 * 32 * 2
    job = costs(batch=1, source="memory", whole_samples=True)
    step = job.step(cut(height=8))
    inside, between = whole * 3 / 8 / 1e6, whole * 4 / 8 / 1e5
    assert step.data == pytest.approx(whole / 1e6 + inside + between)
    assert costs(batch=1, source="memory").step(cut(height=8)).data < step.data


def test_the_parts_of_a_step_are_all_of_it():
    step = costs(net=network(num_weights=100), source="files").step(cut(sample=2, height=4), ["a"])
    assert step.seconds == sum(step.parts.values())
    assert step.recompute == step.layers[0].forward > 0
