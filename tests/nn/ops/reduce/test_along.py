"""Functions that work along some dims, on tensors that are split along others."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

examples = settings(max_examples=12, deadline=None)
X5, SQUARES = (3, 4, 11, 9, 10), (3, 2, 5, 4, 4)
PLACES = [
    Place({"depth": 3}, {"depth": [0, 5, 5, 11]}),
    Place({"sample": 2, "depth": 2}, {"sample": [0, 0, 3]}),
]
INDEX = torch.randint(0, 4, X5, generator=torch.Generator().manual_seed(1))

CASES = {
    "sorted": lambda x: torch.sort(x, 1).values + x.sort(dim=3, descending=True)[0] + x.argsort(1),
    "largest": lambda x: x.topk(2, 1).values * torch.topk(x, 2, dim=1, largest=False).indices,
    "one of the order": lambda x: x.kthvalue(2, 1)[0] + torch.median(x, 1).values + x.mode(1)[0],
    "that stays": lambda x: torch.kthvalue(x, 2, 1, True)[0] + x.nanmedian(1, keepdim=True)[0],
    "quantiles": lambda x: x.quantile(0.3, 1) + torch.quantile(x, quarters(), dim=1).sum(0),
    "running": lambda x: x.cummax(1).values + torch.cummin(x, 3)[0] + x.logcumsumexp(1),
    "differences": lambda x: x.diff(dim=1).sum(1) + torch.diff(x, 1, 1, append=x[:, :1]).sum(1),
    "areas": lambda x: torch.trapezoid(x, dim=1) + torch.cumulative_trapezoid(x, dim=1).sum(1),
    "slopes": lambda x: torch.gradient(x, dim=1)[0] + torch.gradient(x, dim=(3, 4))[1],
    "gated": lambda x: F.glu(x, 1) + F.glu(x, dim=-1).sum(-1, keepdim=True)[:, :2],
    "local response": lambda x: F.local_response_norm(x, 3, alpha=0.1),
    "similarity": lambda x: F.cosine_similarity(x, x[:, :, :, :1] * 2 + 1, dim=1),
    "distance": lambda x: F.pairwise_distance(x, x[:, :1], keepdim=True),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 1:], dim=1),
    "cross along three": lambda x: torch.cross(x[:, :3], x[:, 1:], dim=1),
    "spectrum": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "spectrum in two dims": lambda x: torch.fft.fft2(x, dim=(1, 3)).real,
    "shifted": lambda x: torch.fft.fftshift(x, 1) + torch.fft.ifftn(x, dim=(1, 4)).real,
    "triangles": lambda x: x.tril() + torch.triu(x, 1) * 2 + (x * 1).tril_(-1),
    "picked": lambda x: x.gather(1, INDEX) + torch.gather(x, dim=1, index=INDEX[:, :1]),
    "picked by a slab": lambda x: x.gather(1, x.argsort(1)),
    "picked by a thin slab": lambda x: x.take_along_dim(x.argmin(1, True), 1),
    "added at": lambda x: x.scatter_add(1, INDEX, x * x) + (x * 1).scatter_add_(1, INDEX, x),
    "put": lambda x: torch.scatter(x, 1, INDEX, x * 0 + 3) + x.scatter(1, INDEX[:, :1], 7.0),
    "reduced at": lambda x: x.scatter_reduce(1, INDEX, x * 2, "amax"),
    "rows added": lambda x: x.index_add(1, torch.tensor([1, 1]), x[:, :2], alpha=2),
    "rows filled": lambda x: x.index_fill(1, torch.tensor([1, 3]), 2.0),
    "rows copied": lambda x: x.index_copy(1, torch.tensor([0]), x[:, 1:2]),
    "renormed": lambda x: x.mean((0, 3, 4)).renorm(2, 1, 1.0),
    "looked up": lambda x: torch.bucketize(x, BOUNDS) + torch.searchsorted(BOUNDS, x, right=True),
    "one of": lambda x: torch.isin(x.round(), torch.tensor([1.0, 2.0], dtype=x.dtype)),
    "one hot": lambda x: F.one_hot(x.abs().long()) + F.one_hot(x.abs().long(), 5)[..., :1],
}  # fmt: skip
BOUNDS = torch.linspace(-2, 2, 5, dtype=torch.float64)


def quarters():
    return torch.tensor([0.25, 0.75], dtype=torch.float64)


def check_case(place, name):
    cuts = place.cuts_of(5)
    assert_same_as_serial(CASES[name], [seeded(*X5)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_function_along_whole_dims_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


@pytest.mark.every(4)
@pytest.mark.parametrize("axes", [{"channel": 3}, {"channel": 2, "depth": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_function_along_split_channels_equals_that_of_one_process(run, axes, name):
    run(Place(axes), check_case, name)


PUT = {
    "labels": lambda x, at: torch.zeros_like(x).scatter_(1, at, 1) * x,
    "labels in a new tensor": lambda x, at: torch.zeros(X5, dtype=x.dtype).scatter_(1, at, 1) * x,
    "values": lambda x, at: x.scatter(1, at, x[:, :1] * 2) + torch.scatter(x, 1, at, 7.0),
    "sums": lambda x, at: (x * 1).scatter_add_(1, at, x[:, 1:2]) + x.scatter_add(1, at, x[:, :1]),
    "means": lambda x, at: x.scatter_reduce(1, at, x[:, :1], "mean", include_self=False),
    "masks": lambda x, at: (x > 0).gather(1, at) * x,
}


def check_put(place, name):
    """At labels with a channel of their own, and at those that a loader gives without."""
    mesh, thin = place.mesh(), INDEX[:, :1]
    flat = hs.shard(thin.squeeze(1), mesh, axes=("sample", "depth", "height", "width"))
    for ours in (hs.shard(thin, mesh), flat.unsqueeze(1), thin):
        assert_same_as_serial(
            lambda x, ours=ours: PUT[name](x, ours if isinstance(x, hs.Slab) else thin),
            [seeded(*X5)],
            mesh=mesh,
        )


@pytest.mark.every(4)
@pytest.mark.parametrize("axes", [{"channel": 3}, {"channel": 2, "depth": 2}], ids=str)
@pytest.mark.parametrize("name", PUT)
def test_elements_are_put_along_split_channels_as_in_one_process(run, axes, name):
    run(Place(axes), check_put, name)


def check_out_of_range(place):
    x = hs.shard(seeded(*X5), place.mesh())
    wrong = INDEX[:, :1].clone()
    wrong[-1, 0, -1, -1, -1] = 4
    for call in (x.gather, lambda *to: x.scatter(*to, 1.0)):
        with pytest.raises((hs.CommError, IndexError, RuntimeError), match="out of bounds"):
            call(1, wrong)


@pytest.mark.parametrize("axes", [{"channel": 2}, {"channel": 2, "depth": 2}], ids=str)
def test_an_index_that_split_channels_do_not_have_stops_all_ranks(run, axes):
    run(Place(axes), check_out_of_range)


def positive(x):
    return x @ x.mT + 5 * torch.eye(4, dtype=x.dtype)


MATRICES = {
    "determinants": lambda x: torch.det(x) + torch.linalg.det(x) + torch.slogdet(x).logabsdet,
    "inverses": lambda x: torch.inverse(x) + torch.linalg.inv(x) + torch.linalg.pinv(x),
    "roots": lambda x: torch.linalg.cholesky(positive(x)) + torch.cholesky_inverse(positive(x)),
    "factors": lambda x: torch.linalg.qr(x).R.abs() + torch.linalg.lu_factor(x)[0],
    "values": lambda x: torch.linalg.svdvals(x) + torch.linalg.eigvalsh(positive(x)),
    "conditions": lambda x: torch.linalg.cond(x),
    "vectors": lambda x: torch.linalg.svd(x).U.abs() + torch.linalg.eigh(positive(x))[1].abs(),
    "powers": lambda x: torch.matrix_exp(x) + torch.linalg.matrix_power(x, 3),
    "solutions": lambda x: torch.linalg.solve(positive(x), x[..., :2]),
    "triangular solutions": lambda x: torch.linalg.solve_triangular(positive(x), x, upper=True),
    "products": lambda x: torch.linalg.vecdot(x, x[:, :, :, :1]) + torch.cdist(x, x * 2).sum(-1),
}  # fmt: skip


def check_matrices(place):
    mesh = place.mesh()
    for name, function in MATRICES.items():
        try:
            assert_same_as_serial(function, [seeded(*SQUARES)], mesh=mesh, cuts=place.cuts)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize(
    "place",
    [Place({"depth": 3}, {"depth": [0, 3, 3, 5]}), Place({"sample": 2, "depth": 2})],
    ids=str,
)
def test_batches_of_matrices_are_treated_as_in_one_process(run, place):
    run(place, check_matrices)


def check_embedding(place):
    mesh = place.mesh()
    words = torch.arange(15).reshape(3, 5) % 7
    slab = hs.shard(words, mesh, axes=("sample", "width"))

    def embed(x, weight):
        return F.embedding(slab if isinstance(x, hs.Slab) else words, weight, padding_idx=2) * x

    assert_same_as_serial(embed, [seeded(3, 5, 4)], [seeded(7, 4, seed=1)], mesh=mesh)
    with pytest.raises(hs.UnsupportedOp, match="depend on which rows other ranks read"):
        F.embedding(slab, seeded(7, 4), max_norm=1.0)


def test_words_are_embedded_as_in_one_process(run):
    run(Place({"sample": 2}), check_embedding)


class Picked(NamedTuple):
    """A gather of elements along a dim as hypothesis draws it; ``cuts`` are the index's."""

    shape: tuple[int, ...]
    dim: int
    num: int
    cuts: dict | None

    def index(self):
        shape = [self.num if dim == self.dim else n for dim, n in enumerate(self.shape)]
        top = max(self.shape[self.dim], 1)
        return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(1))


@st.composite
def picks(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)))
    place, dim = draw(places(shape)), draw(st.integers(0, len(shape) - 1))
    num = draw(st.integers(0, 4))
    index = tuple(num if d == dim else n for d, n in enumerate(shape))
    return place, Picked(shape, dim, num, draw(st.none() | cuts_for(index, place.axes)))


def check_picked(place, picked):
    mesh, cuts = place.mesh(), place.cuts_of(len(picked.shape))
    index = picked.index()
    ours = index if picked.cuts is None else hs.shard(index, mesh, cuts=picked.cuts)

    def gather(x):
        return x.gather(picked.dim, ours if isinstance(x, hs.Slab) else index)

    def put(x):
        where = ours if isinstance(x, hs.Slab) else index
        out = x.scatter(picked.dim, where, x.gather(picked.dim, where) + 1)
        return out + (x * 1).scatter_add_(picked.dim, where, gather(x))

    assert_same_as_serial(gather, [seeded(*picked.shape)], mesh=mesh, cuts=cuts)
    assert_same_as_serial(put, [seeded(*picked.shape)], mesh=mesh, cuts=cuts)


@examples
@given(picks())
def test_elements_are_picked_and_put_along_any_dim(run, drawn):
    run(drawn[0], check_picked, drawn[1])


def check_types(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    for function in (
        lambda x: x.sort(1), lambda x: torch.topk(x, 2, 1), lambda x: x.median(1),
        lambda x: torch.cummax(x, 1), lambda x: torch.linalg.qr(x),
        lambda x: torch.slogdet(x[..., :9]), lambda x: torch.gradient(x, dim=(1, 3)),
    ):  # fmt: skip
        assert type(function(x)) is type(function(seeded(*X5)))
    values, indices = x.max(1)
    assert (values.shape, indices.dtype) == ((3, 11, 9, 10), torch.int64)
    y = x * 1
    assert y.tril_() is y
    assert y.scatter_(1, INDEX, 0.0) is y


def test_results_are_of_the_types_of_one_process(run):
    run(PLACES[0], check_types)


REFUSED = {
    "a split dim": (lambda x: x.sort(2), "torch.Tensor.sort .* it works along a split dim"),
    "all dims": (lambda x: x.median(), "median .* it works along a split dim"),
    "flattened": (lambda x: x.take_along_dim(INDEX), "it works along a split dim"),
    "a spectrum": (lambda x: torch.fft.fftn(x), "fftn .* it works along a split dim"),
    "a spectrum of the last": (lambda x: torch.fft.fftn(x, s=(2, 2, 2)), "along a split dim"),
    "a shorter index": (
        lambda x: x.gather(1, INDEX[:, :, :3]),
        "its extents differ from another operand's along a split dim",
    ),
    "a split table": (
        lambda x: torch.isin(x, x[0, 0, :, 0, 0]),
        "isin .* it must be whole on every rank",
    ),
    "elements that are not split in one that is": (
        lambda x: torch.isin(torch.ones(2, dtype=x.dtype), x),
        "it must be whole on every rank",
    ),
    "one number in what is split": (
        lambda x: torch.isin(1.0, x),
        "its result does not follow the batch",
    ),
    "tolerances": (
        lambda x: torch.linalg.pinv(x, atol=torch.ones(3, 4, 11)),
        "its dims are not those of the first operand",
    ),
    "into a plain tensor": (
        lambda x: torch.zeros(2, *X5, dtype=x.dtype)[0].scatter_(1, INDEX, x),
        "it would write a split tensor into a plain one",
    ),
    "out": (lambda x: torch.sort(x, 1, out=()), "out= is not supported"),
    "spacing": (lambda x: torch.gradient(torch.ones(3), spacing=(x,)), "it stands in a list"),
}


def check_refused(place, name):
    function, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(hs.UnsupportedOp, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(PLACES[0], check_refused, name)
