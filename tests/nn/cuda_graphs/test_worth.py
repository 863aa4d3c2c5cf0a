"""``cuda_graphs="auto"``: passes are recorded where it is worth it, and others run as ever."""

import logging
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.nn.cuda_graphs.graphed import Graphed
from hyperslab.nn.cuda_graphs.worth import CudaMeter, PassCost
from hyperslab.testing import seeded

GIB = 2**30
HOST_BOUND = PassCost(host_ms=3, gpu_ms=3.2, kept_nbytes=1 * GIB, free_nbytes=9 * GIB)


class Again:
    """Stands for a graph: runs what was recorded once more, into the same memory."""

    def __init__(self):
        self.num_recorded = 0

    practice = staticmethod(nullcontext)
    watch_for_waits = staticmethod(lambda: nullcontext([]))
    follow = staticmethod(lambda: None)

    def record(self, run):
        made = run()
        self.num_recorded += 1

        def again():
            with torch.enable_grad():
                new = run()
            with torch.no_grad():
                for own, other in zip(made, new, strict=True):
                    own.copy_(other)

        return made, again


class Costs:
    """What passes are said to take; None while a GPU would be at it."""

    def __init__(self, *found):
        self.found = [*found]

    def begin(self):
        pass

    end = begin

    def read(self):
        return self.found.pop(0)


def parallel(*costs):
    """A module whose passes are said to take that, and what records them."""
    mesh = hs.init(device="cpu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 2)).double()
    module = hs.parallelize(net, mesh)
    recorder = Again()
    run = Graphed(module, module.forward, mesh, [], recorder, None, lambda: Costs(*costs))
    return run, recorder


def batch(number=0):
    return seeded(2, 3, 6, 8, seed=number).double()


def step(run, number=0):
    out = run(batch(number))
    out.square().sum().backward()
    return out


def num_recorded_in_steps(*costs, num_steps=4):
    run, recorder = parallel(*costs)
    for number in range(num_steps):
        step(run, number)
    return recorder.num_recorded


def test_passes_are_recorded_where_the_host_is_slow():
    assert num_recorded_in_steps(HOST_BOUND) == 2  # forward and backward


def test_nothing_is_recorded_before_the_measured_pass_has_ended_on_the_gpu():
    assert num_recorded_in_steps(None, HOST_BOUND, num_steps=3) == 0
    assert num_recorded_in_steps(None, HOST_BOUND) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_ms": 7}, "the GPU took 7.0 ms for a forward pass and the host 3.0 ms"),
        ({"free_nbytes": int(1.9 * GIB)}, "it keeps 1.00 GiB, .* 1.90 GiB were free"),
    ],
)
def test_passes_that_are_not_worth_it_run_as_ever_and_a_line_says_why(caplog, changes, words):
    with caplog.at_level(logging.INFO, "hyperslab"):
        assert num_recorded_in_steps(HOST_BOUND._replace(**changes)) == 0
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert re.search(f"runs without CUDA graphs: {words}", line.getMessage())


def test_what_a_recorded_pass_would_refuse_is_seen_before(caplog):
    run, recorder = parallel(HOST_BOUND)
    with caplog.at_level(logging.INFO, "hyperslab"):
        for number in range(5):
            loss = run(batch(number)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert recorder.num_recorded == 0
    assert "a forward pass has several backward passes" in caplog.text


def test_gradients_of_gradients_are_seen_before(caplog):
    run, recorder = parallel(HOST_BOUND)
    with caplog.at_level(logging.INFO, "hyperslab"):
        for number in range(4):
            x = batch(number).requires_grad_()
            (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
    assert recorder.num_recorded == 0
    assert "gradients of its gradients are taken" in caplog.text


def test_what_begins_later_is_an_error_as_ever():
    run, _ = parallel(HOST_BOUND)
    for number in range(3):
        step(run, number)
    loss = run(batch()).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward pass through one forward pass"):
        loss.backward()


@pytest.mark.parametrize("wrong", ["yes", "AUTO", 2, None])
def test_other_words_are_refused(wrong):
    with pytest.raises(ConfigError, match="cuda_graphs must be True, False or 'auto', got"):
        hs.parallelize(nn.Linear(2, 2), hs.init(device="cpu"), cuda_graphs=wrong)


def test_on_cpus_auto_does_nothing():
    mesh = hs.init(device="cpu")
    model = hs.parallelize(nn.Linear(2, 2), mesh, cuda_graphs="auto")
    assert not isinstance(model.__dict__["_hyperslab"].run, Graphed)


@pytest.mark.gpu
def test_on_a_gpu_short_passes_are_recorded_and_long_ones_are_not():
    mesh = hs.init(device="cuda")
    torch.manual_seed(0)
    short = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    long = nn.Conv3d(32, 32, 5, padding=2)
    for net, shape, recorded in ((short, (4, 8), 1), (long, (1, 32, 160, 160, 160), 0)):
        model = hs.parallelize(net, mesh, cuda_graphs="auto")
        for _ in range(5):
            model(hs.shard(torch.ones(shape, device="cuda"), mesh)).square().mean().backward()
            torch.cuda.synchronize()
        entries = [e for each in model.__dict__["_hyperslab"].run._entries.values() for e in each]
        assert sum(entry.recorded is not None for entry in entries) == recorded


@pytest.mark.gpu
def test_a_meter_does_not_wait_and_tells_what_a_pass_kept():
    meter = CudaMeter(torch.device("cuda", 0))
    x = torch.ones(1 << 20, device="cuda")
    meter.begin()
    torch.cuda._sleep(50_000_000)
    kept = x + 1
    meter.end()
    assert meter.read() is None
    torch.cuda.synchronize()
    cost = meter.read()
    assert cost.host_ms < cost.gpu_ms
    assert cost.kept_nbytes == kept.nbytes
    assert cost.free_nbytes > 0
