"""Operators as values: what a Call says of arguments, in whatever spelling they are given."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hyperslab as hs
from hyperslab.layout import TransposedWindow, Window
from hyperslab.nn.op import (
    IMPLEMENTED,
    OPS,
    USERS,
    FusedRule,
    Implementation,
    define,
    fuse,
    implement,
    writes_in_place,
)
from hyperslab.testing import seeded

X = (2, 4, 9, 8, 7)


def parse(function, *args, **kwargs):
    return OPS[function].parse(args, kwargs)


def weight(*shape):
    return seeded(*shape, seed=1).requires_grad_()


def test_a_pool_is_read_alike_in_every_spelling():
    x = seeded(*X)
    calls = [
        parse(F.max_pool3d, x, 3, 2, 1),
        parse(F.max_pool3d, x, (3, 3, 3), stride=[2], padding=1, return_indices=True),
        parse(torch.max_pool3d, x, kernel_size=3, stride=(2, 2, 2), padding=(1, 1, 1)),
        parse(torch.nn.functional.max_pool3d_with_indices, x, 3, 2, 1),
        parse(F.avg_pool3d, input=x, kernel_size=3, stride=2, padding=1),
    ]
    assert all(call.windows == (Window(3, 2, 1),) * 3 for call in calls)
    assert all(call.operands == (x,) for call in calls)


@pytest.mark.parametrize("stride", [None, (), []])
def test_a_pool_without_stride_steps_by_its_kernel(stride):
    call = parse(F.avg_pool2d, seeded(1, 2, 8, 8), (2, 3), stride)
    assert call.windows == (Window(2, 2), Window(3, 3))
    assert call.options["stride"] == (2, 3)


def test_ceil_mode_is_an_overhang_of_the_windows():
    call = parse(F.max_pool2d, seeded(1, 2, 8, 9), 3, 2, ceil_mode=True)
    assert call.windows == (Window(3, 2, extra=1), Window(3, 2))
    assert parse(F.lp_pool1d, seeded(2, 8), 2.0, 3, 2, True).windows == (Window(3, 2, extra=1),)


def test_a_convolution_is_its_windows_and_options():
    x, w = seeded(*X), weight(6, 2, 3, 2, 1)
    call = parse(F.conv3d, x, w, padding="same", dilation=2, groups=2)
    assert call.windows == (Window(3, 1, 2, 2), Window(2, 1, 1, 2, extra=0), Window(1, 1, 0, 2))
    assert call.operands == (x, w, None)
    assert call.options["stride"] == (1, 1, 1)
    transposed = parse(F.conv_transpose3d, x, weight(4, 3, 2, 2, 2), None, 2, 0, 1)
    assert transposed.windows == (TransposedWindow(2, 2, output_padding=1),) * 3


RESIZED = {
    "adaptive average": lambda: (F.adaptive_avg_pool2d, (seeded(2, 3, 7, 5), (3, None)), {}),
    "adaptive maximum": lambda: (F.adaptive_max_pool1d, (seeded(3, 7), 2), {}),
    "with indices": lambda: (
        F.adaptive_max_pool3d_with_indices,
        (seeded(2, 3, 7, 5, 4),),
        {"output_size": 2},
    ),
    "interpolated": lambda: (F.interpolate, (seeded(2, 3, 7, 5), (9, 5)), {"mode": "bilinear"}),
    "by a factor": lambda: (F.interpolate, (seeded(2, 3, 7),), {"scale_factor": 1.7}),
    "by an area": lambda: (F.interpolate, (seeded(2, 3, 7, 5),), {"size": 4, "mode": "area"}),
    "padded": lambda: (F.pad, (seeded(2, 3, 7, 5), (1, 2, -1, 3)), {}),
    "mirrored": lambda: (F.pad, (seeded(2, 3, 7), (2, 3), "reflect"), {}),
}


@pytest.mark.parametrize("name", RESIZED)
def test_windows_say_how_large_outputs_are(name):
    function, (x, *args), kwargs = RESIZED[name]()
    out = function(x, *args, **kwargs)
    shape = tuple((out if isinstance(out, Tensor) else out[0]).shape)
    for given in (x, hs.shard(x, hs.init(device="cpu"))):
        windows = parse(function, given, *args, **kwargs).windows
        extents = shape[-len(windows) :], x.shape[-len(windows) :]
        assert [w.output_extent(n) for w, n in zip(windows, extents[1], strict=True)] == [
            *extents[0]
        ]


def test_windows_laid_side_by_side_are_those_of_a_pool():
    x = seeded(2, 3, 7, 5)
    patches = parse(F.unfold, x, (3, 2), 2, padding=1)
    assert patches.windows == (Window(3, 1, 1, 2), Window(2, 1, 1, 2))
    along = parse(Tensor.unfold, x, -2, 3, 2)
    assert (along.windows, along.dims) == ((Window(3, 2),), (2,))


CALLS = {
    "conv": lambda: (F.conv3d, (seeded(*X), weight(6, 2, 3, 3, 3)), {"groups": 2, "padding": 1}),
    "sample": lambda: (F.conv1d, (seeded(4, 9), weight(3, 4, 2)), {"stride": 2}),
    "transposed": lambda: (F.conv_transpose2d, (seeded(2, 4, 5, 6), weight(4, 3, 2, 2)), {}),
    "max pool": lambda: (F.max_pool2d, (seeded(2, 4, 5, 6), 3), {"return_indices": True}),
    "average": lambda: (F.avg_pool1d, (seeded(2, 4, 9), 3), {"ceil_mode": True}),
    "linear": lambda: (F.linear, (seeded(2, 5, 4), weight(3, 4), weight(3)), {}),
    "matmul": lambda: (torch.matmul, (seeded(6, 2, 4), seeded(4, 5)), {}),
    "other way": lambda: (Tensor.__rmatmul__, (seeded(4, 5), seeded(2, 4)), {}),
    "added": lambda: (torch.addmm, (seeded(2, 5), seeded(2, 4), seeded(4, 5)), {"beta": 2}),
    "batches": lambda: (torch.baddbmm, (seeded(3, 2, 5), seeded(3, 2, 4), seeded(3, 4, 5)), {}),
    "tensordot": lambda: (torch.tensordot, (seeded(2, 3, 4), seeded(3, 4, 5), 2), {}),
    "einsum": lambda: (torch.einsum, ("bij,bjk->bik", seeded(2, 3, 4), seeded(2, 4, 5)), {}),
    "attention": lambda: (
        F.scaled_dot_product_attention,
        (seeded(2, 3, 4, 8), seeded(2, 3, 6, 8), seeded(2, 3, 6, 8)),
        {},
    ),
    "power average": lambda: (F.lp_pool1d, (seeded(2, 4, 9).abs(), 2.0, 3), {}),
}


WINDOWED = ["conv", "sample", "transposed", "max pool", "average", "power average"]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_call_can_be_run_again_on_other_operands(name):
    function, args, kwargs = CALLS[name]()
    call = parse(function, *args, **kwargs)
    expected = function(args[0] + 1, *args[1:], **kwargs)
    torch.testing.assert_close(call.on(call.input + 1, *call.operands[1:]).run(), expected)


@pytest.mark.parametrize("name", CALLS)
def test_flops_are_those_that_torch_counts(name):
    function, args, kwargs = CALLS[name]()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    assert parse(function, *args, **kwargs).flops == counter.get_total_flops()


def test_bytes_are_those_read_written_and_kept():
    x, w = seeded(2, 4, 8, 8), weight(3, 4, 3, 3)
    call = parse(F.conv2d, x, w)
    out = F.conv2d(x, w)
    assert call.nbytes == 8 * (x.numel() + w.numel() + out.numel())
    assert call.saved_nbytes == 8 * (x.numel() + w.numel())
    assert parse(torch.relu, x).saved_nbytes == 0  # as nothing wants a gradient
    assert parse(torch.relu, x.requires_grad_()).saved_nbytes == 8 * x.numel()


def test_calls_of_slabs_count_the_whole_tensors():
    mesh = hs.init(device="cpu")
    x, w = seeded(2, 4, 8, 8), weight(3, 4, 3, 3)
    whole, slab = parse(F.conv2d, x, w), parse(F.conv2d, hs.shard(x, mesh), w)
    assert (slab.flops, slab.nbytes, slab.windows) == (whole.flops, whole.nbytes, whole.windows)


@pytest.mark.parametrize(
    ("args", "kwargs", "dims"),
    [
        ((), {}, (0, 1, 2)),
        ((-1,), {}, (2,)),
        (((0, -1), True), {}, (0, 2)),
        ((), {"axis": (1, 2), "keepdims": True}, (1, 2)),
        ((), {"dim": 0, "out": None}, (0,)),
    ],
)
def test_dims_are_read_as_torch_and_numpy_name_them(args, kwargs, dims):
    call = parse(torch.sum, seeded(3, 4, 5), *args, **kwargs)
    assert call.dims == dims
    assert call.options["keepdim"] == (True in args or "keepdims" in kwargs)
    assert "out" not in call.options or call.options["out"] is None


@pytest.mark.parametrize("function", [F.dropout, torch.dropout, F.alpha_dropout])
def test_dropout_is_read_alike_in_every_spelling(function):
    name = "training" if function in (F.dropout, F.alpha_dropout) else "train"
    for args, kwargs in (((0.2, True), {}), ((), {"p": 0.2, name: True})):
        call = parse(function, seeded(3, 4), *args, **kwargs)
        assert (call.options["p"], call.options["training"]) == (0.2, True)
        assert [tuple(out.shape) for out in call.outputs()] == [(3, 4)]


def test_operands_are_found_in_lists_too():
    x, y = seeded(3, 4), seeded(3, 4, seed=1)
    call = parse(torch.cat, [x, y], dim=-1)
    assert call.operands == (x, y)
    assert [tuple(out.shape) for out in call.outputs()] == [(3, 8)]


def test_functions_tell_whether_they_write_and_draw():
    assert OPS[torch.relu_].in_place
    assert OPS[Tensor.__iadd__].in_place
    assert not OPS[Tensor.__invert__].in_place
    assert not OPS[torch.relu].in_place
    assert writes_in_place(F.relu, {"inplace": True})
    assert OPS[F.dropout].draws
    assert not OPS[F.relu].draws


def test_every_operator_has_a_family():
    assert {op.family for op in OPS.values()} - {"custom"} == {
        "pointwise",
        "windowed",
        "reducing",
        "shape",
        "product",
        "random",
    }
    assert all(op.function is function for function, op in OPS.items())


def test_our_own_rules_are_defined_once_and_users_may_replace_them():
    before = OPS[torch.relu]
    with pytest.raises(AssertionError, match=r"torch.relu has a rule"):
        define("pointwise", torch.relu)(lambda x: x)
    try:
        hs.register(torch.relu)(lambda x: x)
        assert OPS[torch.relu].family == "custom"
    finally:
        OPS[torch.relu] = before


@pytest.mark.parametrize("functions", [(None,), (torch.relu, "roll"), ()], ids=len)
def test_what_is_no_function_cannot_have_a_rule(functions):
    with pytest.raises(hs.ConfigError, match=r"register takes torch functions, got .*torch\.roll"):
        hs.register(*functions)


def test_what_is_no_function_cannot_be_a_rule():
    with pytest.raises(hs.ConfigError, match="register makes a function a rule, got None"):
        hs.register(torch.roll)(None)


@contextmanager
def implemented(function, *implementations):
    before = OPS[function]
    implement(function, *implementations)
    try:
        yield
    finally:
        OPS[function] = before
        IMPLEMENTED.discard(function)


class Silu(nn.Module):
    def forward(self, x):
        return F.silu(x)


def check_implementation(mesh):
    def fits(call, piece):
        return not call.options["inplace"] and type(piece) is Tensor and piece.ndim == 3

    x = hs.shard(seeded(1, 2, 8), mesh)
    with implemented(F.silu, Implementation("far off", fits, lambda call, piece: piece + 100)):
        for out in (F.silu(x), hs.parallelize(Silu(), mesh)(x)):
            torch.testing.assert_close(hs.gather(out), seeded(1, 2, 8) + 100)
        torch.testing.assert_close(F.silu(seeded(1, 2, 8)), hs.gather(x) * hs.gather(x).sigmoid())


def test_an_implementation_serves_one_rank():
    check_implementation(hs.init(device="cpu"))


@pytest.mark.ranks(2)
def test_an_implementation_serves_pieces_of_two_ranks():
    check_implementation(hs.init(device="cpu", width=2))


@pytest.mark.ranks(2)
def test_the_first_implementation_that_fits_computes_pieces_with_their_halos():
    mesh, whole = hs.init(device="cpu", height=2), seeded(1, 2, 9, 4)
    x, w, seen = hs.shard(whole, mesh), seeded(3, 2, 3, 3), []

    def note(name, function):
        def run(call, piece):
            seen.append((name, *piece.shape[2:]))
            return function(*call.operands, **call.options)

        return run

    narrow = Implementation(
        "narrow", lambda call, x: call.windows[0].kernel < 2, note("narrow", F.conv2d)
    )
    wide = Implementation("wide", lambda call, x: True, note("wide", F.conv2d))
    with implemented(F.conv2d, narrow, wide):
        out = hs.gather(F.conv2d(x, w, padding=1))
        torch.testing.assert_close(out, F.conv2d(whole, w, padding=1))
        assert [name for name, *_ in seen] == ["wide"]
    with implemented(F.avg_pool2d, Implementation("all", wide.fits, note("all", F.avg_pool2d))):
        torch.testing.assert_close(hs.gather(F.avg_pool2d(x, 2)), F.avg_pool2d(whole, 2))
    with implemented(F.max_pool2d, Implementation("all", wide.fits, note("max", F.max_pool2d))):
        due = F.max_pool2d(whole, 3, 2, 1)
        torch.testing.assert_close(hs.gather(F.max_pool2d(x, 3, 2, 1)), due)
    assert [name for name, *_ in seen] == ["wide", "all", "max"]
    assert seen[0][1] == x.local.shape[2] + 2  # a row of the other rank, and one of padding


def test_functions_whose_rules_ask_for_no_implementation_take_none():
    with pytest.raises(hs.UnsupportedOp, match=r"torch.sum is reducing: its rule asks for no"):
        implement(torch.sum, Implementation("mine", lambda call, x: True, lambda call, x: x))


def test_a_fused_rule_comes_before_the_rule_unless_it_gives_nothing():
    before, x = OPS[F.max_pool1d], hs.shard(seeded(1, 1, 8), hs.init(device="cpu"))
    narrow = FusedRule("narrow", lambda call: call.windows[0].kernel < 3, lambda call: "narrow")
    even = FusedRule(
        "even",
        lambda call: call.windows[0].kernel % 2 == 0,
        lambda call: None if call.windows[0].padding else "even",
    )
    try:
        fuse(narrow, F.max_pool1d)
        fuse(even, F.max_pool1d)
        rule = OPS[F.max_pool1d].rule
        assert rule(x, 2) == "narrow"
        assert rule(x, 4) == "even"
        assert torch.equal(rule(x, 4, padding=1).local, F.max_pool1d(x.local, 4, padding=1))
        assert torch.equal(rule(x, 3).local, F.max_pool1d(x.local, 3))
    finally:
        OPS[F.max_pool1d] = before


@pytest.mark.ranks(2)
def test_a_rule_that_gives_a_piece_of_another_shape_is_told():
    mesh, before = hs.init(depth=2, device="cpu"), OPS[F.softplus]
    hs.register(F.softplus)(lambda x: x.with_local(x.local[:, :1]))
    try:
        x = hs.shard(torch.ones(2, 3, 4, 4, 4), mesh)
        with pytest.raises(
            hs.LayoutError, match=r"softplus gives a piece of shape \(2, 1, 2, 4, 4\)"
        ):
            F.softplus(x)
    finally:
        OPS[F.softplus] = before
        USERS.discard(F.softplus)
