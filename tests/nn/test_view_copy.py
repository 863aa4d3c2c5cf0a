"""Writing into parts of tensors: it shows wherever it shows in torch, or is refused."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import event, given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import seeded
from hyperslab.testing.strategies import places

examples = settings(max_examples=12, deadline=None)


class Step(NamedTuple):
    name: str
    args: tuple


class Chain(NamedTuple):
    """Functions one after the other, each of which may give a view."""

    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    written: int
    """Which result is written into; the others then show it, or not."""

    def __call__(self, x):
        results = [x]
        for name, args in self.steps:
            results.append(getattr(results[-1], name)(*args))
        results[self.written].mul_(-2)
        return results


@st.composite
def steps(draw, shape):
    num = len(shape)
    dim = draw(st.integers(0, num - 1))
    extent = shape[dim]
    a, b = sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent))))
    sliced = (slice(None),) * dim + (slice(a, b, draw(st.sampled_from([1, 1, 2]))),)
    arguments = {
        "permute": (draw(st.permutations(range(num))),),
        "__getitem__": (sliced,),
        "narrow": (dim, a, b - a),
        "flatten": (min(dim, num - 1), num - 1),
        "contiguous": (),
        "unsqueeze": (dim,),
        "squeeze": (),
        "detach": (),
        "reshape": ((-1, *shape[2:]) if num > 1 and 0 not in shape[2:] else shape,),
        "view": (shape,),
        "unflatten": (dim, (1, extent) if extent % 2 else (extent // 2, 2)),
    }
    if extent:
        arguments["select"] = (dim, draw(st.integers(0, extent - 1)))
    name = draw(st.sampled_from(sorted(arguments)))
    return Step(name, arguments[name])


@st.composite
def chains(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    x = torch.zeros(shape)
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        if not x.ndim:
            break
        drawn.append(draw(steps(tuple(x.shape))))
        x = getattr(x, drawn[-1].name)(*drawn[-1].args)
    return Chain(shape, tuple(drawn), draw(st.integers(0, len(drawn))))


def check_chain(place, chain, grads):
    """All results, after the write, are those of one process, or somebody refuses."""
    mesh, cuts = place.mesh(), place.cuts_of(len(chain.shape))
    plain = chain(seeded(*chain.shape).requires_grad_(grads) * 1.0)
    x = hs.shard(seeded(*chain.shape).requires_grad_(grads), mesh, cuts=cuts) * 1.0
    try:
        results = chain(x)
    except hs.UnsupportedOp:
        return "refused"
    for ours, theirs in zip(results, plain, strict=True):
        try:
            whole = hs.gather(ours)
        except hs.UnsupportedOp:
            continue
        torch.testing.assert_close(whole, theirs)
    return "written"


@examples
@given(st.data(), chains(), st.booleans())
def test_what_is_written_shows_where_it_shows_in_one_process(run, data, chain, grads):
    verdicts = run(data.draw(places(chain.shape)), check_chain, chain, grads)
    assert len(set(verdicts)) == 1
    event(verdicts[0])


@pytest.mark.ranks(2)
def test_a_part_of_a_detached_tensor_is_a_copy_too():
    mesh = hs.init(depth=2, device="cpu")
    y = hs.shard(seeded(2, 3, 8, 4, 4), mesh) * 2
    for alias in (y.detach(), y.data):
        with pytest.raises(hs.UnsupportedOp, match="it writes into a copy"):
            alias[:, :, 0].zero_()


@pytest.mark.ranks(2)
def test_a_view_of_a_part_does_not_tell_by_itself_whether_it_has_gaps():
    mesh = hs.init(width=2, device="cpu")
    x = hs.shard(seeded(2, 3, 8), mesh) * 2
    part = x[..., :6].unsqueeze(0)  # all that rank 0 holds, and a half of what rank 1 does
    with pytest.raises(hs.UnsupportedOp, match="it writes into a copy"):
        part.contiguous().zero_()
