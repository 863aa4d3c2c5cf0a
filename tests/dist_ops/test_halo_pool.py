"""Activations and pools of pieces with halos: whichever ranks fuse them, the numbers are right."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st

import hyperslab as hs
from hyperslab.kernels import act_pool, fused
from hyperslab.testing import Team, assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

MIN_NUMEL = 600


class Call(act_pool.Call):
    """By plain torch. Keeps y itself for the backward pass."""

    def run(self, y, *, keeps, out=None):
        RUNS.append((tuple(y.shape), self.slope))
        return self.pooled(y), y.clone() if keeps else None

    def run_backward(self, grad, kept):
        leaf = kept.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.pooled(leaf), leaf, grad)[0]

    def pooled(self, y):
        kind, *sizes, counts_padding, extra = self.pool
        ends = [n for end in reversed(extra) for n in (0, end)]
        lowest = -torch.inf if kind == "max" else 0.0
        y = F.pad(act_pool.activate(y, self.slope), ends, value=lowest)
        run = getattr(F, f"{kind}_pool{y.ndim - 2}d")
        return run(y, *sizes) if kind == "max" else run(y, *sizes, False, counts_padding)


RUNS = []


@contextmanager
def fusing(wanted=True):
    """Has CPU tensors that are not small take the paths of fused kernels."""
    RUNS.clear()

    def pays(x):
        return wanted and type(x) is torch.Tensor and x.ndim > 3 and x.numel() >= MIN_NUMEL

    with (
        patch.object(fused, "pays", pays),
        patch.object(act_pool, "is_supported", lambda *args: act_pool._refusal(*args) is None),
        patch.object(act_pool, "Call", Call),
    ):
        yield


class Network(NamedTuple):
    """A convolution, an activation and a pool, as hypothesis draws them."""

    kind: str
    shape: tuple[int, ...]
    slope: float | None
    in_place: bool
    options: dict

    def __call__(self, x, weight):
        num_dims = len(self.shape) - 2
        y = getattr(F, f"conv{num_dims}d")(x, weight)
        if self.slope is not None:
            y = F.leaky_relu(y, self.slope, self.in_place) if self.slope else F.relu(y)
        return getattr(F, f"{self.kind}_pool{num_dims}d")(y, **self.options)


@st.composite
def networks(draw):
    kind, num_dims = draw(st.sampled_from(["max", "avg"])), draw(st.integers(2, 3))
    kernel = draw(st.tuples(*[st.integers(1, 3)] * num_dims))
    options = {
        "kernel_size": kernel,
        "stride": tuple(draw(st.integers(1, k + 1)) for k in kernel),
        "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
        "ceil_mode": draw(st.sampled_from([False, False, False, True])),
    }
    if kind == "avg":
        options["count_include_pad"] = draw(st.sampled_from([True, True, False]))
    extents = draw(st.tuples(*[st.integers(3, 12)] * num_dims))
    shape = (draw(st.integers(1, 2)), 2, *extents)
    slope = draw(st.sampled_from([None, 0.0, 0.2, 3.0]))
    return Network(kind, shape, slope, draw(st.booleans()), options)


@st.composite
def cases(draw):
    network = draw(networks())
    place = draw(places(network.shape))
    return network, place, draw(st.booleans())


def check_network(place, network, are_last):
    weight = seeded(3, 2, *(1,) * (len(network.shape) - 2), seed=2)
    x = seeded(*network.shape)
    if are_last:
        last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        x = x.to(memory_format=last)
    cuts = place.cuts_of(len(network.shape))
    with fusing():
        assert_same_as_serial(network, [x], [weight], mesh=place.mesh(), cuts=cuts)


COSMOFLOW = {"kernel_size": 3, "stride": 2, "padding": 1}
BORDERS = Network("avg", (2, 2, 12, 5, 6), 0.2, True, COSMOFLOW)
CORNERS = Network("max", (2, 2, 12, 9, 10), 0.2, False, COSMOFLOW)


@example((BORDERS, Place({"depth": 2}), False))
@example((BORDERS, Place({"depth": 3}, {"depth": [0, 5, 9, 12]}), True))
@example((BORDERS, Place({"depth": 3}, {"depth": [0, 6, 6, 12]}), True))
@example((CORNERS, Place({"height": 2, "width": 2}, {"height": [0, 3, 9]}), True))
@settings(max_examples=12, deadline=None)
@given(cases())
def test_any_network_gives_the_numbers_of_one_process(run, case):
    network, place, are_last = case
    run(place, check_network, network, are_last)


def check_runs(place, kind):
    mesh = place.mesh()
    x = hs.shard(seeded(2, 2, 12, 6, 6), mesh, cuts=place.cuts)
    with fusing():
        getattr(F, f"{kind}_pool3d")(F.leaky_relu(x, 0.2), 3, 2, 1)
    return RUNS


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_the_piece_itself_is_pooled_and_a_thin_window_beside_it(run, kind):
    runs = run(Place({"depth": 2}), check_runs, kind)
    assert runs == [[((2, 2, 6, 6, 6), 0.2)], [((2, 2, 6, 6, 6), 0.2), ((2, 2, 3, 6, 6), 1.0)]]


def check_and_count(place, network, is_without=None):
    mesh = place.mesh()
    x, weight = seeded(*network.shape), seeded(3, 2, 1, 1, 1, seed=2)
    with fusing(wanted=mesh.rank != is_without):
        assert_same_as_serial(network, [x], [weight], mesh=mesh, cuts=place.cuts)
    return len(RUNS)


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_ranks_with_small_pieces_exchange_the_same_as_those_that_fuse(run, kind):
    network = BORDERS._replace(kind=kind)
    counts = run(Place({"depth": 3}, {"depth": [0, 5, 8, 12]}), check_and_count, network)
    assert counts == [2, 0, 2]  # forward, an interior and a strip


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_a_rank_that_was_started_without_fused_kernels_gets_the_same_numbers(run, kind):
    network = CORNERS._replace(kind=kind)
    counts = run(Place({"depth": 2, "width": 2}), check_and_count, network, 1)
    assert [count > 0 for count in counts] == [True, False, True, True]


def compare_on_gpu(network):
    mesh = hs.init(depth=2, device="cuda", timeout_seconds=60)
    x, weight = seeded(*network.shape), seeded(3, 2, 1, 1, 1, seed=2)
    run = act_pool.Call.run
    with (
        patch.object(fused, "MIN_NUMEL", 0),
        patch.object(fused, "defers_pieces", lambda x: False),
        patch.object(act_pool.Call, "run", autospec=True, side_effect=run) as calls,
    ):
        assert_same_as_serial(network, [x], [weight], mesh=mesh)
    return calls.call_count, fused.is_measured(mesh.device)


@pytest.mark.gpu
def test_kernels_pool_pieces_with_halos_on_a_gpu():
    with Team(2, timeout_seconds=120) as team:
        for network in (BORDERS, CORNERS, BORDERS._replace(slope=None)):
            found = team.run(compare_on_gpu, network)
            assert found in ([(1, True), (2, True)], [(0, False), (0, False)])
