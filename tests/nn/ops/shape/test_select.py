"""Parts of a tensor along one dim, and elements in another order, on every mesh."""

from typing import NamedTuple

import torch
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)


def weighed(parts):
    """One tensor that depends on every part, whatever their shapes."""
    return torch.stack([(part * (n + 1)).sum() for n, part in enumerate(parts)])


PARTS = {
    "split": lambda x: x.split(4, 2),
    "split samples": lambda x: torch.split(x, 2),
    "split into sizes": lambda x: torch.split(x, [1, 0, 7, 3], dim=2),
    "split by names": lambda x: torch.split(x, split_size_or_sections=5, dim=-1),
    "split by a method's names": lambda x: x.split(split_size=(4, 6), dim=-1),
    "split with sizes": lambda x: x.split_with_sizes([5, 6], 2),
    "chunk": lambda x: x.chunk(2, 1),
    "chunk depth": lambda x: torch.chunk(x, chunks=4, dim=2),
    "more chunks than indices": lambda x: x.chunk(7, 0),
    "tensor_split": lambda x: x.tensor_split(4, 2),
    "tensor_split by axis": lambda x: torch.tensor_split(x, 3, axis=-1),
    "tensor_split at indices": lambda x: torch.tensor_split(x, (2, 9, 5, -1), 2),
    "tensor_split at a tensor": lambda x: x.tensor_split(torch.tensor([3]), dim=2),
    "tensor_split by names": lambda x: x.tensor_split(indices=(1, 2), dim=4),
    "hsplit": lambda x: torch.hsplit(x, 2),
    "vsplit": lambda x: x.vsplit((1, 2)),
    "dsplit": lambda x: x.dsplit([5, 7]),
    "unbind": lambda x: x.unbind(),
    "unbind depth": lambda x: torch.unbind(x, dim=2),
    "iteration": list,
    "iteration over depth": lambda x: [*x.transpose(0, 2)],
    "unpacking": lambda x: (lambda a, b, c: (c, a, b))(*x),
    "broadcast": lambda x: torch.broadcast_tensors(x, x[:, :1], x[:, :, 2:3, :, 4:5]),
    "at least": lambda x: torch.atleast_2d(x[0, 0, 0, 0], x, x[..., 1]),
}

CASES = {
    "narrow": lambda x: x.narrow(2, 3, 5),
    "narrow from the end": lambda x: torch.narrow(x, -1, -4, 3),
    "narrow by a tensor": lambda x: torch.narrow(x, dim=2, start=torch.tensor(1), length=10),
    "select": lambda x: x.select(2, 5) + torch.select(x, dim=2, index=-1),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 0, 0])),
    "index_select along depth": lambda x: torch.index_select(
        x, dim=2, index=torch.tensor([9, 1, 1, 10])
    ),
    "index_select of one": lambda x: x.index_select(-1, torch.tensor(4)),
    "index_select of none": lambda x: x.index_select(2, torch.tensor([], dtype=torch.int32)),
    "diagonal": lambda x: x.unflatten(1, (2, 2)).diagonal(1, -5, dim2=2),
    "flip": lambda x: x.flip(2),
    "flip all": lambda x: torch.flip(x, dims=(0, 1, 2, -2, -1)),
    "flip several": lambda x: x.flip(0, 4),
    "flip none": lambda x: x.flip(()),
    "fliplr and flipud": lambda x: x.fliplr() + torch.flipud(x),
    "reversed": reversed,
    "rot90": lambda x: x.rot90() + torch.rot90(x, -3),
    "rot90 of volumes": lambda x: torch.rot90(x, k=3, dims=(2, 4)),
    "rot90 twice and not at all": lambda x: x.rot90(2, [3, -3]) + x.rot90(4, [0, 1]),
    "roll": lambda x: x.roll(3, 2),
    "roll back": lambda x: torch.roll(x, -1, dims=-1),
    "roll by more than all": lambda x: torch.roll(x, shifts=(25, -7, 1), dims=(2, 4, 1)),
    "roll twice along a dim": lambda x: x.roll((2, 3), (2, 2)),
    "roll by nothing": lambda x: x.roll((0, 11), (0, 2)),
    "roll one dim": lambda x: x[:, 0, 0, 0, 0].roll(1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1, 1),
    "repeat every dim": lambda x: x.repeat(2, 1, 3, 1, 2),
    "repeat with new dims": lambda x: x.repeat((2, 1, 1, 2, 1, 1, 1)),
    "repeat never": lambda x: x.repeat(1, 1, 0, 1, 1),
    "tile": lambda x: x.tile(2) + torch.tile(x, (1, 2)),
    "tile by name": lambda x: torch.tile(x, dims=(2, 1, 1, 2, 1, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "repeat_interleave by axis": lambda x: torch.repeat_interleave(x, 3, dim=-1, output_size=30),
    "repeat_interleave by numbers": lambda x: x.repeat_interleave(torch.arange(11) % 3, 2),
    "repeat_interleave by one number": lambda x: x.repeat_interleave(torch.tensor([2]), 0),
    "repeat_interleave of channels": lambda x: x.repeat_interleave(torch.tensor([0, 1, 3, 1]), 1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1, -1),
    "expand with new dims": lambda x: x.mean((2, 3), keepdim=True).expand(2, 3, 4, 11, 9, 10),
    "expand a slice of depth": lambda x: x[:, :, 6:7].expand(*X5),
    "expand to nothing": lambda x: x[:, :, 6:7].expand(3, 4, 0, 9, 10),
    "expand_as": lambda x: x.mean(2, keepdim=True).expand_as(x),
    "expand a plain tensor": lambda x: torch.ones(1, 10, dtype=torch.float64).expand_as(x) * x,
    "broadcast_to": lambda x: torch.broadcast_to(x[0, :, :1], (4, 11, 9, 10)),
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "stack last": lambda x: torch.stack((x, x.flip(2)), dim=-1),
    "stack with a plain one": lambda x: torch.stack([seeded(*X5, seed=2), x]),
    "stack of otherwise split": lambda x: torch.stack([x.mean(2), x[:, :, 3], x.mean(2)], 1),
    "hstack": lambda x: torch.hstack([x, x[:, 1:]]),
    "vstack": lambda x: torch.vstack([x, x[1:]]),
    "dstack": lambda x: torch.dstack((x, x[:, :, 4:])),
    "vstack of rows": lambda x: torch.vstack([x[0, 0, 0, 0], x[1, 1, 1, 1]]),
    "hstack of rows": lambda x: torch.hstack([x[0, 0, :, 0, 0], x[1, 1, 2:, 1, 1]]),
    "dstack of rows": lambda x: torch.dstack([x[0, 0, :, 0, 0], x[1, 1, :, 1, 1]]),
    "column_stack": lambda x: torch.column_stack([x[0, 0, :, 0, 0], x[1, 1, :, 1]]),
    "atleast": lambda x: (
        torch.atleast_3d(x[0, 0, :, 0, 0]) + torch.atleast_1d(x[0, 0].movedim(0, 1))
    ),
    "movedim": lambda x: x.movedim(2, 0) + torch.movedim(x, (0, 2), (1, 0)),
    "moveaxis": lambda x: torch.moveaxis(x, source=(1, -1), destination=(-1, 0)),
    "transposes": lambda x: x[0, 0, :, :, 0].t() + x[0, 0, :, :, 0].T + x[0, 0, :, :, 0].mT,
    "adjoints": lambda x: x.adjoint() + torch.adjoint(x) * x.mH + x[0, 0, 0].H,
    "unflatten": lambda x: x.unflatten(1, (2, -1)) + torch.unflatten(x, dim=1, sizes=(2, 2)),
    "unflatten depth": lambda x: x[:, :, :8].unflatten(2, (2, 4)),
    "ravel": lambda x: x.ravel() + torch.ravel(x),
    "view_as": lambda x: x.view_as(torch.zeros(12, 11, 90)) + x.reshape_as(torch.zeros(12, 11, 90)),
    "view a plain tensor": lambda x: seeded(11, 4, 3, 90).view_as(x) * x,
    "complex": lambda x: (
        torch.view_as_real(torch.view_as_complex(x[..., :2]) * (1 + 2j))
        if not isinstance(x, hs.Slab) or not x.layout.splits[4]
        else torch.stack([x[..., 0] - 2 * x[..., 1], 2 * x[..., 0] + x[..., 1]], -1)
    ),
    "parts of complex": lambda x: (x * (1 + 2j)).imag + (x * (3 - 1j)).real + x.real,
    "contiguous": lambda x: x.transpose(1, 2).contiguous().flatten(2),
}


def check_cases(place, cases):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name in cases:
        if "channel" in place.axes and name == "diagonal":  # along a split dim
            continue
        function = CASES.get(name) or (lambda x, parts=PARTS[name]: weighed(parts(x)))
        try:
            assert_same_as_serial(function, [seeded(*X5)], mesh=mesh, cuts=cuts)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


def test_parts_are_those_of_one_process(run, place):
    run(place, check_cases, list(PARTS))


def test_rearranged_tensors_are_those_of_one_process(run, place):
    run(place, check_cases, list(CASES))


class Call(NamedTuple):
    """A method of a tensor with its arguments, as hypothesis draws it."""

    shape: tuple[int, ...]
    name: str
    args: tuple

    def __call__(self, x):
        out = getattr(x, self.name)(*self.args)
        return weighed(out) if isinstance(out, tuple) else out


@st.composite
def calls(draw):
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    num = len(shape)
    dims = st.integers(-num, num - 1)
    times = st.lists(st.integers(0, 3), min_size=num, max_size=num + 1).map(tuple)
    dim = draw(dims)
    arguments = {
        "flip": st.tuples(st.lists(st.integers(0, num - 1), unique=True)),
        "roll": st.tuples(st.integers(-9, 9), st.just(dim)),
        "rot90": st.tuples(st.integers(-4, 4), st.permutations(range(num)).map(lambda p: p[:2]))
        if num > 1
        else st.just((0, (0, 0))),
        "repeat": times,
        "tile": times.map(lambda times: times[: num - 1] or (2,)),
        "repeat_interleave": st.tuples(st.integers(0, 3), st.just(dim)),
        "expand": st.lists(st.integers(1, 2), max_size=2).map(lambda new: (*new, *[-1] * num)),
        "index_select": st.lists(st.integers(0, shape[dim] - 1), max_size=5).map(
            lambda indices: (dim, torch.tensor(indices, dtype=torch.long))
        )
        if shape[dim]
        else st.just((dim, torch.zeros(0, dtype=torch.long))),
        "tensor_split": st.tuples(
            st.integers(1, 4) | st.lists(st.integers(-7, 7), max_size=3).map(tuple), st.just(dim)
        ),
        "chunk": st.tuples(st.integers(1, 7), st.just(dim)),
        "unflatten": st.just((dim, (-1, shape[dim]) if shape[dim] else (0, 2))),
        "movedim": st.tuples(dims, dims),
    }
    name = draw(st.sampled_from([n for n in arguments if n != "rot90" or num > 1]))
    return Call(shape, name, draw(arguments[name]))


def check_call(place, call):
    cuts = place.cuts_of(len(call.shape))
    assert_same_as_serial(call, [seeded(*call.shape)], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), calls())
def test_any_rearrangement_is_that_of_one_process(run, data, call):
    run(data.draw(places(call.shape)), check_call, call)


def check_whole_results(place):
    """Tensors made like a Slab are Slabs if they have its shape, and else plain."""
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    for made in (x.new_zeros(X5), x.new_ones(*X5), x.new_full(x.shape, 2.0), x.new_empty(X5)):
        assert isinstance(made, hs.Slab)
        assert made.layout == x.layout
        assert made.local.shape == x.local.shape
    assert x.new_zeros(size=X5, dtype=torch.int32).dtype == torch.int32
    assert x.new_zeros(2, 3).equal(torch.zeros(2, 3, dtype=torch.float64))
    assert x.new_full((2,), 3).equal(torch.full((2,), 3.0, dtype=torch.float64))
    assert x.new_tensor([1, 2]).equal(torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_new_tensors_of_the_same_shape_are_split_alike(run, place):
    run(place, check_whole_results)


def check_memory(place):
    """What gives a copy in torch gives one here, also where nothing moves."""
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    for function in (
        lambda x: x.flip(()),
        lambda x: x.rot90(0),
        lambda x: x.roll(0, 2),
        lambda x: x.roll(11, 2),
        lambda x: x.repeat(1, 1, 1, 1, 1),
        lambda x: x.tile(1),
        lambda x: x.repeat_interleave(1, 2),
        lambda x: x.index_select(2, torch.arange(11)),
        lambda x: x[:, :, list(range(11))],
        lambda x: torch.cat([x]),
        lambda x: torch.stack([x]),
        lambda x: x.transpose(1, 2).contiguous(),
    ):
        function(x).fill_(0)
    assert hs.gather(x).equal(seeded(*X5))


def test_copies_share_no_memory(run, place):
    run(place, check_memory)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for dtype in (torch.int32, torch.bool, torch.bfloat16, torch.uint8, torch.complex64):
        plain = (seeded(*X5) * 3).to(dtype)
        x = hs.shard(plain, mesh, cuts=cuts)
        for function in (
            lambda x: x[:, :, 4, 1:7],
            lambda x: x.flip(2).roll(3, 2)[..., ::2],
            lambda x: torch.stack([x, x], 2)[:, :, 0, 3:],
            lambda x: x.repeat(1, 1, 2, 1, 1),
        ):
            out = hs.gather(function(x))
            assert out.dtype == dtype
            assert out.equal(function(plain))


def test_every_dtype_can_be_rearranged(run, place):
    run(place, check_dtypes)
