"""Functions of single elements: operators, methods and functions, in place, with broadcasting."""

import operator
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import hyperslab as hs
from hyperslab.nn.ops.each import pointwise
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, cuts_for, places

examples = settings(max_examples=12, deadline=None)
X5 = (3, 4, 11, 9, 10)
UNEVEN = Place({"sample": 2, "depth": 2}, {"depth": [0, 1, 11]})

CASES = {
    "operators": (
        lambda x, w, v: torch.sin(x * w + v).add_(1).mul_(2) - 2 * x + (1 - x) / (x * x + 1),
        [(4, 1, 1, 1), (11, 9, 10)],
    ),
    "scalars on the left": (lambda x: 2 - x + 3 / (x * x + 1) + 2**x + (-x) + (+x) + abs(x), []),
    "parameters on the left": (lambda x, w: w - x + w / (x * x + 1) + w * x, [(4, 1, 1, 1)]),
    "larger on the right": (lambda x, w: x.mean((2, 3, 4), keepdim=True) * w, [X5]),
    "larger on the left": (lambda x, w: w - x.mean((2, 3, 4), keepdim=True), [(2, *X5)]),
    "gates": (lambda x: x * torch.sigmoid(x.mean((2, 3, 4), keepdim=True)), []),
    "a vector along the last dim": (lambda x: x + x.sum((0, 1, 2, 3)), []),
    "a vector along another dim": (lambda x: x + x.sum((0, 1, 3, 4)).view(11, 1, 1), []),
    "number by number": (lambda x, w: x * w + x.mean(), [()]),
    "conditions": (lambda x, w: torch.where(x > 0, x, w * x), [(4, 1, 1, 1)]),
    "conditions by method": (lambda x, w: (x * 2).where(x > 0, w), [(4, 1, 1, 1)]),
    "conditions of plain tensors": (lambda x, w: torch.where(w > 0, x, 0.5), [X5]),
    "masks": (lambda x, w: x.masked_fill(w > 0, 2.0) + x.masked_fill(x < 0, 0.0), [X5]),
    "limits": (lambda x, w: x.clamp(min=w) + x.clamp(-0.5, 0.5) + x.clip(max=1), [(10,)]),
    "named arguments": (lambda x, w: torch.add(input=x, other=w, alpha=3), [(10,)]),
    "in place": (lambda x, w: x.clone().add_(w).mul_(x).sub_(1).div_(2).relu_(), [(4, 1, 1, 1)]),
    "in place by operator": (lambda x, w: operator.iadd(operator.imul(x + 0, w), x), [(9, 10)]),
    "in place by argument": (
        lambda x: F.leaky_relu(F.relu(x * 2, inplace=True) - 1, 0.1, inplace=True),
        [],
    ),
    "in place with the mean": (lambda x: (x * 1).mul_(x.mean((2, 3, 4), keepdim=True)), []),
    "learned slopes": (lambda x, w: F.prelu(x, w), [(4,)]),
    "learned slopes of rows": (lambda x, w: F.prelu(x.transpose(1, 2), w), [(11,)]),
    "one learned slope": (lambda x, w: torch.prelu(x, w), [(1,)]),
    "numpy's numbers": (lambda x: np.float64(2) * x * np.sqrt(2.0) + np.float32(1), []),
    "a mask of another dtype": (lambda x: (x > 0).type_as(x) * x + (x < 0).to(x) * x * x, []),
    "round trip": (lambda x: x.float().double() + x.to(torch.float64) + x.type(torch.float64), []),
}


def check_case(place, name):
    function, weights = CASES[name]
    weights = [seeded(*shape, seed=1) for shape in weights]
    mesh, cuts = place.mesh(), place.cuts_of(5)
    tolerance = 1e-6 if name == "round trip" else 1e-10
    assert_same_as_serial(
        function, [seeded(*X5)], weights, mesh=mesh, cuts=cuts, tolerance=tolerance
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_an_expression_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


ARGUMENTS = {
    "clamp": (-0.5, 0.5),
    "clip": (-0.5, 0.5),
    "clamp_max": (0.5,),
    "clamp_min": (0.5,),
    "fill": (2.0,),
    "mvlgamma": (1,),
    "multigammaln": (1,),
    "full_like": (2.0,),
    "threshold": (0.4, 2.0),
    "type": (torch.float32,),
}
INPUTS = {"acosh": 1.5, "arccosh": 1.5, "bitwise_not": 7}
UNTRIED = {"cuda", "empty_like", "frexp", "pin_memory", "requires_grad_"}
UNTRIED |= {"cdouble", "cfloat", "chalf"}  # of which no backward pass begins
UNARY = sorted({*pointwise._UNARY.split()} - UNTRIED)


class Spelling(NamedTuple):
    """One of the ways to call a function: of torch, of torch.nn.functional, as a method."""

    space: object
    name: str

    @property
    def in_place(self):
        return pointwise.writes_in_place(getattr(self.space, self.name))

    def __call__(self, x, *args):
        return getattr(x if self.space is Tensor else self.space, self.name)(*self.args(x, args))

    def args(self, x, args):
        return args if self.space is Tensor else (x, *args)


def spellings(name):
    spaces = (Tensor,) if name.startswith("__") else (torch, F, Tensor, torch.special)
    return [
        Spelling(space, spelling)
        for space in spaces
        for spelling in (name, f"{name}_")
        if callable(getattr(space, spelling, None)) and (space, spelling) != (Tensor, "where")
    ]


def check_unary(place, name):
    x = seeded(3, 2, 11).sigmoid() + INPUTS.get(name, 0)
    x = x.int() if name in ("bitwise_not", "__invert__") else x
    for spelling in spellings(name):

        def function(x, f=spelling):
            return f(x.clone() if f.in_place else x, *ARGUMENTS.get(name, ()))

        short = name in ("bfloat16", "float", "half", "type")
        settings = {"mesh": place.mesh(), "cuts": {"width": [0, 4, 4, 11]}}
        settings["tolerance"] = 0.01 if short else 1e-10
        try:
            assert_same_as_serial(function, [x], **settings)
        except NotImplementedError:  # torch has no derivative of some functions in place
            assert_same_as_serial(function, [x], **settings, input_grads=False)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", UNARY[::3])  # the sweep tries all
def test_every_spelling_of_a_function_of_one_tensor(run, name):
    run(Place({"width": 3}), check_unary, name)


BINARY = sorted({*pointwise._BROADCASTING.split()} - {"polygamma"})  # of a number and a tensor
WHOLE_NUMBERS = ("bitwise", "and", "or__", "xor", "shift", "gcd", "lcm")


def check_binary(place, name):
    mesh, cuts = place.mesh(), {"width": [0, 4, 4, 11]}
    a, b, c = (seeded(3, 2, 11, seed=n).sigmoid() for n in range(3))
    if any(word in name for word in WHOLE_NUMBERS):
        a, b, c = ((t * 9).int() for t in (a, b, c))
    if name == "where":
        a = a > 0.5
    if name == "masked_fill":
        b = b > 0.5
    if name == "ldexp":
        b = (b * 4).int()
    extra = [c] if name in ("addcmul", "addcdiv", "lerp", "where") else []
    extra = [0.5] if name == "masked_fill" else extra
    for function in spellings(name):
        tried = 0
        for kinds in ("slab slab", "slab plain", "plain slab", "slab number"):
            tried += compare_binary(function, kinds, a, b, extra, mesh, cuts)
        assert tried >= 2, f"{function} was hardly tried"


def compare_binary(function, kinds, a, b, extra, mesh, cuts):
    """Compares the function of operands of these kinds; 0 if torch does not know them."""
    first, second = kinds.split()
    in_place = function.in_place
    other = 2 if second == "number" else b
    try:
        expected = function(a.clone() if in_place else a, other, *extra)
    except (TypeError, RuntimeError):
        return 0
    if expected is NotImplemented:
        return 0
    ours = a.clone() if first == "plain" else hs.shard(a.clone(), mesh, cuts=cuts)
    theirs = hs.shard(other, mesh) if second == "slab" else other
    if in_place and first == "plain":
        kept = ours.view_as(ours)
        with pytest.raises(hs.UnsupportedOp, match="would write a split tensor into a plain one"):
            function(ours, theirs, *extra)
        assert kept.equal(a)
        return 1
    out = function(ours, theirs, *extra)
    assert out.dtype == expected.dtype
    assert out is ours or not in_place
    torch.testing.assert_close(hs.gather(out), expected, equal_nan=True)
    return 1


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BINARY[::2])
def test_every_spelling_of_a_function_of_several_tensors(run, name):
    run(Place({"width": 3}), check_binary, name)


def check_others(place):
    mesh, cuts = place.mesh(), place.cuts_of(5)
    whole = seeded(*X5)
    slab = hs.shard(whole, mesh, cuts=cuts)
    ours, expected = torch.frexp(slab), torch.frexp(whole)
    assert type(ours) is type(expected)
    assert torch.equal(hs.gather(ours.mantissa), expected.mantissa)
    assert torch.equal(hs.gather(slab.frexp().exponent), expected.exponent)
    for function in (
        lambda x: x.cdouble(), lambda x: x.cfloat().real,
        lambda x: torch.polygamma(1, x.abs()), lambda x: x.abs().polygamma_(2),
        lambda x: F.rrelu(x), lambda x: nn.RReLU(0.1, 0.3, inplace=True).eval()(x * 1),
        lambda x: torch.clamp(x, max=torch.ones(10, dtype=x.dtype)), lambda x: x.nan_to_num(0.5),
        lambda x: x.masked_fill(x > 0, torch.tensor(2.0)), lambda x: torch.where(x > 0, 1.0, 2.0),
        lambda x: x.clone().copy_(x[:1] * 2), lambda x: torch.lerp(x, x * 2, 0.3),
    ):  # fmt: skip
        torch.testing.assert_close(hs.gather(function(slab)), function(whole))
    counts = hs.shard((whole * 9).int(), mesh, cuts=cuts)
    before = counts
    counts <<= 1
    counts |= 1
    counts //= 3
    assert counts is before
    expected = (((whole * 9).int() << 1) | 1) // 3
    assert torch.equal(hs.gather(counts), expected)


def test_functions_with_further_arguments(run):
    run(UNEVEN, check_others)


ACTIVATIONS = [
    nn.CELU(inplace=True), nn.ELU(0.5, inplace=True), nn.GELU("tanh"), nn.Hardshrink(),
    nn.Hardsigmoid(inplace=True), nn.Hardswish(inplace=True), nn.Hardtanh(-0.5, 2, inplace=True),
    nn.LeakyReLU(0.2, inplace=True), nn.LogSigmoid(), nn.Mish(inplace=True), nn.ReLU(inplace=True),
    nn.ReLU6(inplace=True), nn.SELU(inplace=True), nn.SiLU(inplace=True), nn.Sigmoid(),
    nn.Softplus(2, 3), nn.Softshrink(), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(),
    nn.Threshold(0.1, 3.0, inplace=True), nn.PReLU(4, dtype=torch.float64),
]  # fmt: skip


def check_activation(place, number):
    module = ACTIVATIONS[number].requires_grad_(False)
    mesh, cuts = place.mesh(), place.cuts_of(5)
    assert_same_as_serial(lambda x: module(x * 1), [seeded(*X5)], mesh=mesh, cuts=cuts)


@pytest.mark.parametrize("number", range(len(ACTIVATIONS)), ids=lambda n: str(ACTIVATIONS[n]))
def test_a_module_without_weights(run, number):
    run(UNEVEN, check_activation, number)


class Operand(NamedTuple):
    """A tensor as hypothesis draws it; a plain one has no cuts."""

    shape: tuple[int, ...]
    cuts: dict | None


OPERATIONS = {
    "add": lambda a, b, c: a + b * c,
    "subtract": lambda a, b, c: a - (b - c),
    "divide": lambda a, b, c: a / (b.square() + 1) / (1 + c * c),
    "choose": lambda a, b, c: torch.where(b > 0, a, c),
    "blend": lambda a, b, c: torch.lerp(a, b, c),
    "extremes": lambda a, b, c: torch.maximum(a, torch.minimum(b, c)),
    "multiply and add": lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
    "compare": lambda a, b, c: (a > b) & (b <= c) | (a == c),
}


@st.composite
def operands(draw):
    """A place and three tensors that broadcast, at least one of them split."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    place = draw(places(shape))
    drawn = [Operand(shape, dict(place.cuts))]
    for _ in range(2):
        kept = shape[draw(st.integers(0, len(shape))) :]
        mine = tuple(1 if draw(st.booleans()) else n for n in kept)
        cuts = draw(st.none() | cuts_for(mine, place.axes))
        drawn.append(Operand(mine, cuts))
    return place, draw(st.permutations(drawn))


def check_broadcast(place, name, operands):
    tensors = [seeded(*operand.shape, seed=n) for n, operand in enumerate(operands)]
    is_slab = [operand.cuts is not None for operand in operands]

    def function(*given):
        split = iter(given[: sum(is_slab)])
        plain = iter(given[sum(is_slab) :])
        return OPERATIONS[name](*(next(split) if slab else next(plain) for slab in is_slab))

    assert_same_as_serial(
        function,
        [t for t, slab in zip(tensors, is_slab, strict=True) if slab],
        [t for t, slab in zip(tensors, is_slab, strict=True) if not slab],
        mesh=place.mesh(),
        cuts=[operand.cuts for operand in operands if operand.cuts is not None],
    )


@examples
@given(operands(), st.sampled_from(sorted(OPERATIONS)))
def test_any_tensors_that_broadcast_meet(run, drawn, name):
    place, three = drawn
    run(place, check_broadcast, name, three)


def check_in_place(place, operand):
    """The other operand is re-cut, whatever its cuts: the tensor that is written to stays."""
    mesh, shape = place.mesh(), (3, 2, 5)
    x = hs.shard(seeded(*shape), mesh, cuts=place.cuts_of(3))
    other = hs.shard(seeded(*operand.shape, seed=1), mesh, cuts=operand.cuts)
    y = x * 1
    layout, address = y.layout, y.local.data_ptr()
    assert y.add_(other) is y
    assert (y.layout, y.local.data_ptr()) == (layout, address)
    expected = seeded(*shape) + seeded(*operand.shape, seed=1)
    torch.testing.assert_close(hs.gather(y), expected)


@examples
@given(st.data(), st.sampled_from([(3, 2, 5), (1, 2, 5), (2, 1), (5,), (1,)]))
def test_any_tensor_is_added_in_place(run, data, shape):
    place = data.draw(places((3, 2, 5)))
    cuts = data.draw(cuts_for(shape, place.axes))
    run(place, check_in_place, Operand(shape, cuts))


def check_other_cuts(place):
    """Two tensors whose splits share no axis meet, in place too."""
    mesh = place.mesh()
    x = hs.shard(seeded(4, 2, 6, 4, 4), mesh)
    whole, columns = hs.shard(seeded(4), mesh), x.mean((0, 1, 2, 3))  # over sample, over width
    expected = seeded(4) + seeded(4, 2, 6, 4, 4).mean((0, 1, 2, 3))
    torch.testing.assert_close(hs.gather(whole + columns), expected)
    torch.testing.assert_close(hs.gather(columns + whole), expected)
    torch.testing.assert_close(hs.gather((whole * 1).add_(columns)), expected)


@pytest.mark.parametrize(
    "axes", [{"width": 2}, {"sample": 2}, {"sample": 2, "width": 2}, {"depth": 2}], ids=str
)
def test_tensors_split_over_different_axes_meet(run, axes):
    run(Place(axes), check_other_cuts)


def check_not_implemented(place):
    x = hs.shard(seeded(*X5), place.mesh())
    assert (x == None) is False  # noqa: E711 - as with tensors
    assert (x != None) is True  # noqa: E711
    assert x.type() == "torch.DoubleTensor"
    assert x.local.new_ones(3).type_as(x).dtype == torch.float64
    assert type(torch.ones(3).to(x)) is Tensor
    for wrong in ("a", [1.0], None):
        with pytest.raises(TypeError):
            x + wrong
    with pytest.raises(TypeError):
        np.ones(10) * x


def test_what_tensors_do_not_implement_slabs_do_not_either(run):
    run(UNEVEN, check_not_implemented)


REFUSED = {
    "out": (
        lambda x: torch.exp(x, out=torch.empty(X5)),
        hs.UnsupportedOp,
        "torch.exp cannot run .*dim 0 split over sample=2, dim 2 split over depth=2.*: out= is not",
    ),
    "indices": (lambda x: torch.where(x > 0), hs.UnsupportedOp, "torch.where .* it gives indices"),
    "in place, larger": (
        lambda x: x.mean((2, 3, 4), keepdim=True).add_(x),
        hs.LayoutError,
        r"a result of shape \(3, 4, 11, 9, 10\) cannot be written into .* \(3, 4, 1, 1, 1\)",
    ),
    "into a plain tensor": (
        lambda x: operator.iadd(torch.zeros(2, *X5)[0], x),
        hs.UnsupportedOp,
        "it would write a split tensor into a plain one",
    ),
    "other shapes": (lambda x: x + torch.ones(3), RuntimeError, "broadcast"),
    "random numbers": (
        lambda x: torch.randint_like(x, 9),
        hs.UnsupportedOp,
        "randint_like cannot run",
    ),
    "random numbers in place": (lambda x: x.cauchy_(), hs.UnsupportedOp, "cauchy_ cannot run"),
    "random slopes": (
        lambda x: F.rrelu(x, training=True),
        hs.UnsupportedOp,
        "rrelu cannot run .* it draws random numbers",
    ),
    "a diagonal": (lambda x: x.fill_diagonal_(1.0), hs.UnsupportedOp, "fill_diagonal_ cannot run"),
    "another storage": (lambda x: x.set_(torch.ones(3)), hs.UnsupportedOp, "set_ cannot run"),
    "a slope for each of other channels": (
        lambda x: F.prelu(x.transpose(1, 2), torch.ones(4, dtype=x.dtype)),
        hs.LayoutError,
        r"prelu: \(4,\) is not one number for each channel of an input of shape \(3, 11, 4,",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(UNEVEN, check_refused, name)


def check_two_meshes(place):
    x = hs.shard(seeded(4, 2, 4), hs.init(sample=2, width=2, device="cpu"))
    y = hs.shard(seeded(4, 2, 4), hs.init(sample=4, device="cpu"))
    words = "tensors of different meshes cannot meet: sample=2 x width=2 and sample=4"
    with pytest.raises(hs.LayoutError, match=words):
        x + y
    with pytest.raises(hs.LayoutError, match=words):
        torch.cat([x, y], 1)
    with pytest.raises(hs.LayoutError, match=words):
        F.mse_loss(x, y)
    with pytest.raises(hs.LayoutError, match=words):
        F.cross_entropy(x, y)
    with pytest.raises(hs.LayoutError, match=words):
        x.on(y.mesh)


def test_tensors_of_different_meshes_do_not_meet(run):
    run(Place({"sample": 4}), check_two_meshes)
