"""Recorded passes on several ranks, whose exchanges are replayed too.

Without a GPU the transport's kernels are interpreted, and what stands for a graph runs the recorded
function again, into the same memory.
"""

import copy
import gc
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from host_gpus import use_host_gpus
from torch import nn

import hyperslab as hs
from hyperslab.errors import CommError, ConfigError
from hyperslab.nn.cuda_graphs.graphed import Graphed
from hyperslab.nn.cuda_graphs.recorder import CudaRecorder
from hyperslab.nn.parallel import gradient_averaging
from hyperslab.nn.trial_run import unjournaled
from hyperslab.testing import Team, seeded

ON_GPU = torch.cuda.is_available()
# Triton itself is loaded by the ranks: who loads it here decides how kernels run in other tests.
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton"),
    *([pytest.mark.gpu] if ON_GPU else []),
]
EXTENT = 12
HELD_NBYTES = 1 << 29
"""What a recording holds when it runs out of memory."""


@pytest.fixture(scope="module")
def two():
    with Team(2, timeout_seconds=200) as team:
        yield team


@pytest.fixture(scope="module")
def four():
    with Team(4, timeout_seconds=200) as team:
        yield team


class Again:
    """Runs what was recorded once more, and writes the results where the recorded ones lie."""

    def __init__(self, mesh):
        self.transport = mesh.transport

    practice = staticmethod(nullcontext)
    watch_for_waits = staticmethod(lambda: nullcontext([]))
    follow = staticmethod(lambda: None)

    def record(self, run):
        with self.transport.silence():
            made = run()

        def again():
            with torch.enable_grad(), unjournaled():
                new = run()
            with torch.no_grad():
                for own, other in zip(made, new, strict=True):
                    if own is not None:
                        own.copy_(other)

        return made, again


def meet(**axes):
    if ON_GPU:
        return hs.init(**axes, device="cuda", timeout_seconds=60, transport="device")
    use_host_gpus()
    return hs.init(**axes, device="cpu", timeout_seconds=1e5)  # which is counted in polls there


def with_graphs(module, mesh):
    """``module`` parallelized with recorded passes, and what tells of its passes."""
    module = hs.parallelize(module, mesh)
    state = module.__dict__["_hyperslab"]
    recorder = CudaRecorder(mesh.device) if ON_GPU else Again(mesh)
    replica = state.run
    graphed = Graphed(module, replica.forward, state.mesh, [], recorder, replica)
    replica.forward = graphed
    return module, graphed


def num_recorded(graphed):
    entries = [entry for each in graphed._entries.values() for entry in each]
    return sum(entry.recorded is not None for entry in entries)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3, 2, 1),
        nn.Dropout(0.3), nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    ).double()  # fmt: skip


def batch(mesh, number=0, samples=2):
    """A batch whose pieces have another size on every rank."""
    x = seeded(samples, 3, EXTENT + 1, EXTENT, seed=number).double().to(mesh.device)
    y = seeded(samples, 5, seed=number + 50).double().to(mesh.device)
    return hs.shard(x, mesh), hs.shard(y, mesh)


def train(model, mesh, num_steps=4):
    """Losses of some steps, and what the model has become."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for number in range(num_steps):
        x, y = batch(mesh, number)
        loss = (model(x) * y).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def check_steps(axes, ranks_that_record):
    mesh = meet(**axes)
    model, graphed = with_graphs(make_net(), mesh)
    if mesh.rank not in ranks_that_record:
        graphed._record = lambda *args: None
    found = train(model, mesh)
    assert_same(found, train(hs.parallelize(make_net(), mesh), mesh))
    assert num_recorded(graphed) == int(mesh.rank in ranks_that_record)


@pytest.mark.every(2)
@pytest.mark.parametrize("axes", [{"height": 2}, {"sample": 2}], ids=str)
def test_steps_are_those_without_graphs(two, axes):
    two.run(check_steps, axes, {0, 1})


@pytest.mark.slow  # in the interpreter
def test_four_ranks_record(four):
    four.run(check_steps, {"height": 2, "width": 2}, {0, 1, 2, 3})


def test_a_rank_that_cannot_record_runs_beside_ranks_that_replay(two):
    two.run(check_steps, {"height": 2}, {1})


def check_no_room():
    mesh = meet(height=2)
    model, graphed = with_graphs(make_net(), mesh)
    if mesh.rank == 0:

        def record(run):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:  # as torch.cuda.graph does
                raise RuntimeError("operation failed due to a previous error during capture")

        graphed._recorder.record = record
    found = train(model, mesh)
    assert_same(found, train(hs.parallelize(make_net(), mesh), mesh))
    assert num_recorded(graphed) == mesh.rank
    told = "the GPU ran out of memory when it was recorded"
    assert (told in graphed._told) == (mesh.rank == 0)


@pytest.mark.slow
def test_a_rank_without_memory_for_a_recording_runs_beside_ranks_that_replay(two):
    two.run(check_no_room)


def record_greedily(recorder, run):
    """Asks, in the recording, for memory, and then for more than there is."""

    def greedy():
        sizes = HELD_NBYTES, 1 << 45
        return [*run(), *[torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes]]

    return CudaRecorder.record(recorder, greedy)


def check_greed():
    """A recording that runs out of memory half-way, on rank 0."""
    mesh = meet(height=2)
    train(hs.parallelize(make_net(), mesh), mesh)  # loads what stays
    before = held(mesh)
    model, graphed = with_graphs(make_net(), mesh)
    if mesh.rank == 0:
        graphed._recorder.record = partial(record_greedily, graphed._recorder)
    found = train(model, mesh)
    assert num_recorded(graphed) == mesh.rank
    if mesh.rank == 0:
        assert "the GPU ran out of memory when it was recorded" in graphed._told
    plain = hs.parallelize(make_net(), mesh)
    assert_same(found, train(plain, mesh))
    del model, graphed, plain
    assert held(mesh) < before + HELD_NBYTES // 2  # cuBLAS keeps some for every stream


def held(mesh):
    """Bytes of the GPU that this process keeps."""
    gc.collect()
    torch.cuda.synchronize(mesh.device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(mesh.device)


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_a_recording_that_runs_out_of_memory_leaves_none_behind(two):
    two.run(check_greed)


def grads(model):
    return [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]


def both(mesh, passes=3):
    """A model with recorded passes, after some of them, and the same without."""
    model, graphed = with_graphs(make_net().eval(), mesh)
    for number in range(passes):
        x, y = batch(mesh, number)
        (model(x) * y).sum().backward()
    model.zero_grad()
    assert num_recorded(graphed) == 1
    return model, hs.parallelize(make_net().eval(), mesh)


def check_no_sync():
    mesh = meet(height=2)
    found = []
    for model in both(mesh):
        with model.no_sync():
            x, y = batch(mesh, 7)
            (model(x) * y).sum().backward()
        part = grads(model)
        x, y = batch(mesh, 8)
        (model(x) * y).sum().backward()
        found.append((part, grads(model)))
    assert_same(*found)


@pytest.mark.slow
def test_gradients_of_replays_within_no_sync_are_averaged_later(two):
    two.run(check_no_sync)


def check_gradients_that_are_seen():
    mesh = meet(height=2)
    found = []
    for model in both(mesh):
        seen = []
        weight = model[0].weight
        x, y = batch(mesh, 7)
        seen += torch.autograd.grad((model(x) * y).sum(), [*model.parameters()])
        handle = weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        x, y = batch(mesh, 8)
        (model(x) * y).sum().backward()
        handle.remove()
        x, y = batch(mesh, 9)
        ((model(x) * y).sum() + weight.square().sum() * (mesh.rank + 1)).backward()
        found.append([each.cpu() for each in seen] + grads(model))
    assert_same(*found)


@pytest.mark.slow
def test_whoever_sees_a_gradient_of_a_replay_sees_the_mean(two):
    two.run(check_gradients_that_are_seen)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.heads = nn.ModuleList([nn.Conv2d(4, 1, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        return [head(F.relu(self.stem(x))) for head in self.heads]


def check_other_outputs():
    mesh = meet(height=2)
    torch.manual_seed(0)
    model, _ = with_graphs(TwoHeads().double(), mesh)
    for number in range(3):
        out = model(batch(mesh, number)[0])
        (out[0].sum() + out[1].sum()).backward()
    with pytest.raises(ConfigError, match=r"outputs \[2\] alone .* of \[0, 1\] or \[0, 1, 2\]"):
        model(batch(mesh)[0])[2].sum().backward()


@pytest.mark.slow
def test_a_backward_pass_that_was_not_recorded_is_refused(two):
    two.run(check_other_outputs)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x, dtype=torch.int64):
        return self.conv(x), (x > 0).sum(dtype=dtype)


def check_integers():
    mesh = meet(height=2)
    model, graphed = with_graphs(Counts().double(), mesh)
    x = batch(mesh)[0]
    expected = int((hs.gather(x) > 0).sum())
    for dtype, recorded in ((torch.int16, 0), (torch.int64, 1)):
        for _ in range(3):
            assert int(model(x, dtype)[1]) == expected
        assert num_recorded(graphed) == recorded


def test_a_pass_with_messages_between_hosts_runs_as_ever(two):
    two.run(check_integers)


def check_difference():
    mesh = meet(height=2)
    model, _ = both(mesh)
    x, y = batch(mesh, 7)
    out = model(x)
    if mesh.rank:
        out = out * 2
    (out * y).sum().backward()
    model(x)
    with pytest.raises(CommError, match="ranks ran different operators"):
        model(x)


@pytest.mark.slow
def test_ranks_that_differ_around_replays_are_told(two):
    two.run(check_difference)


def check_copy():
    mesh = meet(height=2)
    model, _ = both(mesh)
    twin = copy.deepcopy(model)
    x, y = batch(mesh, 7)
    for each in (model, twin):
        (each(x) * y).sum().backward()
    assert_same(grads(twin), grads(model))


@pytest.mark.slow
def test_a_copy_trains_by_itself(two):
    two.run(check_copy)


def check_messages():
    mesh = meet(height=2)
    model, _ = both(mesh)
    sent = []

    def note(leaves, mesh):
        sent.append(leaves)
        return message(leaves, mesh)

    message, gradient_averaging._Message = gradient_averaging._Message, note
    x, y = batch(mesh, 7)
    try:
        (model(x) * y).sum().backward()
        assert not sent  # what a replay brings are means
        ((model(x) * y).sum() + model[0].weight.sum() * mesh.rank).backward()
        assert sent
    finally:
        gradient_averaging._Message = message


def test_gradients_of_replays_are_averaged_once(two):
    two.run(check_messages)


def check_dropped_parts():
    """Parts of gradients that were dropped before the pass that would have averaged them."""
    mesh = meet(height=2)
    model, _ = both(mesh)
    x, y = batch(mesh, 7)
    with model.no_sync():
        (model(x) * y).sum().backward()
    model.zero_grad()
    sent = []
    message = gradient_averaging._Message
    gradient_averaging._Message = lambda leaves, mesh: sent.append(leaves) or message(leaves, mesh)
    try:
        (model(x) * y).sum().backward()
    finally:
        gradient_averaging._Message = message
    assert not sent


@pytest.mark.slow
def test_parts_that_were_dropped_are_not_averaged_again(two):
    two.run(check_dropped_parts)
