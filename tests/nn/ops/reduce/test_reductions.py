"""Reductions over any dims, on every mesh."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)

CASES = {
    "sum": (lambda x: x.sum(), X5),
    "mean": (lambda x: torch.mean(x), X5),
    "sum of a dim": (lambda x: x.sum(2), X5),
    "sum of the last dim": (lambda x: torch.sum(x, -1), X5),
    "sum of dims": (lambda x: x.sum((0, 2, 4), True), X5),
    "mean of a volume": (lambda x: x.mean(dim=[2, 3, 4], keepdim=True), X5),
    "mean of no dims is of all": (lambda x: x.mean([]) + x.sum(()) + x.sum(dim=None), X5),
    "numpy's names": (lambda x: x.mean(axis=(2, 3), keepdims=True) + x.sum(axis=2).mean(), X5),
    "numpy's integers": (lambda x: x.sum(np.int64(2)) + x.sum((np.int64(2),)), X5),
    "by name": (lambda x: torch.sum(input=x, dim=2, keepdim=False, out=None), X5),
    "in another dtype": (lambda x: x.sum((2, 3), dtype=torch.float64), X5),
    "one after the other": (lambda x: x.mean((2, 4)).sum(2) * x.sum() * x.mean(0).sum(), X5),
    "mean absolute deviation": (
        lambda x: (x - x.mean((0, 2, 3), keepdim=True)).abs().mean((0, 2, 3)),
        X4,
    ),
    "numbers among others": (lambda x: torch.nansum(holey(x), (2, 0)) + holey(x).nansum(), X5),
    "their mean": (lambda x: torch.nanmean(holey(x), 2, True) + holey(x).nanmean(), X5),
    "product": (lambda x: torch.prod(x, 2) + x.prod(dim=-1, keepdim=True).sum(2), X4),
    "product of all": (lambda x: (x / 2 + 1).prod(), X3),
    "product with a zero": (lambda x: (x * (x != x.amax())).prod(2), X4),
    "product with zeros": (lambda x: x.relu().prod(2) + x.relu().prod(), X4),
    "variances": (lambda x: x.var() + torch.var(x, 2) + x.var((0, 2), False, True).sum(2), X5),
    "variances, corrected": (lambda x: x.var(2, correction=3) + torch.var(x, False), X5),
    "deviations": (lambda x: x.std(2) + torch.std(x, dim=[0, 4], keepdim=True).sum(2), X5),
    "deviations of what is all alike": (lambda x: (x * 0 + x.detach().sum()).std(2), X5),
    "moments": (lambda x: sum(torch.var_mean(x, 2)) + sum(torch.std_mean(x, (0, 2))), X5),
    "far from zero": (lambda x: (x + 1e6).var((0, 2, 3, 4)), X5),
    "to a size": (lambda x: x.sum_to_size(3, 1, 11, 1, 10) + x.sum_to_size((9, 1)), X5),
    "pool to one": (lambda x: F.adaptive_avg_pool3d(x, 1), X5),
    "pool to ones": (lambda x: F.adaptive_avg_pool3d(input=x, output_size=(1, 1, 1)), X5),
    "pool to one 2-d": (lambda x: F.adaptive_avg_pool2d(x, [1, 1]), X4),
    "pool to one 1-d": (lambda x: F.adaptive_avg_pool1d(x, 1), X3),
    "pool module": (nn.AdaptiveAvgPool3d(1), X5),
}


def holey(x):
    return x.masked_fill(x < -0.5, torch.nan)


def check_cases(place):
    mesh = place.mesh()
    for name, (function, shape) in CASES.items():
        cuts = place.cuts_of(len(shape))
        tolerance = 1e-5 if name == "far from zero" else 1e-10  # as far as 1e6 + x is exact
        try:
            assert_same_as_serial(
                function, [seeded(*shape)], mesh=mesh, cuts=cuts, tolerance=tolerance
            )
        except Exception as error:
            error.add_note(name)
            raise


def test_a_reduction_equals_that_of_one_process(run, place):
    run(place, check_cases)


class Reduction(NamedTuple):
    """A reduction as hypothesis draws it."""

    kind: str
    shape: tuple[int, ...]
    dims: object
    keepdim: bool

    def __call__(self, x):
        if self.kind == "norm":
            return x.norm(3, self.dims, self.keepdim)
        return getattr(x, self.kind)(dim=self.dims, keepdim=self.keepdim)


KINDS = ["sum", "mean", "nansum", "var", "std", "amax", "amin", "logsumexp", "norm"]


@st.composite
def reductions(draw):
    kind = draw(st.sampled_from(KINDS))
    least = {"sum": 0, "nansum": 0, "logsumexp": 0, "var": 2, "std": 2}.get(kind, 1)
    shape = tuple(draw(st.lists(st.integers(least, 6), min_size=1, max_size=5)))
    dim = st.integers(-len(shape), len(shape) - 1)
    fewest = 1 if kind in ("var", "std", "logsumexp") else 0  # torch fails, or its gradient
    dims = st.lists(dim, min_size=fewest, unique_by=lambda d: d % len(shape)).map(tuple)
    dims = draw(dim | dims)
    return Reduction(kind, shape, dims, draw(st.booleans()))


def check_reduction(place, reduction):
    cuts = place.cuts_of(len(reduction.shape))
    assert_same_as_serial(reduction, [seeded(*reduction.shape)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), reductions())
def test_any_reduction_equals_that_of_one_process(run, data, reduction):
    run(data.draw(places(reduction.shape)), check_reduction, reduction)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    x = (seeded(*X5) * 5).round()
    for dtype in (torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16):
        for dims in (None, 2, (0, 1, 2, 3, 4)):
            slab, whole = hs.shard(x.to(dtype), mesh, cuts=cuts), x.to(dtype)
            out = hs.gather(slab.sum(dims))
            assert out.dtype == whole.sum(dims).dtype
            torch.testing.assert_close(out, whole.sum(dims), rtol=0.01, atol=0.01)
    ones = hs.shard(torch.ones(X5, dtype=torch.bfloat16), mesh, cuts=cuts)
    assert float(ones.mean()) == 1  # where a sum in bfloat16 would stop at 256
    assert float(ones.sum()) == float(torch.ones(X5, dtype=torch.bfloat16).sum())
    assert ones.mean((2, 3)).dtype == torch.bfloat16
    assert ones.mean(dtype=torch.float64).dtype == torch.float64
    assert hs.shard(x.int(), mesh, cuts=cuts).mean(dtype=torch.float32).dtype == torch.float32
    assert type(ones.sum()) is torch.Tensor  # a number is no longer split


def test_dtypes_are_those_of_one_process(run, place):
    run(place, check_dtypes)


def check_truths(place):
    mesh, cuts = place.mesh(), place.cuts_of(4)
    x = (seeded(*X4) * 2).round()
    for dtype in (torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.bool):
        whole = x.to(dtype)
        slab = hs.shard(whole, mesh, cuts=cuts)
        for function in (
            lambda x: x.any(), lambda x: x.all(), lambda x: torch.any(x, 2),
            lambda x: torch.all(x, dim=(0, 2), keepdim=True), lambda x: (x == x).all(-1),
            lambda x: x.any(()), lambda x: x.all(dim=[]),
            lambda x: x.count_nonzero(), lambda x: torch.count_nonzero(x, dim=(2, 0)),
        ):  # fmt: skip
            out, expected = hs.gather(function(slab)), function(whole)
            assert out.dtype == expected.dtype
            assert torch.equal(out, expected)
    assert torch.equal(slab, slab)
    assert not torch.equal(slab, hs.shard(~whole, mesh))
    slab = hs.shard(x, mesh, cuts=cuts)
    assert slab.allclose(x + 1e-9)
    assert not torch.allclose(slab, x.where(x != x.amax(), 0))
    assert not slab.equal(x[:1])


def test_truths_and_counts_equal_those_of_one_process(run, place):
    run(place, check_truths)


def check_numbers_agree(place):
    mesh = place.mesh()
    x = hs.shard(seeded(*X5), mesh, cuts=place.cuts_of(5))
    return float(x.square().mean())


def test_every_rank_gets_the_same_number(run, place):
    assert len(set(run(place, check_numbers_agree))) == 1


REFUSED = {
    "no such dim": (lambda x: x.sum(5), IndexError, "dim 5 is out of range"),
    "one dim twice": (lambda x: x.sum((2, -3)), RuntimeError, "(multiple times|more than once)"),
    "mean of integers": (lambda x: x.int().mean(), (TypeError, RuntimeError), "dtype"),
    "out": (
        lambda x: torch.sum(x, 2, out=torch.empty(1)),
        hs.UnsupportedOp,
        "torch.sum cannot run .* out= is not supported",
    ),
    "mean of what integers are numbers": (lambda x: x.int().nanmean(), TypeError, "nanmean wants"),
    "variance of integers": (lambda x: x.int().var(2), RuntimeError, "floating point"),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)


def check_whole_dims(place):
    """A pool to any size along dims that every rank holds whole."""
    assert_same_as_serial(
        lambda x: F.adaptive_avg_pool3d(x, (1, 4, None)), [seeded(*X5)], mesh=place.mesh()
    )


def test_whole_dims_are_pooled_to_any_size(run):
    run(Place({"sample": 2, "depth": 2}), check_whole_dims)
