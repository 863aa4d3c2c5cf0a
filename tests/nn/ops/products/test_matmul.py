"""Products that are summed over shared dims, on tensors that are split in any way."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.errors import LayoutError
from hyperslab.nn.ops.products.matmul import parse_equation
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)

CASES = {
    "columns": (lambda x, w: x @ w, [(10, 2)]),
    "of plain matrices": (lambda x, w: w @ x, [(2, 9)]),
    "a vector": (lambda x, w: torch.matmul(x, w) + x.matmul(w), [(10,)]),
    "a vector from the left": (lambda x, w: torch.matmul(w, x), [(9,)]),
    "of channels with channels": (lambda x: torch.einsum("ncdhw,nkdhw->nck", x, x), []),
    "rows, flattened": (lambda x, w: torch.mm(x.flatten(1), w), [(3960, 2)]),
    "of samples": (lambda x, w: x.flatten(0, 2).bmm(w), [(132, 10, 2)]),
    "of matrix and vector": (lambda x, w: torch.mv(x.mean((0, 1, 4)), w), [(9,)]),
    "of vectors": (lambda x, w: torch.dot(x.mean((0, 1, 3, 4)), w), [(11,)]),
    "added": (lambda x, w, b: torch.addmm(b, x[0, 0, 0], w, beta=2, alpha=0.5), [(10, 2), (2,)]),
    "added to a batch": (lambda x, w: x[0, 0].baddbmm(x[1, 0], w), [(11, 10, 10)]),
    "summed batches": (lambda x, w, v: torch.addbmm(w, x[0, 0], v), [(9, 2), (11, 10, 2)]),
    "added in place": (lambda x, w: (x[0, 0, 0] * 1).addmm_(w, x[1, 0, 0]), [(9, 9)]),
    "every pair": (lambda x, w: torch.outer(x.mean((0, 1, 3, 4)), w), [(3,)]),
    "inner": (lambda x, w: torch.inner(x, w) + x.inner(w), [(2, 10)]),
    "over several dims": (lambda x, w: torch.tensordot(x, w, ([2, 1], [0, 1])), [(11, 4, 2)]),
    "over the last dims": (lambda x, w: torch.tensordot(x, w), [(9, 10, 2)]),
    "einsum": (lambda x, w: torch.einsum("ncdhw,co->nodhw", x, w), [(4, 2)]),
    "einsum of dots": (lambda x, w: torch.einsum("n...w, w", x, w), [(10,)]),
    "of three": (lambda x, w, v: torch.einsum("ncdhw,cd,dk->hk", x, w, v), [(4, 11), (11, 2)]),
    "a trace over samples": (lambda x: torch.einsum("ncdhw->cw", x), []),
    "bilinear": (lambda x, v, w, b: F.bilinear(x, v, w, b), [(*X5[:4], 3), (2, 10, 3), (2,)]),
    "bilinear of channels": (lambda x, w: F.bilinear(last(x), last(x)[..., :3], w), [(2, 4, 3)]),
}  # fmt: skip


def last(x):
    return x.movedim(1, -1)


PLACES = [
    Place({"depth": 3}, {"depth": [0, 5, 5, 11]}),
    Place({"sample": 2, "width": 2}, {"width": [0, 3, 10]}),
    Place({"depth": 2, "height": 2, "width": 2}, {"height": [0, 8, 9]}),
]


def check_cases(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    for name, (function, shapes) in CASES.items():
        weights = [seeded(*shape, seed=n) for n, shape in enumerate(shapes, 1)]
        try:
            assert_same_as_serial(function, [seeded(*X5)], weights, mesh=mesh, cuts=cuts)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_product_equals_that_of_one_process(run, place):
    run(place, check_cases)


class Product(NamedTuple):
    """An einsum of two tensors as hypothesis draws it, with the axes of their dims."""

    first: str
    second: str
    output: str
    axes: tuple[tuple[str | None, ...], ...]

    @property
    def equation(self):
        return f"{self.first},{self.second}->{self.output}"


EXTENTS = {"i": 3, "j": 4, "k": 5, "l": 2, "m": 1}


@st.composite
def products(draw):
    names = st.lists(st.sampled_from([*EXTENTS]), unique=True, max_size=4).map("".join)
    first, second = draw(names), draw(names)
    output = draw(st.permutations(sorted({*first, *second})))
    output = "".join(output[: draw(st.integers(0, len(output)))])
    axes = []
    for mine in (first, second):
        order = draw(st.permutations(["sample", "height", None, None, None]))
        pairs = zip(order, mine, strict=False)
        axes.append(tuple(axis if EXTENTS[name] > 1 else None for axis, name in pairs))
    return Product(first, second, output, tuple(axes))


def check_product(place, product):
    mesh = place.mesh()
    shapes = [[EXTENTS[name] for name in mine] for mine in product[:2]]
    tensors = [seeded(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    ours = [t.detach().clone().requires_grad_() for t in tensors]
    slabs = [hs.shard(t, mesh, axes=axes) for t, axes in zip(ours, product.axes, strict=True)]
    try:
        out = torch.einsum(product.equation, *slabs)
    except hs.UnsupportedOp as refusal:
        assert "would have to be gathered over" in str(refusal)  # noqa: PT017 - ranks agree below
        return False
    expected = torch.einsum(product.equation, *tensors)
    torch.testing.assert_close(hs.gather(out), expected)
    weights = seeded(*expected.shape, seed=5)
    (expected * weights).sum().backward()
    (out * weights).sum().backward()
    for mine, theirs in zip(ours, tensors, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return True


@examples
@given(products())
def test_any_product_equals_that_of_one_process_or_all_ranks_refuse(run, product):
    assert len(set(run(Place({"sample": 2, "height": 2}), check_product, product))) == 1


@pytest.mark.parametrize(
    ("equation", "ndims", "names", "output"),
    [
        ("ij,jk", (2, 2), (("i", "j"), ("j", "k")), ("i", "k")),
        ("ba", (2,), (("b", "a"),), ("a", "b")),
        ("i...->...", (3,), (("i", "...1", "...0"),), ("...1", "...0")),
        ("...i, ...i", (3, 2), (("...1", "...0", "i"), ("...0", "i")), ("...1", "...0")),
        ("i->", (1,), (("i",),), ()),
    ],
)
def test_equations_are_read_as_einsum_reads_them(equation, ndims, names, output):
    assert parse_equation(equation, ndims) == (names, output)
    tensors = [torch.ones([2] * ndim) for ndim in ndims]
    assert torch.einsum(equation, *tensors).ndim == len(output)


@pytest.mark.parametrize(("equation", "ndims"), [("ij,jk", (2,)), ("ij", (3,)), ("ij...", (1,))])
def test_equations_that_do_not_fit_are_refused(equation, ndims):
    with pytest.raises(LayoutError, match="einsum of"):
        parse_equation(equation, ndims)


def check_short(place):
    x, w = torch.ones(4, 600, dtype=torch.bfloat16), torch.ones(600, 2, dtype=torch.bfloat16)
    slab = hs.shard(x, place.mesh(), axes=(None, "width"))
    assert torch.equal(hs.gather(slab @ w), x @ w)


def test_short_floats_are_added_in_float32(run):
    run(Place({"width": 3}), check_short)


REFUSED = {
    "a split operand on both sides": (
        lambda x: x.mean((0, 1, 3)) @ x.mean((0, 1, 3)).T,
        hs.UnsupportedOp,
        "would have to be gathered over depth",
    ),
    "a diagonal": (
        lambda x: torch.einsum("ii->i", x[0, 0, :9, :, 0]),
        hs.UnsupportedOp,
        "it takes a diagonal",
    ),
    "other extents": (lambda x: x @ torch.ones(9, 2), LayoutError, "do not fit each other"),
    "other dims": (lambda x: torch.mm(x, x), LayoutError, "mm wants operands of 2 and 2 dims"),
    "out": (lambda x: torch.matmul(x, x, out=x), hs.UnsupportedOp, "out= is not supported"),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(PLACES[0], check_refused, name)


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm"])
def test_sums_with_products_have_the_dtype_of_torchs_under_autocast(name):
    mesh, batch = hs.init(device="cpu"), () if name == "addmm" else (3,)
    first, second = torch.randn(*batch, 4, 5), torch.randn(*batch, 5, 6)
    added = torch.randn(*(batch if name == "baddbmm" else ()), 4, 6)
    slabs = [hs.shard(t, mesh, axes=[None] * t.ndim) for t in (added, first, second)]
    with torch.autocast("cpu", torch.bfloat16):
        due = getattr(torch, name)(added, first, second)
        out = getattr(torch, name)(*slabs)
    assert out.dtype == due.dtype == torch.bfloat16
    torch.testing.assert_close(out.local, due, rtol=2e-2, atol=2e-2)
