"""Convolutions of split channels, by weights that are whole, or cut along filters or channels."""

import pytest
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

MESHES = [
    {"channel": 2},
    {"channel": 3},
    {"channel": 4},
    {"channel": 2, "height": 2},
    {"sample": 2, "channel": 2},
    {"channel": 2, "height": 2, "width": 2},
]


def check_conv(place, function, shape, weight, bias, options, cut, in_place):
    """``cut`` is the dim along which the weight is cut, None for one that is whole."""
    mesh = place.mesh()

    def conv(x, w, *b):
        if isinstance(x, hs.Slab) and cut is not None:
            axes = [None] * w.ndim
            axes[cut] = "channel"
            w = hs.shard(w, mesh, axes=axes)
            b = [hs.shard(each, mesh, axes=("channel",)) for each in b]
        out = getattr(F, function)(x, w, *b, **options)
        return F.relu(out, inplace=True) if in_place else out

    weights = [seeded(*weight, seed=1), *([seeded(bias, seed=2)] if bias else [])]
    assert_same_as_serial(conv, [seeded(*shape)], weights, mesh=mesh)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_convolution_equals_that_of_one_process(run, data):
    """Channels and filters may be fewer than ranks, of which some then hold none."""
    draw = data.draw
    groups, each = draw(st.sampled_from([1, 1, 2, 4])), draw(st.integers(1, 3))
    filters = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    options = {
        "stride": draw(st.sampled_from([1, 2])),
        "padding": draw(st.integers(0, 1)),
        "groups": groups,
    }
    weight = (groups * each, filters, 3, 2) if transposed else (groups * filters, each, 3, 2)
    function = "conv_transpose2d" if transposed else "conv2d"
    bias = groups * filters if draw(st.booleans()) else None
    run(
        Place(draw(st.sampled_from(MESHES))),
        check_conv,
        function,
        (2, groups * each, 5, 6),
        weight,
        bias,
        options,
        draw(st.sampled_from([None, 0, 1])),
        draw(st.booleans()),
    )


@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("axes", [{"channel": 2}, {"channel": 3}], ids=str)
def test_what_ranks_without_channels_take_part_in_may_be_written_into(run, axes, cut):
    shapes = (2, 1, 5, 6), (2, 1, 3, 3), None
    run(Place(axes), check_conv, "conv2d", *shapes, {"padding": 1}, cut, True)
