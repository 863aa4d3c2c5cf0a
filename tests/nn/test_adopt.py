"""Plain tensors that become Slabs when a Slab is written into them."""

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

X5 = (3, 4, 11, 9, 10)
DEPTH = Place({"depth": 2}, {"depth": [0, 3, 11]})


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def labels_of(x):
    return (x[:, :1].abs() * 2).long().clamp(max=4)


def accumulated(x):
    out = torch.ones(X5, dtype=torch.float64)
    out += x * x
    out -= x[:, :1]
    out *= 2
    return out


CASES = {
    "one-hot": lambda x: (
        zeros(3, 5, *X5[2:]).scatter_(dim=1, index=labels_of(x), value=1) * x.sum()
    ),
    "scattered": lambda x: zeros(3, 5, *X5[2:]).scatter_(1, labels_of(x), x[:, 1:2]) * 3,
    "added where there is something": lambda x: torch.full(
        (3, 5, *X5[2:]), 0.5, dtype=x.dtype
    ).scatter_add_(1, labels_of(x), x[:, :1]),
    "accumulated": accumulated,
}
ROWS = {"added at": lambda x: zeros(3, 6, *X5[2:]).index_add_(1, torch.tensor([5, 0, 2, 2]), x)}


def check_case(place, name):
    cuts = place.cuts_of(5)
    assert_same_as_serial((CASES | ROWS)[name], [seeded(*X5)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_one_process_writes(run, place, name):
    run(place, check_case, name)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_written_along_a_whole_dim(run, place_of_whole_channels, name):
    run(place_of_whole_channels, check_case, name)


def check_use_afterwards(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    out = zeros(*X5)
    same = out
    out += x
    assert isinstance(out, hs.Slab)
    assert "has become a Slab" in repr(same)
    for use in (
        lambda: same + 1, lambda: torch.ones(3) * same, lambda: x + same, lambda: same.shape,
        lambda: same.sum(), lambda: np.asarray(same), lambda: torch.stack([same]),
        lambda: same.scatter_(1, labels_of(x), 1), lambda: same[0],
        lambda: torch.nn.Parameter(same),
    ):  # fmt: skip
        with pytest.raises(hs.UnsupportedOp, match="use what the writing function returned"):
            use()


def test_the_plain_tensor_cannot_be_used_any_more(run):
    run(DEPTH, check_use_afterwards)


KEPT = {
    "a view": lambda: zeros(4, *X5)[0],
    "an alias": lambda: ALIASED.detach(),
    "an array's memory": lambda: torch.from_numpy(np.zeros(X5)),
    "an operand of a graph": lambda: zeros(*X5).requires_grad_() * 1,
    "a parameter": lambda: torch.nn.Parameter(zeros(*X5), requires_grad=False),
    "another shape": lambda: zeros(3, 4, 1, 9, 10),
}
ALIASED = zeros(*X5)


def check_kept(place, name):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    target = KEPT[name]()
    before = target.detach().clone()
    with pytest.raises(hs.UnsupportedOp, match=r"scatter_ .*into a plain one.*not write in place"):
        target.scatter_(1, x.long() * 0, 1)
    with pytest.raises(hs.UnsupportedOp, match=r"add_ .*into a plain one"):
        target += x
    assert target.detach().equal(before)


@pytest.mark.parametrize("name", KEPT)
def test_what_others_see_is_not_written_into(run, name):
    run(DEPTH, check_kept, name)


def check_whole(place):
    """What no axis splits is written as ever, and the tensor stays what it is."""
    x = hs.shard(seeded(3, 4), place.mesh())
    out = zeros(3, 5)
    assert out.scatter_(1, x.long() * 0, 1) is out
    assert out.equal(zeros(3, 5).scatter_(1, torch.zeros(3, 4, dtype=torch.long), 1))
    out[:, :4].add_(x)
    assert out[:, 1:4].equal(seeded(3, 4)[:, 1:])


def test_a_tensor_that_no_axis_splits_is_written_in_place(run):
    run(DEPTH, check_whole)


def check_in_a_graph(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))

    def one_hot(x):
        out = torch.zeros((3, 5, *X5[2:]), dtype=x.dtype)
        out.scatter_(1, labels_of(x), 1)
        return out

    with pytest.raises(Exception, match="into a plain one"):
        torch.compile(one_hot, backend="aot_eager", fullgraph=True)(x)


def test_a_compiled_function_is_refused(run):
    run(DEPTH, check_in_a_graph)
