"""Boxes that ranks write into each other's memory: on one GPU that they share, as on several.

Without a GPU the kernels run in Triton's interpreter, and the memory is that of the host. There
time is counted in polls of a word.
"""

import dataclasses
import os
import random
import sys
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from host_gpus import make_host_memory, share_host_memory
from triton_interpreter import use_triton_interpreter

import hyperslab as hs
from hyperslab.comm import failure_report
from hyperslab.comm.device_transport import DeviceTransport, SharedMemory, shared_nbytes
from hyperslab.comm.fetch import fetch, post_fetch
from hyperslab.comm.reduce import gather_stacked, reduce_sum, reduce_sum_
from hyperslab.layout import Box, Cuts, Layout, Span, Split, plan_exchange
from hyperslab.testing import Team, seeded

ON_GPU = torch.cuda.is_available()
# Triton itself is loaded by the ranks: who loads it here decides how kernels run in other tests.
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="no Triton"),
    *([pytest.mark.gpu] if ON_GPU else []),
]
SLOT = 4096
DTYPES = [torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
MESHES = [{"width": 2}, {"height": 3}, {"depth": 2, "width": 2}]


@pytest.fixture(scope="module", params=MESHES, ids=lambda axes: "-".join(axes))
def place(request):
    """Some ranks, and the mesh that they are to make."""
    axes = request.param
    with Team(torch.Size(axes.values()).numel(), timeout_seconds=200) as team:
        yield team, axes


@pytest.fixture(scope="module")
def two():
    with Team(2, timeout_seconds=200) as team:
        yield team


@pytest.fixture(scope="module")
def three():
    with Team(3, timeout_seconds=200) as team:
        yield team


def meet(axes, timeout_seconds=100.0):
    """The mesh, with slots so short that longer messages travel in parts."""
    if ON_GPU:
        mesh = hs.init(**axes, device="cuda", timeout_seconds=timeout_seconds, transport="device")
        short = DeviceTransport(mesh.transport.memory, mesh.rank, SLOT, mesh.num_ranks)
        torch.cuda.synchronize()
        dist.barrier(group=mesh.group)
        mesh.transport.memory.own.zero_()
        torch.cuda.synchronize()
        dist.barrier(group=mesh.group)
        return dataclasses.replace(mesh, transport=short)
    use_triton_interpreter()
    mesh = hs.init(**axes, device="cpu")
    own = make_host_memory(shared_nbytes(mesh.num_ranks, SLOT))
    memory = SharedMemory(own, *share_host_memory(own, mesh.group))
    timeout = timedelta(seconds=timeout_seconds)
    return dataclasses.replace(
        mesh, transport=DeviceTransport(memory, mesh.rank, SLOT), timeout=timeout
    )


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


def brute_adjoint(weights, wanted, layout, mesh):
    """What all who ask this rank, and not one that holds the same, send home."""
    total = torch.zeros(layout.shape, dtype=torch.float64)
    for weight, box, coords in zip(weights, wanted, mesh.grid.coords, strict=True):
        beside = mesh.axes_beside(layout.axes)
        inside = Box.whole(layout.shape) & box
        if inside and all(coords[axis] == mesh.coords[axis] for axis in beside):
            total[inside.slices_in(Box.whole(layout.shape))] += weight[inside.slices_in(box)]
    return piece_of(total, layout, mesh)


def check_boxes(axes, num):
    mesh = meet(axes)
    for seed in range(num):
        rng = random.Random(seed)  # the same on every rank
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(len(axes), 4)))
        layout, whole = draw_layout(rng, mesh, shape), seeded(*shape)
        wanted = [draw_box(rng, shape) for _ in range(mesh.num_ranks)]
        exchange = plan_exchange(mesh.grid, mesh.rank, layout, wanted)
        x = piece_of(whole, layout, mesh).to(mesh.device).requires_grad_()
        out = fetch(x, exchange, mesh, fill=7.0)
        assert torch.equal(out.cpu(), cut_out(whole, wanted[mesh.rank], 7.0)), f"seed {seed}"
        weights = [seeded(*box.shape, seed=99 + rank) for rank, box in enumerate(wanted)]
        (out * weights[mesh.rank].to(mesh.device)).sum().backward()
        expected = brute_adjoint(weights, wanted, layout, mesh)
        torch.testing.assert_close(x.grad.cpu(), expected, rtol=1e-12, atol=1e-12)


def test_every_rank_gets_the_box_it_asks_for_and_gradients_come_home(place):
    team, axes = place
    team.run(check_boxes, axes, 40 if ON_GPU else 5)


def halo_exchange(mesh, rows, extent, halo):
    bounds = [extent * i // mesh.num_ranks for i in range(mesh.num_ranks + 1)]
    layout = Layout((rows, extent), (None, Split("width", Cuts(tuple(bounds)))))
    wanted = [
        Box((Span(0, rows), Span(span.start - halo, span.stop + halo)))
        for span in layout.splits[1].cuts.spans
    ]
    return layout, wanted, plan_exchange(mesh.grid, mesh.rank, layout, wanted)


def check_long_messages(halo):
    mesh = meet({"width": 2})
    layout, wanted, exchange = halo_exchange(mesh, 301, 40, halo)
    whole = seeded(301, 40)
    x = piece_of(whole, layout, mesh).to(mesh.device).requires_grad_()
    out = fetch(x, exchange, mesh)
    assert torch.equal(out.cpu(), cut_out(whole, wanted[mesh.rank]))
    out.sum().backward()
    ones = [torch.ones(box.shape, dtype=torch.float64) for box in wanted]
    assert torch.equal(x.grad.cpu(), brute_adjoint(ones, wanted, layout, mesh))


@pytest.mark.parametrize("halo", [2, 4, 17])
def test_a_message_longer_than_a_slot_travels_in_parts(two, halo):
    two.run(check_long_messages, halo)


def check_dtype(dtype):
    mesh = meet({"width": 2})
    layout, wanted, exchange = halo_exchange(mesh, 3, 7, 2)
    whole = (seeded(3, 7) * 100).to(dtype)
    out = fetch(piece_of(whole, layout, mesh).to(mesh.device), exchange, mesh)
    assert torch.equal(out.cpu(), cut_out(whole, wanted[mesh.rank]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels(two, dtype):
    two.run(check_dtype, dtype)


def check_in_flight(num, waits_backwards):
    """More than there are slots, each of other values."""
    mesh = meet({"width": 2})
    layout, _, exchange = halo_exchange(mesh, 5, 16, 3)
    wholes = [seeded(5, 16, seed=seed) for seed in range(num)]
    posted = []
    for whole in wholes:
        x = piece_of(whole, layout, mesh).to(mesh.device)
        posted.append(post_fetch(x, exchange, mesh))
    numbers = reversed(range(num)) if waits_backwards else range(num)
    for number in numbers:
        boxes = posted[number].wait()
        for box, message in zip(boxes, exchange.receives, strict=True):
            assert torch.equal(box.cpu(), cut_out(wholes[number], message.box))
    assert not mesh.transport._open


@pytest.mark.parametrize("waits_backwards", [False, True])
def test_many_exchanges_in_flight(two, waits_backwards):
    two.run(check_in_flight, 7, waits_backwards)


def check_dropped():
    mesh = meet({"width": 2})
    layout, wanted, exchange = halo_exchange(mesh, 5, 16, 3)
    for seed in range(5):
        whole = seeded(5, 16, seed=seed)
        x = piece_of(whole, layout, mesh).to(mesh.device)
        post_fetch(x, exchange, mesh)  # and nobody waits for it
        out = fetch(x + 1, exchange, mesh)
        inside = cut_out(whole + 1, wanted[mesh.rank])
        assert torch.equal(out.cpu(), inside)


def test_what_nobody_waits_for_does_not_disturb_what_follows(two):
    two.run(check_dropped)


def check_one_way(num):
    """Rank 0 only sends, so that nothing but empty slots holds it back."""
    mesh = meet({"width": 2})
    layout = Layout((4, 8), (None, Split("width", Cuts((0, 4, 8)))))
    wanted = [Box.of((0, 4), (0, 4)), Box.of((0, 4), (0, 8))]
    exchange = plan_exchange(mesh.grid, mesh.rank, layout, wanted)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for seed in range(num):
        whole = seeded(4, 8, seed=seed % 7).to(mesh.device)
        out = fetch(whole[:, 4 * mesh.rank :][:, :4], exchange, mesh)
        if mesh.rank:
            total += (out - whole).abs().sum()
    assert total.item() == 0


def test_a_sender_waits_for_an_empty_slot(two):
    two.run(check_one_way, 500 if ON_GPU else 12)


def check_late_peer():
    mesh = meet({"width": 2}, timeout_seconds=1.0 if ON_GPU else 1e-7)
    layout, _, exchange = halo_exchange(mesh, 5, 16, 3)
    x = piece_of(seeded(5, 16), layout, mesh).to(mesh.device)
    if mesh.rank == 1:
        return "silent"
    out = post_fetch(x, exchange, mesh)
    words = []
    for _ in range(2):
        try:
            (box,) = out.wait()
            if ON_GPU:
                torch.cuda.synchronize()
            assert box.isnan().all()
            fetch(x, exchange, mesh)
        except hs.CommError as error:
            words.append(str(error))
    return words[-1]


def test_a_peer_that_never_sends_ends_in_an_error():
    with Team(2, timeout_seconds=200) as team:
        told, _ = team.run(check_late_peer)
    assert "lost contact while fetching" in told
    assert "rank 1 sent nothing in time" in told


def check_giving_up():
    """A rank that knows that the other is gone waits no longer, whatever the time-out."""
    failure_report.REPORT_TIMEOUT_SECONDS = 0.3  # the other has nothing to say
    mesh = meet({"width": 2}, timeout_seconds=1000.0)
    layout, _, exchange = halo_exchange(mesh, 5, 16, 3)
    x = piece_of(seeded(5, 16), layout, mesh).to(mesh.device)
    if mesh.rank == 1:
        return ""
    posted = post_fetch(x, exchange, mesh)
    if ON_GPU:
        posted.wait()  # which leaves it to the GPU
    mesh.transport.give_up()
    if ON_GPU:
        torch.cuda.synchronize()
    with pytest.raises(hs.CommError) as error:
        posted.wait()
    return str(error.value)


def test_a_rank_that_has_given_up_waits_no_longer():
    with Team(2, timeout_seconds=200) as team:
        told, _ = team.run(check_giving_up)
    assert "(this rank has given up)" in told


def check_disagreement():
    """Ranks ask for different boxes of one shape."""
    mesh = meet({"width": 2}, timeout_seconds=2.0 if ON_GPU else 1e-6)
    layout = Layout((5, 16), (None, Split("width", Cuts((0, 8, 16)))))
    start = 3 if mesh.rank else 2
    wanted = [Box.of((0, 5), (0, 11)), Box.of((0, 5), (start, 16 - 3 + start))]
    exchange = plan_exchange(mesh.grid, mesh.rank, layout, [wanted[0], wanted[1]])
    x = piece_of(seeded(5, 16), layout, mesh).to(mesh.device)
    try:
        for _ in range(3):
            fetch(x, exchange, mesh)
            if ON_GPU:
                torch.cuda.synchronize()
    except hs.CommError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_on_what_is_sent_are_told():
    with Team(2, timeout_seconds=200) as team:
        told = team.run(check_disagreement)
    assert "rank 0 sent something else than was awaited" in told[1]


def check_passes(num):
    """Ranks that are late now and then, messages of other values each time; no host waits."""
    mesh = meet({"width": 2})
    rng = random.Random(mesh.rank)
    plans = [halo_exchange(mesh, rows, 24, halo) for rows, halo in ((3, 1), (7, 5), (301, 9))]
    bases = [seeded(*layout.shape, dtype=torch.float32) for layout, _, _ in plans]
    pieces = [piece_of(b, p[0], mesh).to(mesh.device) for b, p in zip(bases, plans, strict=True)]
    right = [cut_out(b, p[1][mesh.rank]).to(mesh.device) for b, p in zip(bases, plans, strict=True)]
    wrong = torch.zeros((), device=mesh.device)
    for number in range(num):
        if ON_GPU and rng.random() < 0.2:
            torch.cuda._sleep(rng.randint(1, 1 << 20))
        for x, (_, _, exchange), expected in zip(pieces, plans, right, strict=True):
            leaf = (x * (number + 1)).requires_grad_()
            out = fetch(leaf, exchange, mesh)
            wrong += (out != expected * (number + 1)).sum()
            (grad,) = torch.autograd.grad(out, leaf, torch.full_like(out, number + 1.0))
            wrong += (grad.sum() / (number + 1) - _times_sent(exchange, x)).abs() > 0.5
    assert wrong.item() == 0


def _times_sent(exchange, x):
    return x.numel() + sum(message.box.numel for message in exchange.sends)


def test_many_passes_with_late_ranks_reuse_slots_without_a_race(two):
    two.run(check_passes, 300 if ON_GPU else 3)


def check_sums():
    mesh = meet({"sample": 2, "height": 2})
    sys.modules["hyperslab.comm.reduce"].ONE_STEP_NBYTES = 1 << 12
    for shape in [(), (0, 2), (5, 7), (25, 42)]:
        for axes in [("sample",), ("height",), ("sample", "height")]:
            ranks = dist.get_process_group_ranks(mesh.group_over(axes))
            parts = torch.stack([seeded(*shape, seed=r, dtype=torch.float32) for r in ranks])
            x = parts[ranks.index(mesh.rank)].to(mesh.device)
            assert torch.equal(gather_stacked(x, mesh, axes).cpu(), parts)
            torch.testing.assert_close(reduce_sum(x, mesh, axes).cpu(), parts.sum(0))


def check_sums_of_a_kernel(dtype):
    mesh = meet({"height": 3})
    scale = 1 if dtype.is_floating_point else torch.iinfo(dtype).max // 8  # more than floats hold
    parts = [(seeded(5, 7, seed=rank) * scale).to(dtype) for rank in range(3)]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    for offset in (0, 1):  # also where memory begins at an odd place
        x = torch.zeros(36, dtype=dtype, device=mesh.device)[offset : offset + 35].view(5, 7)
        x.copy_(parts[mesh.rank])
        assert mesh.transport.can_sum(x)
        reduce_sum_(x, mesh, ("height",))
        in_order = (parts[0].to(wide) + parts[1].to(wide) + parts[2].to(wide)).to(dtype)
        if dtype == torch.bfloat16 and not ON_GPU:  # the interpreter cuts numbers off
            torch.testing.assert_close(x, in_order, rtol=2**-7, atol=0)
        else:
            assert torch.equal(x.cpu(), in_order)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64],
    ids=str,
)
def test_a_kernel_sums_in_the_order_of_ranks(three, dtype):
    three.run(check_sums_of_a_kernel, dtype)


def check_sums_of_other_dtypes():
    mesh = meet({"height": 2})
    sys.modules["hyperslab.comm.reduce"].ONE_STEP_NBYTES = 1 << 10
    dist.all_reduce = None  # through the host, which would wait for the GPU
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.complex64):
        for shape in [(), (41, 50)]:
            parts = [(seeded(*shape, seed=rank) * 9).to(dtype) for rank in range(2)]
            total = reduce_sum(parts[mesh.rank].to(mesh.device), mesh, ("height",))
            assert torch.equal(total.cpu(), parts[0] + parts[1])


def test_integers_and_complex_numbers_are_summed_on_the_device():
    with Team(2, timeout_seconds=200) as team:
        team.run(check_sums_of_other_dtypes)


@pytest.mark.slow
def test_sums_and_stacks_over_some_of_the_axes():
    with Team(4, timeout_seconds=200) as team:
        team.run(check_sums)


def refusal(**words):
    try:
        hs.init(depth=2, device="cpu", timeout_seconds=60, **words)
    except hs.HyperslabError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_refusals():
    rank = int(os.environ["RANK"])
    return [
        refusal(transport="device"),
        refusal(transport="nvlink"),
        refusal(transport="auto" if rank else "host"),
    ]


def test_all_ranks_are_told_why_there_is_no_device_transport(two):
    for no_gpu, unknown, different in two.run(check_refusals):
        assert no_gpu.startswith("ConfigError: transport='device' needs GPUs of one node")
        assert "rank 0: its device is cpu" in no_gpu
        assert "one of auto, device, nccl, host, got 'nvlink'" in unknown
        assert "different transports: rank 0 for 'host', rank 1 for 'auto'" in different
