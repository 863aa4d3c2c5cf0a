"""``fetch`` and its adjoint against slices of the whole tensor."""

import functools
import random

import pytest
import torch

import hyperslab as hs
from hyperslab.comm.fetch import fetch
from hyperslab.layout import Box, Cuts, Layout, Span, Split, plan_exchange
from hyperslab.testing import seeded

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)
MESHES = [
    {"width": 2},
    {"height": 3},
    {"depth": 2, "width": 2},
    {"depth": 2, "height": 2, "width": 2},
]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.complex64,
    torch.complex128,
]


def show(axes):
    return "-".join(f"{axis}{num}" for axis, num in axes.items())


on_meshes = pytest.mark.parametrize("axes", MESHES, ids=show)


def draw_layout(rng, mesh, shape):
    """Dims cut at random, empty pieces among them, along some of the axes in any order."""
    dims = rng.sample(range(len(shape)), k=len(shape))
    splits = [None] * len(shape)
    for dim, axis in zip(dims, mesh.grid.long_axes, strict=False):
        if rng.random() < 0.8:
            inner = sorted(rng.randint(0, shape[dim]) for _ in range(mesh.grid.size(axis) - 1))
            splits[dim] = Split(axis, Cuts((0, *inner, shape[dim])))
    return Layout(shape, tuple(splits))


def draw_box(rng, shape):
    """Any box, also one that is empty or reaches beyond the tensor."""
    spans = []
    for extent in shape:
        start, stop = sorted(rng.randint(-2, extent + 2) for _ in range(2))
        spans.append(Span(start, stop))
    return Box(tuple(spans))


def cut_out(whole, box, fill=0):
    """The values of ``box``, by looking at one index after the other."""
    out = torch.full(box.shape, fill, dtype=whole.dtype)
    inside = Box.whole(whole.shape) & box
    if inside:
        out[inside.slices_in(box)] = whole[inside.slices_in(Box.whole(whole.shape))]
    return out


def piece_of(whole, layout, mesh):
    return whole[layout.box(mesh.coords).slices_in(Box.whole(layout.shape))].clone()


@pytest.mark.ranks
@on_meshes
def test_every_rank_gets_the_box_it_asks_for_and_gradients_come_home(axes):
    mesh = init(**axes)
    for seed in range(25):
        rng = random.Random(seed)  # the same on every rank
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(len(axes), 4)))
        layout, whole = draw_layout(rng, mesh, shape), seeded(*shape)
        wanted = [draw_box(rng, shape) for _ in range(mesh.num_ranks)]
        exchange = plan_exchange(mesh.grid, mesh.rank, layout, wanted)
        x = piece_of(whole, layout, mesh).requires_grad_()
        out = fetch(x, exchange, mesh, fill=7.0)
        assert torch.equal(out, cut_out(whole, wanted[mesh.rank], 7.0)), f"seed {seed}"
        weights = [seeded(*box.shape, seed=99 + rank) for rank, box in enumerate(wanted)]
        (out * weights[mesh.rank]).sum().backward()
        expected = brute_adjoint(weights, wanted, layout, mesh)
        assert torch.allclose(x.grad, expected, rtol=1e-12, atol=1e-12), f"seed {seed}"


def brute_adjoint(weights, wanted, layout, mesh):
    """What all who ask this rank, and not one that holds the same, send home."""
    total = torch.zeros(layout.shape, dtype=torch.float64)
    for weight, box, coords in zip(weights, wanted, mesh.grid.coords, strict=True):
        beside = mesh.axes_beside(layout.axes)
        inside = Box.whole(layout.shape) & box
        if inside and all(coords[axis] == mesh.coords[axis] for axis in beside):
            total[inside.slices_in(Box.whole(layout.shape))] += weight[inside.slices_in(box)]
    return piece_of(total, layout, mesh)


@pytest.mark.ranks
@on_meshes
def test_a_fetch_and_its_adjoint_have_the_same_inner_product(axes):
    """The sum over ranks of <fetch(x), y> is that of <x, adjoint(y)>, replicas counted each."""
    mesh = init(**axes)
    rng = random.Random(42)
    shape = (4, 5, 3)
    layout = draw_layout(rng, mesh, shape)
    wanted = [draw_box(rng, shape) for _ in range(mesh.num_ranks)]
    x = piece_of(seeded(*shape), layout, mesh).requires_grad_()
    out = fetch(x, plan_exchange(mesh.grid, mesh.rank, layout, wanted), mesh)
    y = seeded(*out.shape, seed=mesh.rank)
    out.backward(y)
    products = torch.stack([(out * y).sum().detach(), (x * x.grad).sum().detach()])
    torch.distributed.all_reduce(products, group=mesh.group)
    torch.testing.assert_close(products[0], products[1])


def halo_exchange(mesh, extent=7, halo=2):
    """Each rank along width asks for ``halo`` more indices at both ends, also beyond the tensor."""
    bounds = [round(i * extent / mesh.num_ranks) for i in range(mesh.num_ranks + 1)]
    layout = Layout((3, extent), (None, Split("width", Cuts(tuple(bounds)))))
    wanted = [
        Box((Span(0, 3), Span(span.start - halo, span.stop + halo)))
        for span in layout.splits[1].cuts.spans
    ]
    return layout, wanted, plan_exchange(mesh.grid, mesh.rank, layout, wanted)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels(dtype):
    mesh = init(width=3)
    layout, wanted, exchange = halo_exchange(mesh)
    whole = (seeded(3, 7) * 100).to(dtype)
    out = fetch(piece_of(whole, layout, mesh), exchange, mesh)
    assert out.dtype == dtype
    assert torch.equal(out, cut_out(whole, wanted[mesh.rank]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_travel_in_the_dtype_of_the_tensor(dtype):
    mesh = init(width=3)
    layout, wanted, exchange = halo_exchange(mesh)
    x = piece_of(seeded(3, 7).to(dtype), layout, mesh).requires_grad_()
    out = fetch(x, exchange, mesh)
    weights = [seeded(*box.shape, seed=rank).round() for rank, box in enumerate(wanted)]
    (out * weights[mesh.rank].to(dtype)).sum().real.backward()
    assert x.grad.dtype == dtype
    assert torch.equal(x.grad, brute_adjoint(weights, wanted, layout, mesh).to(dtype))


VIEWS = {
    "transposed": lambda x: x.T.contiguous().T,
    "every second": lambda x: torch.stack([x, -x], -1).flatten(1)[:, ::2],
    "offset": lambda x: torch.cat([x, x], 1)[:, x.shape[1] :],
    "conjugate": lambda x: torch.complex(x, x + 1).conj(),
    "negative": lambda x: torch.complex(x, -x).conj().imag,
    "contiguous negative": lambda x: torch._neg_view(x.clone()),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("view", VIEWS)
def test_pieces_need_not_be_contiguous(view):
    mesh = init(width=3)
    layout, wanted, exchange = halo_exchange(mesh)
    piece = VIEWS[view](piece_of(seeded(3, 7), layout, mesh))
    expected = cut_out(VIEWS[view](seeded(3, 7)).resolve_conj().resolve_neg(), wanted[mesh.rank])
    assert torch.equal(fetch(piece, exchange, mesh), expected)


@pytest.mark.ranks(3)
def test_an_expanded_piece_and_an_expanded_gradient():
    mesh = init(width=3)
    layout, wanted, exchange = halo_exchange(mesh)
    column = seeded(1, 7).expand(3, 7)
    x = piece_of(column, layout, mesh)[:1].expand(3, -1)
    assert torch.equal(fetch(x, exchange, mesh), cut_out(column, wanted[mesh.rank]))
    leaf = piece_of(column, layout, mesh).requires_grad_()
    fetch(leaf, exchange, mesh).sum().backward()  # the gradient of a sum has strides of 0
    ones = [torch.ones(box.shape, dtype=torch.float64) for box in wanted]
    torch.testing.assert_close(leaf.grad, brute_adjoint(ones, wanted, layout, mesh))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_the_memory_format_is_kept(memory_format):
    mesh = init(width=2)
    layout = Layout((2, 3, 4, 6), (None, None, None, Split("width", Cuts((0, 3, 6)))))
    wanted = [Box.of((0, 2), (0, 3), (0, 4), (0, 5)), Box.of((0, 2), (0, 3), (0, 4), (1, 6))]
    whole = seeded(2, 3, 4, 6)
    x = piece_of(whole, layout, mesh).contiguous(memory_format=memory_format)
    out = fetch(x, plan_exchange(mesh.grid, mesh.rank, layout, wanted), mesh)
    assert torch.equal(out, cut_out(whole, wanted[mesh.rank]))
    assert out.is_contiguous(memory_format=memory_format)


@pytest.mark.ranks(2)
def test_the_fetched_box_is_not_tied_to_the_piece_it_came_from():
    mesh = init(width=2)
    layout, wanted, exchange = halo_exchange(mesh)
    x = piece_of(seeded(3, 7), layout, mesh)
    out = fetch(x, exchange, mesh)
    x.zero_()
    assert torch.equal(out, cut_out(seeded(3, 7), wanted[mesh.rank]))


@pytest.mark.ranks(2)
def test_a_rank_that_wants_nothing_still_serves_the_other():
    mesh = init(width=2)
    layout = Layout((4,), (Split("width", Cuts((0, 2, 4))),))
    wanted = [Box.of((0, 4)), Box.of((1, 1))]
    x = piece_of(seeded(4), layout, mesh).requires_grad_()
    out = fetch(x, plan_exchange(mesh.grid, mesh.rank, layout, wanted), mesh)
    assert torch.equal(out, cut_out(seeded(4), wanted[mesh.rank]))
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.ranks(2)
def test_many_exchanges_in_flight_are_not_mistaken_for_each_other():
    mesh = init(width=2)
    layout, wanted, exchange = halo_exchange(mesh)
    leaves = [piece_of(seeded(3, 7, seed=s), layout, mesh).requires_grad_() for s in range(20)]
    outs = [fetch(x, exchange, mesh) for x in leaves]
    for seed, out in enumerate(outs):
        assert torch.equal(out, cut_out(seeded(3, 7, seed=seed), wanted[mesh.rank]))
    sum((seed + 1) * out.sum() for seed, out in enumerate(outs)).backward()
    for seed, x in enumerate(leaves):
        torch.testing.assert_close(x.grad, leaves[0].grad * (seed + 1))


@pytest.mark.ranks(2)
def test_differentiating_twice_gives_what_one_process_gives():
    mesh = init(width=2)
    layout, _, exchange = halo_exchange(mesh)
    x = piece_of(seeded(3, 7), layout, mesh).requires_grad_()
    out = fetch(x**2, exchange, mesh)
    [grad] = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    grad.sum().backward()
    # Each rank reads an element once more for each halo it lies in: d2/dx2 of x**4 that often.
    reads = torch.ones_like(x, requires_grad=True)
    [num_reads] = torch.autograd.grad(fetch(reads * 1, exchange, mesh).sum(), reads)
    torch.testing.assert_close(x.grad, 12 * x.detach() ** 2 * num_reads)
