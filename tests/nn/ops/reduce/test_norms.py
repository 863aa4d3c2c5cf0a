"""Batch, instance, group and layer norms on every mesh: values, gradients, running statistics."""

import copy
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, averaged, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X4, X3, X2 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10), (3, 4)
MEAN, VAR = seeded(4, seed=5), seeded(4, seed=6).square() + 0.1

CASES = {
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), X5, ((4,), (4,))),
    "batch, no weights": (lambda x: F.batch_norm(x, None, None, training=True), X5, ()),
    "batch, weight alone": (
        lambda x, w: F.batch_norm(x, None, None, weight=w, training=True, eps=0.1),
        X5,
        ((4,),),
    ),
    "batch, bias alone": (
        lambda x, b: F.batch_norm(x, None, None, bias=b, training=True),
        X4,
        ((4,),),
    ),
    "batch, evaluated": (lambda x, w, b: F.batch_norm(x, MEAN, VAR, w, b), X5, ((4,), (4,))),
    "batch, vectors": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), X2, ((4,), (4,))),
    "instance": (lambda x: F.instance_norm(x, eps=0.1), X5, ()),
    "instance, weights": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=0.2),
        X3,
        ((4,), (4,)),
    ),
    "instance, evaluated": (
        lambda x: F.instance_norm(x, MEAN, VAR, use_input_stats=False),
        X5,
        (),
    ),
    "instance, torch's own eps": (lambda x: F.instance_norm(x), X5, ()),
    "instance, then changed in place": (lambda x: F.instance_norm(x).mul_(2), X5, ()),
    "batch, then changed in place": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True).mul_(2),
        X4,
        ((4,), (4,)),
    ),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), X5, ((4,), (4,))),
    "group, then changed in place": (lambda x: F.relu(F.group_norm(x, 2), inplace=True), X4, ()),
    "group of one channel": (lambda x, w: F.group_norm(x, 4, weight=w), X4, ((4,),)),
    "group of all channels": (lambda x: torch.group_norm(x, 1, eps=0.1), X4, ()),
    "group, vectors": (lambda x, w, b: F.group_norm(x, 2, w, b), X2, ((4,), (4,))),
    "group of all rows": (lambda x: F.group_norm(x.transpose(1, 2), 1), X5, ()),
    "groups of a row": (lambda x, w: F.group_norm(x.transpose(1, 2), 11, w), X5, ((11,),)),
    "layer, by weights made of the input": (
        lambda x: F.layer_norm(x, X5[2:], x.mean((0, 1)), x.square().mean((0, 1))),
        X5,
        (),
    ),
    "layer over volumes": (
        lambda x, w, b: F.layer_norm(x, (11, 9, 10), w, b),
        X5,
        ((11, 9, 10), (11, 9, 10)),
    ),
    "layer over samples": (
        lambda x, w, b: F.layer_norm(x, [4, 11, 9, 10], w, b),
        X5,
        ((4, 11, 9, 10), (4, 11, 9, 10)),
    ),
    "root mean squares over volumes": (
        lambda x, w: F.rms_norm(x, (11, 9, 10), w, 0.1),
        X5,
        ((11, 9, 10),),
    ),
    "root mean squares over rows": (lambda x: torch.rms_norm(x, (10,)), X5, ()),
    "root mean squares over samples": (lambda x, w: F.rms_norm(x, X4[1:], w), X4, (X4[1:],)),
    "layer over the batch": (lambda x: F.layer_norm(x, X4), X4, ()),
    "layer over rows": (lambda x, w: torch.layer_norm(x, (10,), w, eps=0.1), X5, ((10,),)),
    "layer, bias alone": (lambda x, b: F.layer_norm(x, (9, 10), bias=b), X4, ((9, 10),)),
    "layer over channels last": (
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 4, 1), (4,), w, b).permute(0, 4, 1, 2, 3),
        X5,
        ((4,), (4,)),
    ),
}


def check_case(place, name):
    function, shape, weights = CASES[name]
    assert_same_as_serial(
        function,
        [seeded(*shape) + 3],
        [seeded(*weight, seed=1) for weight in weights],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(shape)),
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_norm_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


class Norm(NamedTuple):
    """A norm as hypothesis draws it; ``size`` is its number of groups, or of normalized dims."""

    kind: str
    shape: tuple[int, ...]
    size: int
    eps: float

    def weights(self):
        return self.shape[-self.size :] if self.kind == "layer" else self.shape[1:2]

    def __call__(self, x, weight, bias):
        if self.kind == "batch":
            return F.batch_norm(x, None, None, weight, bias, True, eps=self.eps)
        if self.kind == "instance":
            return F.instance_norm(x, weight=weight, bias=bias, eps=self.eps)
        if self.kind == "group":
            return F.group_norm(x, self.size, weight, bias, self.eps)
        return F.layer_norm(x, self.weights(), weight, bias, self.eps)


@st.composite
def norms(draw):
    extents = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    shape = (draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 4])), *extents)
    kind = draw(st.sampled_from(["batch", "instance", "group", "layer"]))
    if kind != "layer":  # torch refuses to normalize one number by itself, or no instance
        shape = (max(shape[0], int(kind == "instance")), shape[1], shape[2] + 1, *shape[3:])
    sizes = {"group": st.sampled_from([n for n in (1, 2, 4) if shape[1] % n == 0])}
    size = draw(sizes.get(kind, st.integers(1, len(shape))))
    return Norm(kind, shape, size, draw(st.sampled_from([1e-5, 0.1])))


def check_norm(place, norm, input_grads):
    assert_same_as_serial(
        norm,
        [seeded(*norm.shape) * 2 - 5],
        [seeded(*norm.weights(), seed=1), seeded(*norm.weights(), seed=2)],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(norm.shape)),
        input_grads=input_grads,
        tolerance=1e-9,  # a norm of two numbers alike amplifies rounding
    )


@examples
@given(st.data(), norms(), st.booleans())
def test_any_norm_equals_that_of_one_process(run, data, norm, input_grads):
    run(data.draw(places(norm.shape)), check_norm, norm, input_grads)


MODULES = {
    "batch": nn.BatchNorm3d(4, dtype=torch.float64),
    "batch, cumulative": nn.BatchNorm3d(4, momentum=None, dtype=torch.float64),
    "batch, without memory": nn.BatchNorm3d(4, track_running_stats=False, dtype=torch.float64),
    "instance": nn.InstanceNorm3d(4, affine=True, track_running_stats=True, dtype=torch.float64),
    "group": nn.GroupNorm(2, 4, dtype=torch.float64),
    "layer": nn.LayerNorm((11, 9, 10), dtype=torch.float64),
}


def check_module(place, name):
    serial, ours = copy.deepcopy(MODULES[name]), copy.deepcopy(MODULES[name])
    mesh, cuts = place.mesh(), place.cuts_of(5)
    close = torch.testing.assert_close
    for step in range(3):
        x = seeded(*X5, seed=step) * (step + 1) + step
        out = ours(hs.shard(x, mesh, cuts=cuts))
        (out * seeded(*X5, seed=9)).sum().backward()
        expected = serial(x)
        (expected * seeded(*X5, seed=9)).sum().backward()
        close(hs.gather(out), expected)
    for key, value in serial.state_dict().items():
        close(ours.state_dict()[key], value)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        close(averaged(mine, mesh), theirs.grad)
    x = seeded(*X5, seed=7)
    close(hs.gather(ours.eval()(hs.shard(x, mesh, cuts=cuts))), serial.eval()(x))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_keeps_the_statistics_of_one_process(run, place, name):
    run(place, check_module, name)


def check_spatial_statistics(place):
    mesh = replace(place.mesh(), batch_stats="spatial")
    x = seeded(4, *X5[1:])
    out = hs.gather(F.batch_norm(hs.shard(x, mesh), None, None, training=True))
    groups = x.split(4 // mesh.grid.size("sample"))
    expected = torch.cat([F.batch_norm(group, None, None, training=True) for group in groups])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "axes", [{"sample": 2}, {"sample": 2, "depth": 2}, {"depth": 3}, {"sample": 4}], ids=str
)
def test_spatial_statistics_are_those_of_one_group_of_samples(run, axes):
    run(Place(axes), check_spatial_statistics)


def check_offset(place):
    x = seeded(*X5) + 1e6  # where a sum of squares would cancel
    mesh = place.mesh()
    out = F.batch_norm(hs.shard(x, mesh, cuts=place.cuts_of(5)), None, None, training=True)
    expected = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(hs.gather(out), expected, rtol=1e-8, atol=1e-8)


def test_a_large_mean_costs_no_precision(run, place):
    run(place, check_offset)


def check_bfloat16(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x, weight, bias = seeded(*X5).bfloat16() + 2, torch.rand(4), torch.rand(4)
    running = [torch.zeros(4), torch.ones(4)], [torch.zeros(4), torch.ones(4)]
    weight[:], bias[:] = 0.5, 0.25
    out = F.batch_norm(hs.shard(x, mesh, cuts=cuts), *running[0], weight, bias, True)
    expected = F.batch_norm(x, *running[1], weight, bias, True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(hs.gather(out), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(running[0], running[1], rtol=1e-4, atol=1e-4)


def test_statistics_of_short_floats_are_kept_in_float32(run, place):
    run(place, check_bfloat16)


REFUSED = {
    "one value": (
        lambda x: F.batch_norm(x.mean((0, 2, 3, 4), keepdim=True), None, None, training=True),
        ValueError,
        "[Ee]xpected more than 1 value per channel",
    ),
    "no statistics": (
        lambda x: F.batch_norm(x, None, None),
        hs.ConfigError,
        "batch_norm needs running statistics",
    ),
    "no statistics of instances": (
        lambda x: F.instance_norm(x, use_input_stats=False),
        hs.ConfigError,
        "instance_norm needs running statistics",
    ),
    "one weight for all": (
        lambda x: F.batch_norm(x, None, None, torch.ones(1), training=True),
        hs.LayoutError,
        r"batch_norm: \(1,\) is not one number for each channel of an input of shape \(3, 4, 11",
    ),
    "groups that do not divide": (
        lambda x: F.group_norm(x, 3),
        hs.LayoutError,
        "4 channels do not divide into 3 groups",
    ),
    "other dims": (
        lambda x: F.layer_norm(x, (9, 11)),
        hs.LayoutError,
        r"layer_norm over \(9, 11\) does not fit the shape \(3, 4, 11, 9, 10\)",
    ),
    "weight of other dims": (
        lambda x: F.layer_norm(x, (9, 10), torch.ones(1, 10)),
        hs.LayoutError,
        r"layer_norm over \(9, 10\) with a weight of shape \(1, 10\)",
    ),
    "root mean squares of another shape": (
        lambda x: F.rms_norm(x, (9, 11)),
        hs.LayoutError,
        r"rms_norm over \(9, 11\) does not fit the shape \(3, 4, 11, 9, 10\)",
    ),
    "a plain tensor and split weights": (
        lambda x: F.layer_norm(seeded(*X5), X5[2:], x.mean((0, 1))),
        hs.UnsupportedOp,
        r"layer_norm cannot run on a plain tensor of shape \(3, 4, 11, 9, 10\) with weights that",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)
    torch.testing.assert_close(hs.gather(F.instance_norm(x)), F.instance_norm(seeded(*X5)))


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)


EMPTY = {
    "no samples": (slice(0, 0),),
    "no rows": (slice(None), slice(None), slice(3, 3)),
    "no columns": (slice(None), slice(None), slice(None), slice(2, 2)),
}
EMPTY_NORMS = {
    "batch": lambda x, w: F.batch_norm(x, None, None, w, training=True),
    "instance": F.instance_norm,
    "group": lambda x, w: F.group_norm(x, 2, w),
    "layer": lambda x, w: F.layer_norm(x, x.shape[1:]),
    "layer over rows": lambda x, w: F.layer_norm(x, x.shape[3:]),
    "root mean squares": lambda x, w: F.rms_norm(x, x.shape[1:]),
}


def check_empty(place, batch_stats):
    mesh = replace(place.mesh(), batch_stats=batch_stats)
    for cut in EMPTY.values():
        for norm in EMPTY_NORMS.values():
            x, w = seeded(3, 4, 6, 5).requires_grad_(), torch.ones(4, dtype=torch.float64)
            whole = hs.shard(x, mesh)
            out = norm(whole[cut] * 2, w if norm is not F.instance_norm else None)
            assert tuple(out.shape) == x[cut].shape
            (out.sum() + whole.sum()).backward()
            torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("axes", [{"height": 2}, {"sample": 2}], ids=str)
@pytest.mark.parametrize("batch_stats", ["global", "spatial"])
def test_a_norm_of_nothing_is_nothing(run, axes, batch_stats):
    run(Place(axes), check_empty, batch_stats)


def statistics_after_checkpoint(place, is_last):
    """Those of a norm in a checkpoint, which computes it again in the backward pass."""
    torch.manual_seed(0)
    norm, after = nn.BatchNorm3d(4).double(), nn.Identity() if is_last else nn.Sigmoid()
    x = seeded(3, 4, 11, 9, 10).requires_grad_()
    given = x if place is None else hs.shard(x, place.mesh(), cuts=place.cuts_of(5))
    out = checkpoint(lambda t: after(norm(t * 2)), given, use_reentrant=False)
    (out * out * out).sum().backward()
    return [norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.weight.grad]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_checkpoint_updates_statistics_as_often_as_in_one_process(run, place, is_last):
    due = statistics_after_checkpoint(None, is_last)
    for ours in run(place, statistics_after_checkpoint, is_last):
        torch.testing.assert_close(ours[:3], due[:3])
    assert due[2] == 2
