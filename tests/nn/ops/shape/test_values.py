"""Which values there are in a split tensor, and how often."""

import pytest
import torch

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.testing.strategies import Place

X5 = (3, 4, 11, 9, 10)
NUMBERS = (seeded(*X5) * 3).round()


def same(ours, due):
    """Whether all tensors are equal; what is split has the layout of one process's shape."""
    ours, due = (x if isinstance(x, tuple) else (x,) for x in (ours, due))
    assert len(ours) == len(due)
    for mine, theirs in zip(ours, due, strict=True):
        assert mine.dtype == theirs.dtype, (mine.dtype, theirs.dtype)
        torch.testing.assert_close(hs.gather(mine), theirs)


FUNCTIONS = {
    "values": lambda x: torch.unique(x),
    "values of a method": lambda x: x.unique(),
    "truth": lambda x: torch.unique(x > 1, return_inverse=True),
    "places": lambda x: torch.unique(x, return_inverse=True),
    "counts": lambda x: x.unique(return_counts=True),
    "both": lambda x: torch.unique(x.long(), sorted=True, return_inverse=True, return_counts=True),
    "one value": lambda x: torch.unique(x * 0, return_counts=True),
    "bins": lambda x: torch.bincount((x + 20).long().flatten()),
    "more bins": lambda x: (x[:, 0, :, 0, 0] + 20).long().flatten().bincount(minlength=50),
    "weighted bins": lambda x: torch.bincount((x[0, 0, :, 0, 0] + 20).long(), x[0, 1, :, 0, 0]),
    "bins of nothing": lambda x: torch.bincount(x[0, 0, :0, 0, 0].long(), x[0, 0, :0, 0, 0], 3),
    "plain numbers, split weights": lambda x: torch.bincount(
        torch.arange(10) % 3, weights=x[0, 0, 0, 0]
    ),
}  # fmt: skip


def check_functions(place):
    x = hs.shard(NUMBERS, place.mesh(), cuts=place.cuts_of(5))
    for name, function in FUNCTIONS.items():
        try:
            same(function(x), function(NUMBERS))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_values_are_counted_as_in_one_process(run, place):
    run(place, check_functions)


def check_refused(place):
    x = hs.shard(NUMBERS, place.mesh(), cuts=place.cuts_of(5))
    assert torch.unique(x / x).isnan().sum() == torch.unique(NUMBERS / NUMBERS).isnan().sum()
    with pytest.raises(hs.UnsupportedOp, match="there are NaNs"):
        torch.unique(x / x, return_counts=True)
    with pytest.raises(hs.UnsupportedOp, match="it compares slices along a dim"):
        torch.unique(x, dim=2)
    with pytest.raises(RuntimeError, match="numbers in one dim"):
        torch.bincount(x.long())
    with pytest.raises((RuntimeError, hs.CommError), match="1-d non-negative"):
        torch.bincount((x[0, 0, :, 0, 0] * 0 - torch.arange(11)).long())
    assert hs.gather(x).equal(NUMBERS)  # and all ranks go on together


def test_what_cannot_be_counted_is_refused_on_all_ranks(run):
    run(Place({"depth": 2}), check_refused)
