"""Convolutions and transposed convolutions on every mesh: forward, input and weight gradients."""

import random
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.layout import Cuts, Grid, Layout, Split, Window
from hyperslab.nn.ops.windows.conv import plan_conv
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

# torch says so of a plain convolution with "same" padding and an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
examples = settings(max_examples=12, deadline=None)
X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)


@contextmanager
def halo(hidden):
    """Whether the halo exchange is hidden behind the interior, however small the pieces are."""
    before = choices.MIN_INTERIOR_NUMEL
    choices.MIN_INTERIOR_NUMEL = 0 if hidden else before
    try:
        yield
    finally:
        choices.MIN_INTERIOR_NUMEL = before


class Case(NamedTuple):
    function: object
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]


def of_module(module):
    """The module as a function of its input and weights."""

    def function(x, *weights):
        names = [name for name, _ in module.named_parameters()]
        return functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    return function


def as_complex(x):
    return torch.complex(x, x.flip(1).square())


CASES = {
    "kernel 3": Case(lambda x, w, b: F.conv3d(x, w, b, padding=1), X5, ((6, 4, 3, 3, 3), (6,))),
    "one sample": Case(
        lambda x, w, b: F.conv3d(x.mean(0), w, b, padding=1), X5, ((6, 4, 3, 3, 3), (6,))
    ),
    "one sample, transposed": Case(
        lambda x, w: F.conv_transpose3d(x.mean(0), w, stride=2), X5, ((4, 6, 3, 3, 3),)
    ),
    "kernel 1": Case(lambda x, w: F.conv3d(x, w), X5, ((6, 4, 1, 1, 1),)),
    "what is written into": Case(
        lambda x, w: F.relu(F.conv3d(x, w, stride=2, padding=1), inplace=True),
        X5,
        ((6, 4, 3, 3, 3),),
    ),
    "kernel 1 of stride 2": Case(lambda x, w: F.conv3d(x, w, stride=2), X5, ((6, 4, 1, 1, 1),)),
    "stride 2": Case(lambda x, w, b: F.conv3d(x, w, b, 2, 1), X5, ((6, 4, 3, 3, 3), (6,))),
    "even kernels, mixed strides": Case(
        lambda x, w, b: F.conv3d(x, w, b, (3, 2, 1), (1, 2, 0)), X5, ((6, 4, 4, 2, 4), (6,))
    ),
    "dilation and groups": Case(
        lambda x, w: F.conv3d(x, w, dilation=2, groups=2), X5, ((6, 2, 3, 3, 3),)
    ),
    "same": Case(lambda x, w: F.conv3d(x, w, padding="same"), X5, ((6, 4, 3, 5, 3),)),
    "same, even kernels": Case(
        lambda x, w: F.conv3d(x, w, padding="same", dilation=(1, 3, 2)), X5, ((6, 4, 4, 2, 4),)
    ),
    "valid": Case(
        lambda x, w: F.conv3d(input=x, weight=w, padding="valid"), X5, ((2, 4, 3, 3, 3),)
    ),
    "halo wider than a piece": Case(
        lambda x, w: F.conv3d(x, w, padding=(4, 0, 1)), X5, ((2, 4, 7, 7, 7),)
    ),
    "padding wider than the kernel": Case(
        lambda x, w, b: F.conv3d(x, w, b, padding=4), X5, ((2, 4, 2, 3, 2), (2,))
    ),
    "one output in all": Case(lambda x, w: F.conv3d(x, w), X5, ((2, 4, 11, 9, 10),)),
    "numpy's integers": Case(
        lambda x, w: F.conv2d(x, w, stride=np.int64(2), padding=(np.int64(1), 0)),
        X4,
        ((2, 4, 3, 3),),
    ),
    "2-d": Case(lambda x, w, b: F.conv2d(x, w, b, 2, 1), X4, ((6, 4, 3, 3), (6,))),
    "2-d depthwise": Case(lambda x, w: F.conv2d(x, w, None, 1, 2, 1, 4), X4, ((8, 1, 5, 5),)),
    "rows as channels": Case(
        lambda x, w, b: F.conv2d(x.transpose(1, 2), w, b, padding=1), X4, ((6, 9, 3, 3), (6,))
    ),
    "weights made of activations": Case(
        lambda x, w: F.conv2d(x, w * x.sum(dim=(0, 2, 3)).view(4, 1, 1)), X4, ((6, 4, 3, 3),)
    ),
    "filters made of activations": Case(
        lambda x, w: F.conv2d(x, w * x.mean((0, 1, 3)).view(9, 1, 1, 1)), X4, ((9, 4, 3, 3),)
    ),
    "1-d": Case(lambda x, w, b: F.conv1d(x, w, b, [2], [3]), X3, ((6, 4, 5), (6,))),
    "transposed, kernel 2 of stride 2": Case(
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2), X5, ((4, 5, 2, 2, 2), (5,))
    ),
    "transposed, kernel 3 of stride 2": Case(
        lambda x, w, b: F.conv_transpose3d(x, w, b, 2, 1, 1), X5, ((4, 5, 3, 3, 3), (5,))
    ),
    "transposed, everything else": Case(
        lambda x, w, b: F.conv_transpose3d(
            x, w, b, (1, 3, 4), (2, 0, 1), (0, 2, 0), groups=2, dilation=(2, 1, 1)
        ),
        X5,
        ((4, 3, 3, 2, 3), (6,)),
    ),
    "transposed, stride longer than the kernel": Case(
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=4), X5, ((4, 3, 1, 2, 3), (3,))
    ),
    "transposed, output padding by dilation": Case(
        lambda x, w: F.conv_transpose2d(x, w, dilation=3, output_padding=2), X4, ((4, 3, 2, 3),)
    ),
    "transposed 1-d": Case(lambda x, w: F.conv_transpose1d(x, w, None, 3, 1), X3, ((4, 3, 4),)),
    "transposed, output size": Case(
        lambda x, w, b: functional_call(
            nn.ConvTranspose2d(4, 3, 3, 2, 1), {"weight": w, "bias": b}, (x, [18, 20])
        ),
        X4,
        ((4, 3, 3, 3), (3,)),
    ),
    "circular module": Case(
        of_module(nn.Conv3d(4, 6, (3, 4, 5), padding="same", padding_mode="circular")),
        X5,
        ((6, 4, 3, 4, 5), (6,)),
    ),
    "reflecting module": Case(
        of_module(nn.Conv2d(4, 6, 5, stride=2, padding=(4, 1), padding_mode="reflect")),
        X4,
        ((6, 4, 5, 5), (6,)),
    ),
    "replicating module": Case(
        of_module(nn.Conv1d(4, 6, 3, padding=6, bias=False, padding_mode="replicate")),
        X3,
        ((6, 4, 3),),
    ),
    "complex": Case(
        lambda x, w, b: torch.view_as_real(
            F.conv3d(as_complex(x), torch.view_as_complex(w), torch.view_as_complex(b), 2, 1)
        ),
        X5,
        ((6, 4, 3, 3, 3, 2), (6, 2)),
    ),
    "complex 1-d, groups": Case(
        lambda x, w: torch.view_as_real(
            F.conv1d(as_complex(x), torch.view_as_complex(w), padding="same", groups=2)
        ),
        X3,
        ((6, 2, 4, 2),),
    ),
    "complex, transposed": Case(
        lambda x, w, b: torch.view_as_real(
            F.conv_transpose2d(
                as_complex(x), torch.view_as_complex(w), torch.view_as_complex(b), 2, 1, 1
            )
        ),
        X4,
        ((4, 5, 3, 3, 2), (5, 2)),
    ),
    "circular skip connection": Case(
        lambda x, w: x + F.conv3d(F.pad(x, (1,) * 6, mode="circular"), w), X5, ((4, 4, 3, 3, 3),)
    ),
}


def check_case(place, name, hidden):
    case = CASES[name]
    inputs, weights = [seeded(*case.shape)], [seeded(*shape, seed=1) for shape in case.weights]
    with halo(hidden):
        assert_same_as_serial(
            case.function,
            inputs,
            weights,
            mesh=place.mesh(),
            cuts=place.cuts_of(len(case.shape)),
        )


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_equals_that_of_one_process(run, place, name):
    run(place, check_case, name, False)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [name for name in CASES if "transposed" not in name])
def test_a_convolution_with_a_hidden_halo_equals_that_of_one_process(run, place, name):
    run(place, check_case, name, True)


class Conv(NamedTuple):
    """A convolution as hypothesis draws it."""

    shape: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool
    options: dict
    module_padding: object = None
    transposed: bool = False

    def __call__(self, x, weight, bias=None):
        num_dims = len(self.shape) - 2
        if self.module_padding is not None:
            return self.with_module(num_dims, x, weight, bias)
        name = f"conv_transpose{num_dims}d" if self.transposed else f"conv{num_dims}d"
        return getattr(F, name)(x, weight, bias, **self.options)

    def with_module(self, num_dims, x, weight, bias):
        module = getattr(nn, f"Conv{num_dims}d")(
            x.shape[1],
            weight.shape[0],
            tuple(weight.shape[2:]),
            bias=bias is not None,
            padding_mode=self.module_padding,
            **self.options,
        )
        weights = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return functional_call(module, weights, (x,))


class Situation(NamedTuple):
    """What does not change the numbers."""

    hidden: bool
    input_grads: bool
    channels_last: bool


situations = st.builds(Situation, st.booleans(), st.booleans(), st.booleans())


def per_dim(numbers, num_dims):
    """A number for all dims, or one for each."""
    return st.one_of(numbers, st.tuples(*[numbers] * num_dims))


def on_all(value, num_dims):
    return (value,) * num_dims if isinstance(value, int) else value


@st.composite
def convs(draw, modes=(None,)):
    num_dims = draw(st.integers(1, 3))
    extents = draw(st.tuples(*[st.integers(1, 9)] * num_dims))
    groups, ins, outs = (draw(st.integers(1, 2)) for _ in range(3))
    mode = draw(st.sampled_from(modes))
    options = {"dilation": draw(per_dim(st.integers(1, 3), num_dims)), "groups": groups}
    dilation = on_all(options["dilation"], num_dims)
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(num_dims))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    # Circular padding reaches at most once around, reflection not quite so far.
    limits = {"circular": extents, "reflect": [n - 1 for n in extents]}.get(mode, [4] * num_dims)
    least = [max(0, -(-(r + 1 - n) // 2)) for r, n in zip(reach, extents, strict=True)]
    if draw(st.integers(0, 3)) == 0 and all(
        -(-r // 2) <= m for r, m in zip(reach, limits, strict=True)
    ):
        options["padding"] = "same"
    else:
        bounds = [(a, min(b, a + 3)) for a, b in zip(least, limits, strict=True)]
        bounds = [(min(a, b), b) for a, b in bounds]
        options["padding"] = tuple(draw(st.integers(*pair)) for pair in bounds)
        options["stride"] = draw(per_dim(st.integers(1, 3), num_dims))
        fits = zip(extents, options["padding"], reach, strict=True)
        kernel = tuple(k if n + 2 * p > r else 1 for k, (n, p, r) in zip(kernel, fits, strict=True))
    shape = (draw(st.integers(0, 3)), groups * ins, *extents)
    return Conv(shape, (groups * outs, ins, *kernel), draw(st.booleans()), options, mode)


@st.composite
def transposed_convs(draw):
    num_dims = draw(st.integers(1, 3))
    extents = draw(st.tuples(*[st.integers(1, 7)] * num_dims))
    groups, ins, outs = (draw(st.integers(1, 2)) for _ in range(3))
    kernel, stride, dilation, padding, more = [], [], [], [], []
    for n in extents:
        k, s, d = (draw(st.integers(1, 4)) for _ in range(3))
        extra = draw(st.integers(0, max(s, d) - 1))
        written = (n - 1) * s + d * (k - 1) + extra + 1
        kernel.append(k), stride.append(s), dilation.append(d), more.append(extra)
        padding.append(draw(st.integers(0, min(4, (written - 1) // 2))))
    options = {
        "stride": tuple(stride),
        "padding": tuple(padding),
        "output_padding": tuple(more),
        "groups": groups,
        "dilation": tuple(dilation),
    }
    shape = (draw(st.integers(0, 3)), groups * ins, *extents)
    return Conv(shape, (groups * ins, outs, *kernel), draw(st.booleans()), options, transposed=True)


def as_channels_last(x):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.ndim]) if x.ndim in formats else x


def check_conv(place, conv, situation):
    x = seeded(*conv.shape)
    outs = conv.weight[1] * conv.options["groups"] if conv.transposed else conv.weight[0]
    weights = [seeded(*conv.weight, seed=1)] + [seeded(outs, seed=2)] * conv.bias
    with halo(situation.hidden):
        assert_same_as_serial(
            conv,
            [as_channels_last(x) if situation.channels_last else x],
            weights,
            mesh=place.mesh(),
            cuts=place.cuts_of(x.ndim),
            input_grads=situation.input_grads,
        )


@examples
@given(st.data(), convs(), situations)
def test_any_convolution_equals_that_of_one_process(run, data, conv, situation):
    run(data.draw(places(conv.shape)), check_conv, conv, situation)


@examples
@given(st.data(), transposed_convs(), situations)
def test_any_transposed_convolution_equals_that_of_one_process(run, data, conv, situation):
    run(data.draw(places(conv.shape)), check_conv, conv, situation)


@examples
@given(st.data(), convs(modes=["circular", "reflect", "replicate"]), situations)
def test_any_padding_mode_equals_that_of_one_process(run, data, conv, situation):
    run(data.draw(places(conv.shape)), check_conv, conv, situation)


def check_mixed_halos(place):
    mesh = place.mesh()
    with halo(mesh.rank % 2):
        assert_same_as_serial(
            lambda x, v, w: F.conv3d(F.conv3d(x, v, padding=1) + F.conv3d(x, w, padding=2), v),
            [seeded(*X5)],
            [seeded(4, 4, 3, 3, 3, seed=1), seeded(4, 4, 5, 5, 5, seed=2)],
            mesh=mesh,
            cuts=place.cuts_of(5),
        )


def test_ranks_may_differ_in_whether_they_hide_their_halo(run, place):
    run(place, check_mixed_halos)


def check_no_grad(place, hidden):
    x, w = seeded(*X5), seeded(4, 4, 3, 3, 3, seed=1).requires_grad_()
    with halo(hidden), torch.no_grad():
        out = F.conv3d(hs.shard(x, place.mesh(), cuts=place.cuts_of(5)), w, padding=1)
        assert not out.requires_grad
        torch.testing.assert_close(hs.gather(out), F.conv3d(x, w, padding=1))


@pytest.mark.parametrize("hidden", [False, True])
def test_without_gradients_the_numbers_are_the_same(run, place, hidden):
    run(place, check_no_grad, hidden)


def check_dtype(place, dtype, tolerance):
    def network(x, w, b, v):
        x = F.conv3d(x, w, b, stride=2, padding=1)
        return F.conv_transpose3d(x, v, stride=2, padding=1)

    shapes = [(4, 4, 3, 3, 3), (4,), (4, 4, 3, 3, 3)]
    weights = [seeded(*shape, seed=n).to(dtype) / 4 for n, shape in enumerate(shapes, start=1)]
    assert_same_as_serial(
        network,
        [seeded(*X5).to(dtype)],
        weights,
        mesh=place.mesh(),
        cuts=place.cuts_of(5),
        tolerance=tolerance,
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)], ids=str
)
def test_short_floats_stay_short(run, place, dtype, tolerance):
    run(place, check_dtype, dtype, tolerance)


def check_autocast(place):
    mesh = place.mesh()
    x = hs.shard(seeded(*X5).float(), mesh, cuts=place.cuts_of(5))
    w = seeded(4, 4, 3, 3, 3, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.conv_transpose3d(F.conv3d(x, w.float(), padding=1), w.float(), padding=1)
        assert out.dtype == torch.bfloat16  # on ranks that hold nothing, too
        assert F.conv3d(x.double(), w, padding=1).dtype == torch.float64  # as torch leaves it
    even = hs.shard(torch.zeros(X5, dtype=torch.bfloat16), mesh, cuts=None)
    assert (even + out).dtype == torch.bfloat16


def test_autocast_makes_one_dtype_on_all_ranks(run, place):
    run(place, check_autocast)


REFUSED = {
    "kernel larger than the input": (
        lambda x, w: F.conv3d(x, w, dilation=6),
        hs.LayoutError,
        "does not fit",
    ),
    "no outputs at all": (
        lambda x, w: F.conv_transpose3d(x, w, padding=9),
        hs.LayoutError,
        "does not fit",
    ),
    "too few channels": (
        lambda x, w: F.conv3d(x, w[:, :2]),
        hs.LayoutError,
        r"a weight of shape \(4, 2, 3, 3, 3\).* do not fit an input of shape \(3, 4, 11, 9, 10\)",
    ),
    "too few channels, transposed": (
        lambda x, w: F.conv_transpose3d(x, w[:2]),
        hs.LayoutError,
        r"a weight of shape \(2, 4, 3, 3, 3\)",
    ),
    "groups that do not divide": (
        lambda x, w: F.conv3d(x, w[:3, :2], groups=2),
        hs.LayoutError,
        "groups=2 do not fit",
    ),
    "bias of another length": (
        lambda x, w: F.conv3d(x, w, w[0, :3, 0, 0, 0]),
        hs.LayoutError,
        r"a bias of shape \(3,\)",
    ),
    "another dtype": (
        lambda x, w: F.conv3d(x, w.float()),
        hs.ConfigError,
        "must have one dtype, got torch.float64, torch.float32",
    ),
    "negative padding": (
        lambda x, w: F.conv3d(x, w, padding=-1),
        hs.LayoutError,
        "padding at least 0",
    ),
    "no stride": (lambda x, w: F.conv3d(x, w, stride=0), hs.LayoutError, "must be at least 1"),
    "one stride too few": (
        lambda x, w: F.conv3d(x, w, stride=(1, 2)),
        hs.LayoutError,
        r"\(1, 2\) should be one number, or one for each of 3 dims",
    ),
    "long output padding": (
        lambda x, w: F.conv_transpose3d(x, w, output_padding=1),
        hs.LayoutError,
        "output padding must be smaller than either stride or dilation",
    ),
    "strided same": (
        lambda x, w: F.conv3d(x, w, stride=2, padding="same"),
        hs.LayoutError,
        "padding='same' is not supported for strided convolutions",
    ),
    "unknown padding": (
        lambda x, w: F.conv3d(x, w, padding="full"),
        hs.LayoutError,
        "padding must be 'same', 'valid' or numbers, got 'full'",
    ),
    "too few dims": (
        lambda x, w: F.conv3d(x.mean((0, 1)), w),
        hs.UnsupportedOp,
        "torch.nn.functional.conv3d .*dim 0 split over depth=3.* batched input has 5, a sample 4",
    ),
    "too few split channels": (
        lambda x, w: F.conv3d(x.transpose(1, 2), w),
        hs.LayoutError,
        r"a weight of shape \(4, 4, 3, 3, 3\).* do not fit an input of shape \(3, 11, 4, 9, 10\)",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    mesh = place.mesh()
    x = hs.shard(seeded(*X5), mesh, cuts=place.cuts_of(5))
    w = seeded(4, 4, 3, 3, 3, seed=1)
    with pytest.raises(error, match=words):
        function(x, w)
    # No rank is left with half an exchange.
    torch.testing.assert_close(hs.gather(F.conv3d(x, w)), F.conv3d(seeded(*X5), w))


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"depth": 3}, {"depth": [0, 5, 5, 11]}), check_refused, name)


def draw_cuts(rng, extent, num):
    return Cuts((0, *sorted(rng.sample(range(1, extent), num - 1)), extent))


@pytest.mark.slow
def test_both_ways_to_convolve_send_the_same_messages():
    """Ranks choose by the size of their own piece whether to compute the interior first."""
    rng, num_compared = random.Random(0), 0
    for _ in range(300):
        num, grid_height = rng.choice([2, 3, 4]), rng.choice([1, 2])
        grid = Grid((1, 1, num, grid_height, 1))
        extents = [rng.randint(4, 30) for _ in range(3)]
        height = Split("height", draw_cuts(rng, extents[1], 2)) if grid_height > 1 else None
        splits = (None, None, Split("depth", draw_cuts(rng, extents[0], num)), height, None)
        layout = Layout((1, 4, *extents), splits)
        kernel = rng.choice([2, 3])
        window = Window(kernel, rng.choice([1, 2]), rng.randint(0, kernel // 2))
        for rank in range(grid.num_ranks):
            plan = plan_conv(grid, rank, layout, (window,) * 3, 8)
            if plan.halo is not None:
                num_compared += 1
                assert plan.halo.exchange.sends == plan.exchange.sends
                assert plan.halo.exchange.receives == plan.exchange.receives
    assert num_compared > 300
