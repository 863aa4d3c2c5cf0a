import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hyperslab.kernels import face_plans, faces
from hyperslab.kernels.face_plans import plan_add, plan_assembly
from hyperslab.layout import OWN, Assembly, Piece, cut_out

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")  # there in Triton's interpreter


@pytest.fixture
def by_kernel(monkeypatch):
    """Boxes are moved by the kernel, on CPUs too."""
    pytest.importorskip("triton")
    monkeypatch.setattr(faces, "has_kernel", faces.is_movable)


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


def cut(boxes):
    shapes = tuple(tuple(s.stop - s.start for s in where) for where in boxes)
    return cut_out(tuple(boxes), shapes)


def check(x, boxes):
    """Packs, and adds, against one box after the other by torch."""
    pieces = faces.pack(x, cut(boxes))
    for piece, where in zip(pieces, boxes, strict=True):
        assert piece.is_contiguous()
        assert torch.equal(piece, x[where])
    pieces = [torch.rand(piece.shape).to(piece) + piece for piece in pieces]
    if x.is_floating_point():
        expected, got = x.clone(), x.clone()
        faces.add_(got, pieces, cut(boxes))
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


@settings(max_examples=200 if ON_GPU else 8, deadline=None)
@given(case=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.int16, torch.bool]))
def test_any_boxes_of_any_strides(case, dtype):
    pytest.importorskip("triton")
    shape, order, boxes, start = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faces, "has_kernel", faces.is_movable)
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
    plan = plan_assembly(cut(boxes), x.stride(), 0, False, 0.0, dtype, DEVICE)
    assert plan.move.unit == unit
    pieces = faces.pack(x, cut(boxes))
    assert all(torch.equal(piece, x[where]) for piece, where in zip(pieces, boxes, strict=True))


def assembly():
    """Two tensors of boxes of one tensor and of two that were received, with room outside."""
    own = box((0, 2), (0, 3), (3, 4), (2, 5), (1, 6))
    first = box((0, 1), (1, 3), (0, 1), (0, 2), (0, 3))
    second = box((0, 1), (0, 2), (1, 4), (0, 1), (0, 6))
    pieces = (
        Piece(OWN, own, 0, box((0, 2), (0, 3), (0, 1), (1, 4), (0, 5))),
        Piece(0, first, 0, box((0, 1), (1, 3), (1, 2), (0, 2), (2, 5))),
        Piece(1, second, 1, box((0, 1), (0, 2), (0, 3), (0, 1), (0, 6))),
    )
    return Assembly(((2, 3, 2, 4, 5), (1, 2, 4, 1, 6)), pieces, ((1, 3, 1, 2, 3), (1, 2, 4, 1, 6)))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.float64, -math.inf), (torch.float16, 0.5), (torch.bool, 0.0)],
    ids=str,
)
@pytest.mark.parametrize("in_one_buffer", [True, False])
def test_tensors_are_assembled_of_own_and_received_boxes(
    dtype, fill, last, in_one_buffer, monkeypatch
):
    pytest.importorskip("triton")
    x, whole = draw(2, 3, 4, 5, 6, dtype=dtype, last=last), assembly()
    received = [draw(*shape, dtype=dtype) for shape in whole.received]
    if in_one_buffer:
        received, parts = faces.room_for(whole.received, dtype, DEVICE), received
        faces.copy_(received, parts)
    found = []
    for has_kernel in (faces.is_movable, lambda x: False):
        monkeypatch.setattr(faces, "has_kernel", has_kernel)
        found.append(faces.assemble(x, received, whole, fill=fill))
    assert all(map(torch.equal, *found))
    assert [t.stride() for t in found[0]] == [t.stride() for t in found[1]]
    assert torch.equal(found[0][0][0, 1:, 1, :2, 2:], received[0][0, 1:, 0])
    assert (found[0][0][1, :, 1] == fill).all()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_gradients_of_what_was_received_are_added(last, monkeypatch):
    pytest.importorskip("triton")
    whole = assembly()
    once_more = box((0, 1), (0, 2), (0, 2), (0, 1), (0, 5))
    twice = Piece(1, once_more, 0, box((1, 2), (1, 3), (0, 2), (0, 1), (0, 5)))
    whole = Assembly((*whole.shapes, (1, 1, 1, 1, 1)), (*whole.pieces, twice), whole.received)
    grads = [draw(*shape, last=last) for shape in whole.shapes]
    found = []
    for has_kernel in (faces.is_movable, lambda x: False):
        monkeypatch.setattr(faces, "has_kernel", has_kernel)
        found.append(faces.received_grads(grads, whole))
    assert all(map(torch.equal, *found))
    expected = torch.zeros_like(found[0][1])
    expected[:, :, 1:] = grads[1][:, :, :3]
    expected[:, :, :2, :, :5] += grads[0][1:, 1:, :2, :1]
    assert torch.equal(found[0][1], expected)


@pytest.mark.usefixtures("by_kernel")
def test_large_own_pieces_are_left_to_torch(monkeypatch):
    x, whole = draw(2, 3, 4, 5, 6), assembly()
    received = [draw(*shape) for shape in whole.received]
    expected = faces.assemble(x, received, whole)
    monkeypatch.setattr(face_plans, "LARGE", 90)
    plan_assembly.cache_clear()
    assert all(map(torch.equal, faces.assemble(x, received, whole), expected))
    plan_assembly.cache_clear()


@pytest.mark.usefixtures("by_kernel")
def test_the_plan_is_made_once():
    for plan in (plan_assembly, plan_add):
        plan.cache_clear()
    for _ in range(3):
        x, boxes = draw(1, 1, 3, 4), cut([box((0, 1), (0, 1), (0, 3), (0, 1))])
        faces.add_(x, faces.pack(x, boxes), boxes)
    assert [plan.cache_info().misses for plan in (plan_assembly, plan_add)] == [1, 1]


@pytest.mark.usefixtures("by_kernel")
def test_boxes_that_are_contiguous_or_empty_or_overlap_in_too_many_ways():
    x = draw(4, 1, 200)
    (piece,) = faces.pack(x, cut([box((1, 2), (0, 1), (0, 200))]))
    assert piece.data_ptr() == x[1].data_ptr()
    check(x, [box((1, 2), (0, 1), (0, 0)), box((0, 4), (0, 1), (0, 1))])
    check(x, [box((1, 2), (0, 1), (0, 0))])
    many = [(i, i + 60) for i in range(40)]
    assert plan_add(cut([box(s, s, s) for s in many]), (10000, 100, 1), 8, DEVICE) is None


@pytest.mark.usefixtures("by_kernel")
def test_many_pieces_of_one_box_are_summed_first():
    x, where = draw(1, 2, 4), box((0, 1), (0, 2), (1, 3))
    pieces = [draw(1, 2, 2) for _ in range(faces.MANY)]
    expected = x.clone()
    expected[where] += sum(pieces)
    faces.add_(x, pieces, cut([where] * faces.MANY))
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("by_torch", [False, True])
def test_received_boxes_are_written_beside_what_is_there(by_torch, monkeypatch):
    monkeypatch.setattr(faces, "has_kernel", lambda x: not by_torch)
    window = draw(1, 2, 6, 3, 4, last=True)
    before, piece = window.clone(), window[:, :, 2:5]
    received = [draw(1, 2, 1, 3, 4), draw(1, 2, 1, 3, 4)]
    ends = [box((0, 1), (0, 2), rows, (0, 3), (0, 4)) for rows in ((1, 2), (5, 6))]
    whole = box((0, 1), (0, 2), (0, 1), (0, 3), (0, 4))
    pieces = tuple(Piece(i, whole, 0, end) for i, end in enumerate(ends))
    boxes = Assembly((tuple(window.shape),), pieces, (tuple(received[0].shape),) * 2)
    faces.place_(window, received, boxes)
    for box_, end in zip(received, ends, strict=True):
        assert torch.equal(window[end], box_)
    assert torch.equal(window[:, :, [0, 2, 3, 4]], before[:, :, [0, 2, 3, 4]])
    own = Piece(
        OWN,
        box((0, 1), (0, 2), (0, 3), (0, 3), (0, 4)),
        0,
        box((0, 1), (0, 2), (2, 5), (0, 3), (0, 4)),
    )
    monkeypatch.setattr(face_plans, "LARGE", 0)
    plan_assembly.cache_clear()
    faces.complete_(window, piece, received, Assembly(boxes.shapes, (own, *pieces), boxes.received))
    plan_assembly.cache_clear()
    assert window[:, :, 0].eq(0).all()
    assert torch.equal(piece, before[:, :, 2:5])


def test_boxes_are_cast_into_one_buffer():
    pieces = [draw(2, 3), draw(5)]
    copies = faces.cast(pieces, torch.bfloat16)
    assert all(map(torch.equal, copies, [piece.bfloat16() for piece in pieces]))
    assert copies[0].untyped_storage().data_ptr() == copies[1].untyped_storage().data_ptr()
    assert faces.cast(pieces, pieces[0].dtype)[0] is pieces[0]


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
    pieces = faces.pack(x, cut([box((0, 3), (2**30 - 5, 2**30)), box((0, 2), (0, 7))]))
    assert pieces[0].tolist() == [[0] * 5, [0] * 5, [0, 1, 2, 3, 4]]
