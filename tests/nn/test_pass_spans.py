"""Passes of a program's own loop in a trace, and their layers."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.comm.device_spans import DeviceSpans, collect_all
from hyperslab.comm.message_spans import recorded
from hyperslab.testing import seeded
from hyperslab.trace import Category, Flag, active, load_trace


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    active.stop()


def network():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.Sequential(nn.Identity(), nn.BatchNorm3d(4)),
        nn.LeakyReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(4 * 8, 3),
    ).double()


def train(folder, level, mesh, num_steps=2):
    model = hs.parallelize(network(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = hs.shard(seeded(2, 2, 4, 4, 4), mesh)
    active.start(folder, level=level, rank=mesh.rank)
    for _ in range(num_steps):
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model(x)
    active.stop()
    return load_trace([path for path in folder.iterdir() if f"{mesh.rank:05}" in path.name])


def passes(trace, *categories):
    return [(trace.strings[s["name"]], trace.strings[s["layer"]]) for s in trace.of(*categories)]


def test_passes_and_steps_of_optimizers_are_told(tmp_path):
    trace = train(tmp_path, "coarse", hs.init(device="cpu"))
    step = [("forward", ""), ("backward", ""), ("SGD", "")]
    found = passes(trace, Category.compute, Category.optimizer)
    assert found == [*step, *step, ("forward", "")]
    spans = trace.of(Category.compute, Category.optimizer)
    stops = spans["start"] + spans["duration"]
    assert (stops[:-1] <= spans["start"][1:]).all()


LAYERS = ["0", "1.0", "1.1", "2", "3", "4", "5"]


def test_a_detailed_trace_has_every_layer_forward_and_backward(tmp_path):
    trace = train(tmp_path, "detailed", hs.init(device="cpu"), num_steps=1)
    found = passes(trace, Category.compute)
    forward = [layer for name, layer in found if name == "forward"]
    assert forward == ["", *LAYERS] * 2
    backward = [layer for name, layer in found if name == "backward"]
    # The gradient of an Identity is that of what it was given.
    assert backward[0] == ""
    assert backward[-1] == "0"
    assert "1.0" not in backward
    assert backward == sorted(backward, reverse=True)[-1:] + sorted(backward[1:], reverse=True)
    check_nested(trace, "backward")


def check_nested(trace, name):
    """Layers follow each other within their pass."""
    whole, *parts = [
        (int(s["start"]), int(s["start"] + s["duration"]))
        for s in trace.of(Category.compute)
        if trace.strings[s["name"]] == name
    ]
    assert all(stop <= start for (_, stop), (start, _) in pairwise(parts))
    assert whole[0] <= parts[0][0]
    assert sum(stop - start for start, stop in parts) > 0.3 * (whole[1] - whole[0])


@pytest.mark.ranks(2)
def test_messages_of_layers_are_told_where_they_are_posted_and_awaited(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    trace = train(tmp_path, "detailed", mesh, num_steps=1)
    halos = trace.of(Category.halo)
    on_their_way = halos[halos["flags"] == 0]
    awaited = halos[halos["flags"] == Flag.exposed]
    assert len(on_their_way) == len(awaited) > 0
    assert (halos["nbytes"] > 0).all()
    assert {trace.threads[n].name for n in awaited["thread"]} == {"MainThread"}
    assert all(trace.threads[n].name.startswith("halo messages") for n in on_their_way["thread"])
    assert "0" in {trace.strings[n] for n in halos["layer"]}  # the convolution's
    for wait in awaited:
        stop = wait["start"] + wait["duration"]
        (post,) = on_their_way[on_their_way["start"] + on_their_way["duration"] == stop]
        assert post["start"] <= wait["start"]
        assert post["layer"] == wait["layer"]
    sums = trace.of(Category.all_reduce)
    names = {trace.strings[number] for number in sums["name"]}
    assert {"gradients", "wait for gradients"} <= names
    num_weights = sum(p.numel() for p in network().parameters())
    assert sums["nbytes"][sums["name"] == trace.strings.index("gradients")].sum() == 8 * num_weights


def test_a_module_with_hooks_of_a_trace_computes_the_same_without_one(tmp_path):
    mesh, x = hs.init(device="cpu"), seeded(2, 2, 4, 4, 4)
    torch.manual_seed(0)
    model = hs.parallelize(network(), mesh).eval()
    before = model(hs.shard(x, mesh)).local
    with hs.trace.recording(tmp_path, level="detailed"):
        within = model(hs.shard(x, mesh)).local
    after = model(hs.shard(x, mesh)).local
    assert torch.equal(before, within)
    assert torch.equal(before, after)


class HostEvent:
    """Of a device that does at once what it is told."""

    def record(self):
        self.at = time.perf_counter_ns()

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e6


@pytest.fixture
def device_of_a_kind(monkeypatch):
    """Has the host pass for a GPU."""
    found = {}

    def spans(device):
        if active.recorder is None:
            return None
        return found.setdefault(active.recorder, DeviceSpans(active.recorder, HostEvent))

    for module in ("comm.device_spans", "comm.message_spans", "nn.pass_spans"):
        monkeypatch.setattr(f"hyperslab.{module}.device_spans", spans)


def test_what_a_device_does_is_told_beside_what_the_host_launches(device_of_a_kind, tmp_path):
    trace = train(tmp_path, "detailed", hs.init(device="cpu"), num_steps=1)
    on_device = trace.spans[(trace.spans["flags"] & Flag.device) != 0]
    assert {trace.threads[number].name for number in on_device["thread"]} == {"gpu compute"}
    told = [(trace.strings[s["name"]], trace.strings[s["layer"]]) for s in on_device]
    assert told[: len(LAYERS) + 1] == [("forward", layer) for layer in ("", *LAYERS)]
    assert ("backward", "") in told
    assert ("backward", "0") in told
    assert ("SGD", "") in told
    launched = {trace.strings[number] for number in trace.of(Category.other)["name"]}
    assert launched == {"launch forward", "launch backward", "launch SGD"}
    assert len(trace.of(Category.other)) == len(on_device)
    assert (trace.of(Category.compute, Category.optimizer)["flags"] == Flag.device).all()


def test_a_device_comes_to_messages_when_they_are_posted_and_awaited(device_of_a_kind, tmp_path):
    class Posted:
        def wait(self):
            return "boxes"

    with hs.trace.recording(tmp_path, level="detailed"):
        first = recorded(Posted, Category.halo, "boxes", 12, torch.device("cpu"))
        second = recorded(Posted, Category.halo, "boxes", 13, torch.device("cpu"))
        assert (first.wait(), second.wait()) == ("boxes", "boxes")
    trace = load_trace(tmp_path)
    found = {
        (trace.threads[s["thread"]].name, trace.strings[s["name"]], int(s["nbytes"]))
        for s in trace.spans[(trace.spans["flags"] & Flag.device) != 0]
    }
    wait = "wait for boxes"
    assert {("gpu halo", "boxes", 12), ("gpu halo 1", "boxes", 13)} <= found
    assert {(name, number) for _, name, number in found} == {
        *(("boxes", number) for number in (12, 13)),
        *((wait, number) for number in (12, 13)),
    }
    exposed = trace.spans[trace.spans["flags"] == Flag.device | Flag.exposed]
    assert {trace.strings[number] for number in exposed["name"]} == {wait}


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["coarse", "detailed"])
def test_passes_on_a_gpu_are_timed_by_its_own_events(level, tmp_path):
    mesh = hs.init()
    model = hs.parallelize(network(), mesh)
    x = hs.shard(seeded(2, 2, 4, 4, 4), mesh)
    with hs.trace.recording(tmp_path, level=level):
        for _ in range(3):
            model(x).square().mean().backward()
        torch.cuda.synchronize()
        collect_all()
    trace = load_trace(tmp_path)
    on_gpu = trace.spans[trace.spans["flags"] == Flag.device]
    assert {trace.threads[number].name for number in on_gpu["thread"]} == {"gpu compute"}
    assert (on_gpu["category"] == Category.compute).all()
    passes = [span for span in on_gpu if not span["layer"]]
    assert [trace.strings[span["name"]] for span in passes] == ["forward", "backward"] * 3
    assert (on_gpu["duration"] > 0).all()
    assert bool(on_gpu["layer"].any()) == (level == "detailed")
    launches = [span for span in trace.of(Category.other) if not span["layer"]]
    for launch, span in zip(launches, passes, strict=True):
        assert launch["start"] <= span["start"] + 100_000


@pytest.mark.gpu
def test_passes_in_cuda_graphs_are_recorded_as_ever_and_one_span_each(tmp_path):
    mesh, x = hs.init(), seeded(2, 2, 4, 4, 4)
    torch.manual_seed(0)
    model = hs.parallelize(network().eval(), mesh, cuda_graphs=True)
    expected = model(hs.shard(x, mesh)).local.clone()
    with hs.trace.recording(tmp_path, level="detailed"):
        for _ in range(4):
            assert torch.equal(model(hs.shard(x, mesh)).local, expected)
        torch.cuda.synchronize()
        collect_all()
    trace = load_trace(tmp_path)
    on_gpu = trace.spans[trace.spans["flags"] == Flag.device]
    assert [trace.strings[number] for number in on_gpu["name"]] == ["forward"] * 4
    assert not on_gpu["layer"].any()
