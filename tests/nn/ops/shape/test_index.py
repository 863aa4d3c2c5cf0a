"""Indices of every kind along any dims, on every mesh: values, gradients and what shares memory."""

from importlib import import_module
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)
fetching = import_module("hyperslab.comm.fetch")  # the package has a function of this name
DEPTH = Place({"depth": 3}, {"depth": [0, 5, 5, 11]})

CASES = {
    "number": lambda x: x[1],
    "number from the end": lambda x: x[:, :, -2],
    "numbers": lambda x: x[0, 1, 2, 3, 4] + x[-1, -1, -1, -1, -1],
    "numpy's number": lambda x: x[:, np.int64(2), np.int32(-3)],
    "number in a tensor": lambda x: x[:, :, torch.tensor(4)],
    "slice": lambda x: x[:, 1:3],
    "slices": lambda x: x[1:, :-1, 2:7, -3:, 1:-1],
    "slices with steps": lambda x: x[::2, 1::2, 1::3, ::4, 2:9:3],
    "long step": lambda x: x[:, :, 6::100, :, ::100],
    "empty slice": lambda x: x[:, :, 5:5],
    "slice that ends before it begins": lambda x: x[:, :, 7:2],
    "slice beyond the end": lambda x: x[:, :, 4:100, -100:5],
    "slice by tensors": lambda x: x[:, :, torch.tensor(1) : torch.tensor(8)],
    "slices and numbers": lambda x: x[:, :, 4, 2:7, -1],
    "dots": lambda x: x[..., 3],
    "dots in the middle": lambda x: x[1:, ..., 2:5],
    "dots for nothing": lambda x: x[0, :, ..., :, :, 2],
    "all": lambda x: x[:] + x[...] + x[()],
    "new dims": lambda x: x[None, :, None, :, 2, ..., None],
    "truth": lambda x: x[True],
    "truth and a number": lambda x: x[:, :, 3, True],
    "falsehood": lambda x: x[:, False],
    "list": lambda x: x[:, [2, 0, 0, -1]],
    "list of none": lambda x: x[:, :, []],
    "list of slices": lambda x: x[[slice(None), slice(1, 3), slice(2, -1), ..., None, 4]],
    "list of a list": lambda x: x.transpose(0, 1)[[[0, 2]]],
    "list along depth": lambda x: x[:, :, [10, 0, 5, 5, 4]],
    "list along samples": lambda x: x[[2, 0]],
    "range": lambda x: x[:, :, :, range(2, 6)],
    "indices in order": lambda x: x[:, :, torch.tensor([0, 4, 4, 5, 9])],
    "array": lambda x: x[..., np.array([7, -10, 3])],
    "table": lambda x: x[:, :, torch.tensor([[1, -1, 2], [10, 0, 0]])],
    "table of one column": lambda x: x[:, :, :, [[1], [8], [2]]],
    "table of nothing": lambda x: x[:, :, torch.zeros(3, 0, dtype=torch.long)],
    "indices and a number": lambda x: x[:, :, 4, :, [1, 0, 9]],
    "indices and slices": lambda x: x[1:, [3, 0], ::2, None],
    "pairs": lambda x: x.permute(1, 0, 2, 3, 4)[None, None][[0, 0], [0, 0]],
    "mask": lambda x: x[:, torch.tensor([True, False, True, True])],
    "mask along depth": lambda x: x[:, :, torch.arange(11) % 3 == 1],
    "mask by numpy": lambda x: x[:, np.array([False, False, True, False])],
    "whole tensor of indices": lambda x: (
        x[:, hs.shard(torch.tensor([1, 2]), x.mesh, axes=[None])]
        if isinstance(x, hs.Slab)
        else x[:, [1, 2]]
    ),
    "index of an index": lambda x: x[:, :, 2:9][:, :, 3][..., 1:][:, 1],
    "sliced to nothing and joined": lambda x: torch.cat([x[:, :, :0], x[:, :, 5:]], 2),
    "neighbours": lambda x: x[:, :, 1:] - x[:, :, :-1],
    "every second": lambda x: x[..., ::2] + x[..., 1::2],
}


def check_cases(place, cases):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name in cases:
        try:
            assert_same_as_serial(CASES[name], [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional indexing")
def test_an_index_gives_what_it_gives_in_one_process(run, place):
    run(place, check_cases, list(CASES))


class Index(NamedTuple):
    """An index as hypothesis draws it, of a tensor that was permuted before."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    entries: tuple

    def __call__(self, x):
        return x.permute(self.order)[self.entries]


def entries_along(extent):
    bound = st.none() | st.integers(-extent - 2, extent + 2)
    slices = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
    if not extent:
        return slices
    return st.integers(-extent, extent - 1) | slices


@st.composite
def indices(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    entries = [draw(entries_along(shape[dim])) for dim in order]
    entries = entries[: draw(st.integers(0, len(entries)))]
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        extent = shape[order[dim]]
        entries += [slice(None)] * (dim + 1 - len(entries))
        one = st.integers(-extent, extent - 1)
        entries[dim] = draw(st.lists(one, max_size=6)) if extent else []
    elif draw(st.booleans()) and len(entries) < len(shape):
        entries.append(...)
    for at in draw(st.lists(st.integers(0, len(entries)), max_size=2)):
        entries.insert(at, None)
    return Index(shape, order, tuple(entries))


def check_index(place, index):
    cuts = place.cuts_of(len(index.shape))
    assert_same_as_serial(index, [seeded(*index.shape)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), indices())
def test_any_index_gives_what_it_gives_in_one_process(run, data, index):
    run(data.draw(places(index.shape)), check_index, index)


class Assignment(NamedTuple):
    index: Index
    value: tuple[int, ...] | float
    """The value's shape, or the value."""
    is_split: bool

    def __call__(self, x, *values):
        x = x.permute(self.index.order).clone()
        x[self.index.entries] = values[0] if values else self.value
        return x


@st.composite
def assignments(draw):
    index = draw(indices().filter(lambda i: not any(isinstance(e, list) for e in i.entries)))
    target = torch.zeros(index.shape).permute(index.order)[index.entries].shape
    shape = list(target[draw(st.integers(0, len(target))) :])
    for dim in range(len(shape)):
        shape[dim] = draw(st.sampled_from([1, shape[dim]]))
    value = draw(st.just(tuple(shape)) | st.just(2.5))
    return Assignment(index, value, draw(st.booleans()))


def check_assignment(place, assignment, value_cuts):
    index, value = assignment.index, assignment.value
    tensors = [seeded(*value, seed=3)] if isinstance(value, tuple) else []
    cuts = place.cuts_of(len(index.shape))
    if value_cuts is None:
        inputs, weights, every_cuts = [seeded(*index.shape)], tensors, cuts
    else:
        inputs, weights, every_cuts = [seeded(*index.shape), *tensors], [], [cuts, value_cuts]
    assert_same_as_serial(assignment, inputs, weights, mesh=place.mesh(), cuts=every_cuts)


@examples
@given(st.data(), assignments())
def test_any_assignment_writes_what_it_writes_in_one_process(run, data, assignment):
    place = data.draw(places(assignment.index.shape))
    value_cuts = None
    if assignment.is_split and isinstance(assignment.value, tuple):
        num_dims = len(assignment.value)
        if num_dims <= 5:
            value_cuts = data.draw(cuts_for(assignment.value, place.axes))
    run(place, check_assignment, assignment, value_cuts)


WRITES = {
    "slice": lambda x: x[:, 1:3].mul_(2),
    "slice along depth": lambda x: x[:, :, 2:9].add_(1),
    "slice with steps": lambda x: x[:, :, ::3, 1::2].zero_(),
    "number": lambda x: x[:, 1].neg_(),
    "slice of a slice": lambda x: x[:, :, 2:9][:, 1:][:, :, 1:3, None].fill_(7.0),
    "narrow": lambda x: x.narrow(2, 4, 5).copy_(x[:, :, :5].clone()),
    "parts": lambda x: [part.mul_(n) for n, part in enumerate(x.detach().split(4, 2))],
    "transpose": lambda x: x.transpose(1, 2)[:, 3:5].sub_(1),
    "view": lambda x: x.view(3, 2, 2, *X5[2:])[:, 0].abs_(),
    "unsqueeze": lambda x: x.unsqueeze(2).squeeze(2).unflatten(1, (2, 2)).exp_(),
    "diagonal": lambda x: x.unflatten(1, (2, 2)).diagonal(0, 1, 2).zero_(),
    "unbind": lambda x: x.detach().unbind(1)[2].fill_(3.0),
    "copy": lambda x: x[:, :, 1:4].copy_(seeded(3, 1, 3, 9, 10)),
    "add to a slice": lambda x: x[:, 0:2].__iadd__(x[:, 2:4]),
    "operator": lambda x: exec("x[:, :, 3:7] += 1; x[:, 2] *= 3; x[..., 5:] -= x[..., :5]"),
    "number along depth": lambda x: exec("x[:, :, 4] = 0; x[0, 1, 2, 3, 4] = 5.0; x[-1] = 1"),
    "number in place": lambda x: exec("x[0, 1, 2, 3, 4] = x[0, 1, 2, 3, 4] + 5"),
    "tensor": lambda x: x.__setitem__((slice(None), [0, 3]), seeded(3, 2, 11, 9, 10)),
    "table": lambda x: x.__setitem__((slice(2), [[0], [3]]), seeded(1, 2, 2, 1, 11, 1, 10)),
    "row": lambda x: x.__setitem__((slice(1), slice(None), 6), seeded(9, 10)),
    "itself": lambda x: x.__setitem__((slice(None), slice(None), slice(4, 9)), x[:, :, :5] * 2),
    "mask": lambda x: x.__setitem__(x > 0.5, -1),
    "mask of samples": lambda x: x.__setitem__(torch.tensor([True, False, True]), 2.0),
    "mask of another split": lambda x: x.__setitem__(x.mean((2, 3, 4)) > 0, torch.tensor(0.5)),
    "whole mask": lambda x: x.__setitem__(seeded(*X5, seed=4) > 0, 0),
}
REFUSED_OF_SPLIT_CHANNELS = {
    "number",
    "view",
    "unsqueeze",
    "diagonal",
    "unbind",
    "operator",
    "tensor",
    "table",
}
COPIED = {
    "number along depth": lambda x: x[:, :, 4],
    "select": lambda x: x.select(2, 4),
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(3, -1),
    "unbind": lambda x: x.unbind(2)[3],
    "iteration": lambda x: [*x.transpose(0, 2)][3],
    "part of a copy": lambda x: x[:, :, 4][:, 1:, None],
    "detached": lambda x: x[:, :, 4].detach(),
    "data": lambda x: x[:, :, 4].data,
    "number": lambda x: x[0, 1, 2, 3, 4],
    "expand": lambda x: x[:, :, 4:5].expand(*X5)[:, :, 2],
    "permuted to thin pieces": lambda x: x[:, :, 4:7].transpose(1, 2).reshape(3, 12, 9, 10),
}


def check_writes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name, write in WRITES.items():

        def written(x, write=write):
            x = x * 1.0
            write(x)
            return x

        if "channel" in place.axes and name in REFUSED_OF_SPLIT_CHANNELS:
            continue
        try:
            assert_same_as_serial(written, [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_what_is_written_into_a_part_shows_in_the_whole(run, place):
    run(place, check_writes)


def check_copies(place, mode):
    mesh = place.mesh()
    for part in COPIED.values():
        with mode():
            x = hs.shard(seeded(*X5), mesh, cuts=place.cuts_of(5)) * 1.0
            taken = part(x)
            with pytest.raises(hs.UnsupportedOp, match="writes into a copy of what other ranks"):
                taken += 1
            assert hs.gather(x).equal(seeded(*X5))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_copy_of_what_others_hold_is_not_written_into(run, mode):
    run(DEPTH, check_copies, mode)


def check_stale(place):
    mesh = place.mesh()
    for part in COPIED.values():
        x = hs.shard(seeded(*X5), mesh, cuts=place.cuts_of(5)) * 1.0
        taken = part(x)
        before = hs.gather(taken).clone()
        assert (taken * 2).shape == before.shape
        x.add_(1)
        for use in (lambda t: t * 2, lambda t: torch.cat([t.flatten(), t.flatten()]), hs.gather):
            with pytest.raises(hs.UnsupportedOp, match="has been written into since"):
                use(taken)


def test_a_copy_is_not_read_once_its_origin_has_changed(run):
    run(DEPTH, check_stale)


def flat(x):
    """As a network does before its last layers: it writes into what nobody else can see."""
    x = x * 2
    x = torch.flatten(x, 1)
    x = torch.nn.functional.leaky_relu(x, 0.2, inplace=True)
    x = (x * 3).view(3, 4, -1)
    return x.add_(1)


def check_lonely_copies(place):
    assert_same_as_serial(flat, [seeded(*X5)], mesh=place.mesh(), cuts=place.cuts_of(5))


def test_a_copy_whose_origin_is_gone_is_like_any_other(run, place):
    run(place, check_lonely_copies)


UNMOVED = {
    "slice": lambda x: x[:, :, 2:9],
    "steps": lambda x: x[..., 1::3],
    "narrow": lambda x: x.narrow(2, 3, 5),
    "split": lambda x: x.split(4, 2)[1],
    "chunk": lambda x: x.chunk(3, 2)[1],
    "channel": lambda x: x[:, 2, None],
    "indices in order": lambda x: x[:, :, [0, 3, 3, 6, 10]],
    "mask": lambda x: x[:, :, torch.arange(11) % 2 == 0],
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "expand": lambda x: x.sum(2, keepdim=True).expand_as(x) * x,
    "assignment": lambda x: x.detach().__setitem__((slice(None), slice(None), 4), 1.0),
}


def check_unmoved(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    sent = []

    def post(pieces, sends, receives, *rest):
        sent.extend([*sends, *receives])
        return real(pieces, sends, receives, *rest)

    real, fetching.post_messages = fetching.post_messages, post
    try:
        for function in UNMOVED.values():
            function(x)
        assert not sent
        _ = x[:, :, 4]
        assert sent
    finally:
        fetching.post_messages = real


def test_what_every_rank_has_is_not_sent(run):
    run(DEPTH, check_unmoved)


def check_cuts(place):
    """Slices keep each index with its owner."""
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    assert x[:, :, 4:].layout.splits[2].cuts.bounds == (0, 1, 1, 7)
    assert x[:, :, 1::3].layout.splits[2].cuts.bounds == (0, 2, 2, 4)
    assert x[:, :, :3].layout.splits[2].cuts.bounds == (0, 3, 3, 3)
    assert x[:, :, 4].layout.split_dims == ()
    assert x[:, 1].layout.split_dims == (1,)
    assert x[:, :, [9, 1]].layout.splits[2].cuts.bounds == (0, 1, 1, 2)
    assert x.flip(2).layout == x.roll(3, 2).layout == x.layout


def test_slices_leave_each_index_with_its_owner(run):
    run(DEPTH, check_cuts)


def check_lookups(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    labels = (seeded(*X5, seed=5).abs() * 3).long().clamp(max=4)

    def weighed(x, table):
        mine = hs.shard(labels, mesh, cuts=cuts) if isinstance(x, hs.Slab) else labels
        # With fewer than 32 rows torch would not ask, but take them for a tuple.
        index = mine.permute(2, 3, 4, 0, 1).flatten(0, 2)
        return table[index].sum(-1) * x.permute(2, 3, 4, 0, 1).flatten(0, 2)

    assert_same_as_serial(weighed, [seeded(*X5)], [seeded(5, 2)], mesh=mesh, cuts=cuts)


def test_a_plain_table_is_read_at_the_indices_in_a_slab(run, place):
    run(place, check_lookups)


REFUSED = {
    "number out of range": (
        lambda x: x[:, :, 11],
        IndexError,
        "index 11 is out of range for dim 2",
    ),
    "indices out of range": (
        lambda x: x[:, [0, -5]],
        IndexError,
        "indices from -5 to 0 are out of",
    ),
    "too many": (lambda x: x[0, 0, 0, 0, 0, 0], IndexError, "too many indices"),
    "two dots": (lambda x: x[..., 0, ...], IndexError, "too many indices"),
    "step": (lambda x: x[:, :, ::-1], ValueError, "step must be greater than 0, got -1"),
    "fractions": (lambda x: x[torch.tensor([0.5])], IndexError, "must be integers or bools"),
    "letters": (lambda x: x["a"], TypeError, "cannot be interpreted as an integer"),
    "short mask": (lambda x: x[:, :, torch.tensor([True])], IndexError, r"a mask of shape \(1,\)"),
    "mask": (lambda x: x[x > 0], hs.UnsupportedOp, "it is an index, and it is split"),
    "plain mask": (lambda x: x[seeded(*X5) > 0], hs.UnsupportedOp, "several tensors index it"),
    "two tensors": (lambda x: x[:, [0, 1], [0, 1]], hs.UnsupportedOp, "one of them along dim 2"),
    "list of slices in a tuple": (
        lambda x: x[:, [slice(1)]],
        hs.UnsupportedOp,
        "holds no numbers",
    ),
    "values at a mask": (
        lambda x: x.__setitem__(x > 0, seeded(5)),
        hs.UnsupportedOp,
        "takes one number for all it marks",
    ),
    "values at indices": (
        lambda x: x.__setitem__((slice(None), slice(None), [1, 2]), 1.0),
        hs.UnsupportedOp,
        "tensors of indices meet a split dim",
    ),
    "value of another shape": (
        lambda x: x.__setitem__((0, 0), seeded(2, 11, 9, 10)),
        hs.LayoutError,
        "more dims than what it is assigned to",
    ),
    "value of another extent": (
        lambda x: x.__setitem__(0, seeded(3, 9, 10)),
        RuntimeError,
        "hape",
    ),
    "into a plain tensor": (
        lambda x: torch.zeros(X5).__setitem__(0, x[0]),
        hs.UnsupportedOp,
        "it would write into a plain tensor",
    ),
    "plain table at a few rows": (
        lambda x: torch.zeros(3, 4)[(x[0, 0, :3, 0, 0] > 0).long()],
        hs.UnsupportedOp,
        "as an index it would be taken for a tuple",
    ),
    "narrow beyond": (lambda x: x.narrow(2, 5, 7), hs.LayoutError, "7 indices from 5 on"),
    "no such index": (lambda x: x.select(2, -12), IndexError, "index -12 is out of range"),
    "sizes": (lambda x: x.split([4, 4], 2), hs.LayoutError, "do not add up to the extent 11"),
    "uneven": (lambda x: x.dsplit(2), hs.LayoutError, "2 parts do not divide"),
    "diagonal": (lambda x: x.diagonal(0, 2, 3), hs.UnsupportedOp, "a dim of the diagonal is split"),
    "roll of all": (lambda x: x.roll(1), hs.UnsupportedOp, "moves elements across all dims"),
    "interleaved": (lambda x: x.repeat_interleave(2), hs.UnsupportedOp, "goes across all dims"),
    "expanded": (lambda x: x.expand(3, 4, 12, 9, 10), hs.LayoutError, "cannot expand"),
    "repeated": (lambda x: x.repeat(2), hs.LayoutError, "cannot repeat"),
    "stacked": (lambda x: torch.stack([x, x[0]]), hs.LayoutError, "tensors of one shape"),
    "dim twice": (lambda x: x.flip(2, -3), hs.LayoutError, "name one of them twice"),
    "strided": (lambda x: x.as_strided((2,), (1,)), hs.UnsupportedOp, "as_strided"),
    "taken": (
        lambda x: x.take_along_dim(torch.zeros(X5).long(), 2),
        hs.UnsupportedOp,
        "take_along",
    ),
    "masked": (lambda x: x.masked_select(x > 0), hs.UnsupportedOp, "masked_select"),
    "diagonal blocks": (lambda x: torch.block_diag(x[0, 0, :, 0]), hs.UnsupportedOp, "block_diag"),
    "squeezed in place": (lambda x: x.squeeze_(), hs.UnsupportedOp, "layout is fixed: use squeeze"),
    "transposed in place": (lambda x: x.transpose_(1, 2), hs.UnsupportedOp, "use transpose"),
    "resized": (lambda x: x.resize_(2), hs.UnsupportedOp, "torch.Tensor.resize_ cannot run"),
}


def check_refused(place, name):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    function, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        function(x)
    assert hs.gather(x).equal(seeded(*X5))  # no rank is left with half an exchange


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(DEPTH, check_refused, name)
