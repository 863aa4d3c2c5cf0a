import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hyperslab.kernels import faces
from hyperslab.kernels.face_tasks import plan_tasks

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")  # there in Triton's interpreter


@pytest.fixture
def by_kernel(monkeypatch):
    """Boxes are moved by the kernel, on CPUs too."""
    pytest.importorskip("triton")
    monkeypatch.setattr(faces, "_plan", faces.plan_boxes)


def draw(*shape, dtype=torch.float64, last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-99, 99, shape, generator=generator).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last_3d) if last else x


def box(*spans):
    return tuple(slice(*span) for span in spans)


def halo(shape):
    """The faces, edges and corners, one wide, of the spatial dims."""
    for sides in itertools.product(range(3), repeat=len(shape) - 2):
        spans = [((0, 1), (0, n), (n - 1, n))[s] for s, n in zip(sides, shape[2:], strict=True)]
        if set(sides) != {1}:
            yield box((0, shape[0]), (0, shape[1]), *spans)


def check(x, boxes):
    """Packs, unpacks and adds, against one box after the other by torch."""
    pieces = faces.pack(x, boxes)
    for piece, where in zip(pieces, boxes, strict=True):
        assert piece.is_contiguous()
        assert torch.equal(piece, x[where])
    pieces = [torch.rand(piece.shape).to(piece) + piece for piece in pieces]
    expected, got = x.clone(), x.clone()
    faces.unpack_(got, boxes, pieces)
    for piece, where in zip(pieces, boxes, strict=True):
        expected[where] = piece
    assert torch.equal(got, expected)
    if x.is_floating_point():
        faces.add_(got, boxes, pieces)
        for piece, where in zip(pieces, boxes, strict=True):
            expected[where].add_(piece)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.usefixtures("by_kernel")
def test_boxes_that_overlap(last):
    x = draw(1, 3, 3, 4, 5, last=last)
    whole = ((0, 1), (0, 3))
    check(x, [box(*whole, (0, 1), (0, 4), (0, 5)), box(*whole, (0, 3), (1, 4), (4, 5))])


@pytest.mark.usefixtures("by_kernel")
def test_every_box_of_a_halo_in_two_dims():
    check(draw(2, 2, 3, 4), list(halo((2, 2, 3, 4))))


@st.composite
def cases(draw_from):
    shape = draw_from(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw_from(st.permutations(range(len(shape))))
    spans = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
            lambda s: (s[0], max(s[0] + 1, s[1]))
        )
        for n in shape
    ]
    boxes = draw_from(st.lists(st.tuples(*spans), min_size=1, max_size=3))
    return shape, order, boxes, draw_from(st.integers(0, 3))


@settings(max_examples=200 if ON_GPU else 8, deadline=None, derandomize=True)
@given(case=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.int16, torch.bool]))
def test_any_boxes_of_any_strides(case, dtype):
    pytest.importorskip("triton")
    shape, order, boxes, start = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faces, "_plan", faces.plan_boxes)
        memory = draw(start + 2 * torch.Size(shape).numel(), dtype=dtype)
        x = memory[start::2].view([shape[i] for i in order])
        x = x.permute([order.index(i) for i in range(len(shape))])
        check(x, [box(*spans) for spans in boxes])


@pytest.mark.parametrize(
    ("dtype", "shape", "unit"),
    [
        (torch.bfloat16, (2, 3, 4, 8), 8),
        (torch.bfloat16, (2, 3, 4, 6), 4),
        (torch.uint8, (2, 3, 4, 5), 1),
        (torch.float64, (2, 3, 4, 5), 8),
        (torch.complex64, (2, 3, 4, 5), 8),
    ],
    ids=str,
)
@pytest.mark.usefixtures("by_kernel")
def test_numbers_that_lie_side_by_side_are_moved_together(dtype, shape, unit):
    x, width = draw(*shape, dtype=dtype), (0, shape[3])
    boxes = [box((0, 2), (0, 3), (0, 1), width), box((0, 2), (0, 3), (2, 4), width)]
    assert faces.plan_boxes("pack", x, boxes).unit == unit
    assert all(torch.equal(a, x[w]) for a, w in zip(faces.pack(x, boxes), boxes, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool], ids=str)
def test_views_of_one_memory_are_copied_to_another(dtype, last, monkeypatch):
    pytest.importorskip("triton")
    x = draw(2, 3, 4, 5, 6, dtype=dtype, last=last)
    sources = [x[:, :, 3:, 2:, 1:], x[1:, :2, :1, 3:, ::2], x[:1, :2, 1:, 4:]]
    found = []
    for by_kernel in (True, False):
        rooms = faces.zeros_alike([(2, 3, 2, 4, 5), (1, 2, 4, 1, 6)], x)
        assert [room.is_contiguous() for room in rooms] == [not last] * 2
        targets = [rooms[0][:, :, :1, 1:], rooms[0][:1, 1:, 1:, :2, 2:], rooms[1][:, :, :3]]
        plan = faces.plan_views if by_kernel else lambda targets, sources: None
        monkeypatch.setattr(faces, "_plan_copies", plan)
        faces.copy_views_(targets, sources)
        found.append(rooms)
    assert all(room.any() and not room.all() for room in rooms)
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("by_kernel")
def test_the_plan_is_made_once():
    plan_tasks.cache_clear()
    for _ in range(3):
        faces.pack(draw(1, 1, 3, 4), [box((0, 1), (0, 1), (0, 3), (0, 1))])
    assert plan_tasks.cache_info().misses == 1


@pytest.mark.usefixtures("by_kernel")
def test_boxes_that_are_contiguous_or_empty_or_overlap_in_too_many_ways_are_left_to_torch():
    x = draw(4, 1, 200)
    assert faces.plan_boxes("pack", x, [box((1, 2), (0, 1), (0, 200))]) is None
    assert (
        faces.plan_boxes("pack", x, [box((1, 2), (0, 1), (0, 0)), box((0, 4), (0, 1), (0, 1))])
        is None
    )
    many = [(i, i + 60) for i in range(40)]
    assert faces.plan_boxes("add", draw(100, 100, 100), [box(s, s, s) for s in many]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_torch_moves_boxes_where_there_is_no_gpu(dtype):
    x = draw(2, 2, 3, 4, dtype=dtype)
    check(x, list(halo(x.shape)))
    check(x, [])


def test_parts_of_one_buffer_are_copied_together():
    parts = faces.room_for([(2, 3), (1,), (4,)], torch.float32, DEVICE)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert {part.untyped_storage().data_ptr() for part in parts} == {parts[0].data_ptr()}
    assert all(part.data_ptr() % 16 == 0 for part in parts)
    copies = [torch.zeros_like(part) for part in parts]
    faces.copy_(copies, parts)
    together = faces.zeros_for([part.shape for part in parts], torch.float32, DEVICE)
    assert not any(part.any() for part in together)
    faces.copy_(together, parts)
    for copy, other, part in zip(copies, together, parts, strict=True):
        assert torch.equal(copy, part)
        assert torch.equal(other, part)
    faces.copy_([], [])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_the_halo_of_a_volume(last, dtype):
    x = torch.randn(2, 17, 65, 66, 67, device=DEVICE).to(dtype)
    x = x.to(memory_format=torch.channels_last_3d) if last else x
    check(x, list(halo(x.shape)))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_boxes_beyond_two_to_the_31_numbers():
    x = torch.zeros(3, 2**30, dtype=torch.uint8, device=DEVICE)
    x[2, -5:] = torch.arange(5, dtype=torch.uint8)
    pieces = faces.pack(x, [box((0, 3), (2**30 - 5, 2**30)), box((0, 2), (0, 7))])
    assert pieces[0].tolist() == [[0] * 5, [0] * 5, [0, 1, 2, 3, 4]]
