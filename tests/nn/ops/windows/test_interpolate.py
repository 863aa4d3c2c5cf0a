"""Interpolation on every mesh: values and gradients, with torch's own rounding."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place, places

examples = settings(max_examples=12, deadline=None)
X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)
MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}
ALIGNABLE = ("linear", "bilinear", "trilinear", "bicubic")

CASES = {
    "nearest, twice": (lambda x: F.interpolate(x, scale_factor=2), X5),
    "linear, twice": (lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), X5),
    "linear, to corners": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=True),
        X5,
    ),
    "linear, half": (lambda x: F.interpolate(x, scale_factor=0.5, mode="trilinear"), X5),
    "linear, to a size": (lambda x: F.interpolate(x, (7, 20, 13), mode="trilinear"), X5),
    "one dim": (lambda x: F.interpolate(x, (11, 18, 10), mode="trilinear"), X5),
    "linear by a third more": (lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), X4),
    "with the scale of the size": (
        lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
        X4,
    ),
    "cubic, twice": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), X4),
    "cubic, fewer": (lambda x: F.interpolate(x, (4, 7), mode="bicubic", align_corners=True), X4),
    "1-d": (lambda x: F.interpolate(x, 33, mode="linear"), X3),
    "area": (lambda x: F.interpolate(x, (4, 7), mode="area"), X4),
    "as large": (lambda x: F.interpolate(x, (9, 10), mode="bilinear"), X4),
    "module": (nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False), X5),
    "nearest module": (nn.UpsamplingNearest2d(scale_factor=3), X4),
    "bilinear module": (nn.UpsamplingBilinear2d(size=(18, 20)), X4),
    "nearest for exact": (lambda x: F.interpolate(x, scale_factor=4, mode="nearest-exact"), X5),
    "of channels that are split": (
        lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2, mode="bilinear"),
        X4,
    ),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_interpolation_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


class Interpolation(NamedTuple):
    """An interpolation as hypothesis draws it."""

    shape: tuple[int, ...]
    options: dict

    def __call__(self, x):
        return F.interpolate(x, **self.options)


@st.composite
def interpolations(draw):
    num_dims = draw(st.integers(1, 3))
    extents = draw(st.tuples(*[st.integers(1, 12)] * num_dims))
    options = {"mode": draw(st.sampled_from(MODES[num_dims]))}
    if options["mode"] in ALIGNABLE:
        options["align_corners"] = draw(st.sampled_from([None, False, True]))
    if draw(st.booleans()):
        options["size"] = draw(st.tuples(*[st.integers(1, 30)] * num_dims))
    else:
        factors = [draw(st.sampled_from([1, 2, 3, 4]) | st.floats(1 / n, 4)) for n in extents]
        # A product as close below a whole number as this may be it for torch.
        options["scale_factor"] = tuple(float(f) for f in factors)
        options["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    return Interpolation((draw(st.integers(1, 3)), draw(st.integers(1, 2)), *extents), options)


def check_interpolation(place, interpolation, channels_last):
    x = seeded(*interpolation.shape)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if channels_last and x.ndim in formats:
        x = x.to(memory_format=formats[x.ndim])
    cuts = place.cuts_of(x.ndim)
    assert_same_as_serial(interpolation, [x], mesh=place.mesh(), cuts=cuts)


@examples
@given(st.data(), interpolations(), st.booleans())
def test_any_interpolation_equals_that_of_one_process(run, data, interpolation, channels_last):
    place = data.draw(places(interpolation.shape))
    run(place, check_interpolation, interpolation, channels_last)


AWKWARD = [(2, 41), (2, 55), (14, 33), (14, 46), (26, 22), (39, 33), (39, 58), (97, 300), (300, 97)]
"""Sizes most of which torch rounds differently in float32, in float64 and in gradients."""


def check_rounding(place, mode, dtype):
    mesh = place.mesh()
    for n, m in AWKWARD:
        x = seeded(1, 2, n, dtype=dtype)
        for options in ({"size": m}, {"scale_factor": m / n}, {"scale_factor": (m + 0.5) / n}):
            for corners in (False, True) if mode == "linear" else (None,):
                options = {**options, "mode": mode, "align_corners": corners}
                assert_same_as_serial(
                    Interpolation(tuple(x.shape), options),
                    [x],
                    mesh=mesh,
                    cuts={"width": [0, n // 3, n // 3, n]},
                    tolerance=1e-12 if dtype is torch.float64 else 3e-6,
                )


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_torch_rounds_and_so_do_we(run, mode, dtype):
    run(Place({"width": 3}), check_rounding, mode, dtype)


def check_dtypes(place):
    mesh, cuts = place.mesh(), place.cuts_of(4)
    for options in (
        {"scale_factor": 2, "mode": "bilinear"},
        {"size": (13, 7), "mode": "bilinear"},
        {"size": (13, 7), "mode": "nearest"},
    ):
        x = seeded(*X4).bfloat16()
        out, expected = (
            F.interpolate(hs.shard(x, mesh, cuts=cuts), **options),
            F.interpolate(x, **options),
        )
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(hs.gather(out), expected, rtol=2**-7, atol=1e-3)
        with torch.autocast("cpu", torch.bfloat16):
            out = F.interpolate(hs.shard(x, mesh, cuts=cuts), **options)
            assert out.dtype == F.interpolate(x, **options).dtype
    x = (seeded(*X4) * 50).to(torch.uint8)
    out = F.interpolate(hs.shard(x, mesh, cuts=cuts), size=(13, 7))
    torch.testing.assert_close(hs.gather(out), F.interpolate(x, size=(13, 7)))


@pytest.mark.parametrize("axes", [{"height": 3}, {"height": 2, "width": 2}], ids=str)
def test_dtypes_are_those_of_one_process(run, axes):
    run(Place(axes), check_dtypes)


REFUSED = {
    "antialiasing": (
        lambda x: F.interpolate(x, 4, mode="bilinear", antialias=True),
        hs.UnsupportedOp,
        "antialias=True is not supported",
    ),
    "rounded numbers": (
        lambda x: F.interpolate(x.to(torch.uint8), 4, mode="bilinear"),
        hs.UnsupportedOp,
        "values of torch.uint8 are rounded",
    ),
    "no outputs": (lambda x: F.interpolate(x, 0), RuntimeError, "greater than 0"),
    "another number of dims": (
        lambda x: F.interpolate(x, 4, mode="trilinear"),
        NotImplementedError,
        "Got 4D input, but trilinear mode needs 5D input",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X4).abs(), place.mesh(), cuts=place.cuts_of(4))
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"height": 3}, {"height": [0, 5, 5, 9]}), check_refused, name)


def check_antialias(place):
    x = seeded(*X4)
    out = F.interpolate(hs.shard(x, place.mesh()), 4, mode="bilinear", antialias=True)
    torch.testing.assert_close(hs.gather(out), F.interpolate(x, 4, mode="bilinear", antialias=True))


def test_antialiasing_runs_where_no_spatial_dim_is_split(run):
    run(Place({"sample": 2}), check_antialias)
