"""How plain tensors become Slabs and come back, and what their gradients are."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.layout import DIM_AXES, Box
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X4 = (3, 4, 11, 9, 10), (3, 4, 9, 10)


def own_part(slab, tensor):
    """What the rank of ``slab`` holds of the whole ``tensor``."""
    return tensor[slab.box.slices_in(Box.whole(tensor.shape))]


def check_round_trip(place, shape, dtype):
    """There and back, by both ways in; gradients as if there had been one process."""
    mesh, cuts = place.mesh(), place.cuts_of(len(shape))
    whole = (seeded(*shape) * 9).to(dtype)
    floats = whole.is_floating_point()
    x = whole.clone().requires_grad_(floats)
    slab = hs.shard(x, mesh, cuts=cuts)
    assert slab.shape == whole.shape
    assert slab.requires_grad == floats
    assert torch.equal(slab.local, own_part(slab, whole))
    assert torch.equal(hs.gather(slab), whole)
    piece = own_part(slab, whole).clone().requires_grad_(floats)
    again = hs.from_local(piece, mesh, shape, cuts=cuts)
    assert again.layout == slab.layout
    assert torch.equal(hs.gather(again), whole)
    if floats:
        weight = seeded(*shape, seed=2).to(dtype)
        (slab * slab * weight).sum().backward()
        (again * again * weight).sum().backward()
        expected = 2 * whole * weight
        torch.testing.assert_close(x.grad, expected)
        torch.testing.assert_close(piece.grad, own_part(slab, expected))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool]


@examples
@given(st.data(), st.lists(st.integers(0, 6), max_size=5), st.sampled_from(DTYPES))
def test_any_tensor_comes_back_with_its_gradient(run, data, shape, dtype):
    run(data.draw(places(shape)), check_round_trip, tuple(shape), dtype)


@pytest.mark.parametrize("shape", [X5, X4, (3, 4, 10), (3, 4), (3,), ()], ids=str)
def test_a_tensor_of_any_number_of_dims_comes_back(run, place, shape):
    run(place, check_round_trip, shape, torch.float64)


def check_gathered_gradient(place):
    """A gathered tensor in a loss of its own on every rank; all of them count, averaged."""
    mesh = place.mesh()
    x = seeded(*X5).requires_grad_()
    whole = hs.gather(hs.shard(x, mesh, cuts=place.cuts_of(5)))
    (whole.square() * seeded(*X5, seed=2)).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * seeded(*X5, seed=2))


def test_the_gradient_of_a_gathered_tensor_goes_home(run, place):
    run(place, check_gathered_gradient)


def check_partial_gradients(place):
    """Ranks that use different parts of a gathered tensor: each counts once."""
    mesh = place.mesh()
    x = seeded(*X5).requires_grad_()
    whole = hs.gather(hs.shard(x, mesh, cuts=place.cuts_of(5)))
    (whole[..., mesh.rank] * mesh.num_ranks).sum().backward()
    expected = torch.zeros(X5, dtype=torch.float64)
    expected[..., : mesh.num_ranks] = 1
    torch.testing.assert_close(x.grad, expected)


def test_the_gradients_of_all_ranks_are_added(run, place):
    run(place, check_partial_gradients)


def check_plain(place):
    x = seeded(3, 4)
    assert hs.gather(x) is x
    slab = hs.shard(x, place.mesh())
    if not slab.layout.split_dims:
        assert hs.gather(slab) is slab.local


def test_a_whole_tensor_is_gathered_already(run, place):
    run(place, check_plain)


def check_gathered_dims(place):
    """Whole along the dims asked for, split as before along the others, with its gradient."""
    mesh, cuts = place.mesh(), place.cuts_of(5)
    slab = hs.shard(seeded(*X5), mesh, cuts=cuts)
    for dims in ([2], [-1, 0], 4, [], range(5)):
        out = hs.gather(slab, dims=dims)
        chosen = {dim % 5 for dim in ([dims] if dims == 4 else dims)}
        assert out.layout.split_dims == tuple(d for d in slab.layout.split_dims if d not in chosen)
        assert_same_as_serial(
            lambda x, dims=dims: hs.gather(x * x, dims=dims).sin(), [seeded(*X5)], mesh=mesh,
            cuts=cuts,
        )  # fmt: skip
    plain = seeded(3, 4)
    assert hs.gather(plain, dims=[1]) is plain


def test_chosen_dims_are_gathered(run, place):
    run(place, check_gathered_dims)


def check_label_map(place):
    mesh, cuts = place.mesh(), dict(place.cuts)
    labels = torch.arange(3 * 11 * 9 * 10).view(3, 11, 9, 10)
    x = hs.shard(labels, mesh, axes=("sample", "depth", "height", "width"), cuts=cuts)
    image = hs.shard(seeded(*X5), mesh, cuts=cuts)
    assert x.layout.splits == (image.layout.splits[0], *image.layout.splits[2:])
    assert torch.equal(hs.gather(x), labels)


def test_a_label_map_is_cut_like_its_image(run, place):
    run(place, check_label_map)


class Cut(NamedTuple):
    axes: dict
    shape: tuple[int, ...]
    options: dict
    split_dims: tuple[int, ...]
    sizes: list[tuple[int, ...]]  # of the pieces, rank by rank


CUTS = {
    "evenly": Cut({"depth": 2}, X5, {}, (2,), [(3, 4, 6, 9, 10), (3, 4, 5, 9, 10)]),
    "unevenly": Cut(
        {"depth": 2},
        X5,
        {"cuts": {"depth": [0, 9, 11]}},
        (2,),
        [(3, 4, 9, 9, 10), (3, 4, 2, 9, 10)],
    ),
    "an empty piece": Cut(
        {"width": 2}, X5, {"cuts": {"width": (0, 0, 10)}}, (4,), [(3, 4, 11, 9, 0), X5]
    ),
    "fewer samples than ranks": Cut(
        {"sample": 3}, (2, 4), {"cuts": {"sample": [0, 1, 1, 2]}}, (0,), [(1, 4), (0, 4), (1, 4)]
    ),
    "two dims": Cut(
        {"sample": 2, "width": 2},
        (3, 4, 5),
        {},
        (0, 2),
        [(2, 4, 3), (2, 4, 2), (1, 4, 3), (1, 4, 2)],
    ),
    "images have no depth": Cut({"depth": 2}, X4, {}, (), [X4, X4]),
    "vectors have neither": Cut({"depth": 2, "height": 2}, (3, 4), {}, (), [(3, 4)] * 4),
    "channels": Cut({"channel": 2}, X5, {}, (1,), [(3, 2, 11, 9, 10)] * 2),
    "as torch chunks channels": Cut(
        {"channel": 3}, (3, 4, 5), {}, (1,), [(3, 2, 5), (3, 2, 5), (3, 0, 5)]
    ),
    "channels and rows": Cut(
        {"channel": 2, "width": 2},
        (3, 3, 5),
        {"cuts": {"channel": [0, 1, 3]}},
        (1, 2),
        [(3, 1, 3), (3, 1, 2), (3, 2, 3), (3, 2, 2)],
    ),
    "a label map": Cut(
        {"depth": 2},
        (3, 11, 9, 10),
        {"axes": ("sample", "depth", "height", "width")},
        (1,),
        [(3, 6, 9, 10), (3, 5, 9, 10)],
    ),
    "dims in another order": Cut(
        {"sample": 2, "width": 2},
        (4, 6),
        {"axes": ("width", "sample"), "cuts": {"width": [0, 1, 4]}},
        (0, 1),
        [(1, 3), (3, 3), (1, 3), (3, 3)],
    ),
    "no axis at all": Cut({"sample": 2}, (4, 6), {"axes": (None, None)}, (), [(4, 6)] * 2),
    "six dims": Cut(
        {"sample": 2},
        (2, 1, 1, 1, 1, 3),
        {"axes": ("sample", "channel", None, "depth", "height", "width")},
        (0,),
        [(1, 1, 1, 1, 1, 3)] * 2,
    ),
    "cuts along an axis of one rank": Cut(
        {"sample": 2}, (2, 3, 4), {"cuts": {"width": [0, 4]}}, (0,), [(1, 3, 4)] * 2
    ),
}


def check_cut(place, name):
    cut, mesh = CUTS[name], place.mesh()
    x = hs.shard(seeded(*cut.shape), mesh, **cut.options)
    assert x.layout.split_dims == cut.split_dims
    assert tuple(x.local.shape) == x.box.shape == cut.sizes[mesh.rank]
    assert torch.equal(hs.gather(x), seeded(*cut.shape))
    again = hs.from_local(x.local.clone(), mesh, list(cut.shape), **cut.options)
    assert torch.equal(hs.gather(again), seeded(*cut.shape))


@pytest.mark.parametrize("name", CUTS)
def test_a_tensor_is_cut(run, name):
    run(Place(CUTS[name].axes), check_cut, name)


def check_memory_format(place):
    x = seeded(*X5).to(memory_format=torch.channels_last_3d)
    slab = hs.shard(x, place.mesh(), cuts=place.cuts_of(5))
    assert slab.is_contiguous(memory_format=torch.channels_last_3d)
    even = hs.shard(x, place.mesh())
    moved = (slab * 1).add_(even)
    assert moved.is_contiguous(memory_format=torch.channels_last_3d)
    assert hs.gather(slab).is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize(
    "axes", [{}, {"sample": 2}, {"depth": 2}, {"depth": 2, "width": 2}], ids=str
)
def test_channels_last_stays_so(run, axes):
    run(Place(axes), check_memory_format)


def check_own_memory(place):
    x = seeded(*X5)
    slab = hs.shard(x, place.mesh())
    slab.mul_(0)
    assert torch.equal(x, seeded(*X5))


def test_a_piece_has_memory_of_its_own(run):
    run(Place({"depth": 2}), check_own_memory)


REFUSED = {
    "too few indices": (
        lambda mesh: hs.shard(seeded(3, 2, 1, 4, 4), mesh),
        hs.LayoutError,
        r"cannot split dim 2 of a tensor of shape \(3, 2, 1, 4, 4\), an extent of 1, over depth=2: "
        "every rank needs at least one index .*smaller depth, or give cuts with empty pieces",
    ),
    "cuts of another extent": (
        lambda mesh: hs.shard(seeded(*X5), mesh, cuts={"depth": [0, 5, 10]}),
        hs.LayoutError,
        "make 2 pieces of an extent of 10, but the mesh has depth=2 and the tensor an extent of 11",
    ),
    "too many cuts": (
        lambda mesh: hs.shard(seeded(*X5), mesh, cuts={"depth": [0, 5, 8, 11]}),
        hs.LayoutError,
        "make 3 pieces",
    ),
    "cuts that fall": (
        lambda mesh: hs.shard(seeded(*X5), mesh, cuts={"depth": [0, 12, 11]}),
        hs.LayoutError,
        "cuts must start at 0 and not decrease",
    ),
    "cuts along no axis of the tensor": (
        lambda mesh: hs.shard(seeded(*X4), mesh, cuts={"depth": [0, 5, 11]}),
        hs.LayoutError,
        r"cuts are given for \['depth'\]",
    ),
    "an unknown axis": (
        lambda mesh: hs.shard(seeded(3, 4), mesh, axes=("sample", "time")),
        hs.LayoutError,
        r"axes \('sample', 'time'\) do not fit a tensor of shape \(3, 4\)",
    ),
    "an axis twice": (
        lambda mesh: hs.shard(seeded(3, 4), mesh, axes=("depth", "depth")),
        hs.LayoutError,
        "each name once",
    ),
    "six dims without names": (
        lambda mesh: hs.shard(seeded(1, 1, 2, 1, 1, 1), mesh),
        hs.LayoutError,
        "has 6 dims, and the axes of at most 5 are known: name them",
    ),
    "no tensor": (
        lambda mesh: hs.shard([1.0, 2.0], mesh),
        hs.ConfigError,
        "a plain torch.Tensor was expected, got list",
    ),
    "no mesh": (
        lambda mesh: hs.shard(seeded(*X5), "mesh"),
        hs.ConfigError,
        "a mesh was expected, as hyperslab.init gives it, got str",
    ),
    "no mesh of pieces": (
        lambda mesh: hs.from_local(seeded(*X5), None, X5),
        hs.ConfigError,
        "a mesh was expected, as hyperslab.init gives it, got NoneType",
    ),
    "no mesh of a module": (
        lambda mesh: hs.parallelize(torch.nn.ReLU(), "mesh"),
        hs.ConfigError,
        "a mesh was expected, as hyperslab.init gives it, got str",
    ),
    "gathering no tensor": (
        lambda mesh: hs.gather([1]),
        hs.ConfigError,
        "gather takes a Slab or a tensor, got list",
    ),
    "a Slab": (
        lambda mesh: hs.shard(hs.shard(seeded(*X5), mesh), mesh),
        hs.ConfigError,
        "a plain torch.Tensor was expected, got Slab",
    ),
    "different shapes": (
        lambda mesh: hs.shard(seeded(3, 4 + mesh.rank), mesh),
        hs.CommError,
        r"ranks differ in the tensors given to shard: rank 0 has \(\(3, 4\).*rank 1 has \(\(3, 5\)",
    ),
    "different dtypes": (
        lambda mesh: hs.shard(seeded(3, 4).to([torch.float64, torch.float32][mesh.rank]), mesh),
        hs.CommError,
        "ranks differ in the tensors given to shard.*torch.float64.*torch.float32",
    ),
    "different gradients": (
        lambda mesh: hs.shard(seeded(3, 4).requires_grad_(mesh.rank == 0), mesh),
        hs.CommError,
        "ranks differ in the tensors given to shard",
    ),
    "different cuts": (
        lambda mesh: hs.shard(seeded(*X5), mesh, cuts={"depth": [0, 4 + mesh.rank, 11]}),
        hs.CommError,
        "ranks differ in the tensors given to shard",
    ),
    "a piece of another shape on one rank": (
        lambda mesh: hs.from_local(seeded(*X4[:2], 5, *X5[3:]), mesh, X5),
        (hs.LayoutError, hs.CommError),
        r"rank 0 brings a piece of shape \(3, 4, 5, 9, 10\), but its box .* \(3, 4, 6, 9, 10\)",
    ),
    "gathering a dim that is not there": (
        lambda mesh: hs.gather(hs.shard(seeded(*X5), mesh), dims=[2, 5]),
        hs.LayoutError,
        r"gather: there is no dim 5 in a tensor of 3x4x11x9x10, dim 2 split over depth=2",
    ),
    "different gradients of pieces": (
        lambda mesh: hs.from_local(seeded(3, 4).requires_grad_(mesh.rank == 0), mesh, (3, 4)),
        hs.CommError,
        "ranks differ in what from_local was given",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    mesh = place.mesh()
    with pytest.raises(error, match=words):
        function(mesh)
    dist.barrier(mesh.group)  # all ranks are still there
    assert torch.equal(hs.gather(hs.shard(seeded(*X5), mesh)), seeded(*X5))


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 2}), check_refused, name)


def test_every_number_of_dims_has_its_axes():
    assert {n: len(axes) for n, axes in DIM_AXES.items()} == {n: n for n in range(6)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of", ["input", "weight"])
def test_a_piece_that_was_computed_of_a_slabs_does_not_enter_again(of):
    mesh, x = hs.init(depth=2, device="cpu"), seeded(2, 3, 7, 4, 4)
    weight = seeded(1, 3, 1, 1, 1).requires_grad_(of == "weight")
    y = hs.shard(x.requires_grad_(of == "input"), mesh) * weight
    refused = (hs.UnsupportedOp, hs.CommError)
    with pytest.raises(refused, match=r"gradient by 2 once more: use slab.with_local"):
        hs.from_local(y.local * 2, mesh, y.shape)
    leaf = y.local.detach().requires_grad_()
    assert hs.from_local(leaf * 2, mesh, y.shape).requires_grad
