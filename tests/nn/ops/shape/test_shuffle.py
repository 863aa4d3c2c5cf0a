"""Pixels and channels that change places, and norms over channels, on every mesh."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

X5, X4, X3 = (3, 4, 11, 9, 10), (3, 4, 9, 10), (3, 4, 10)

CASES = {
    "pixels": (lambda x: F.pixel_shuffle(x, 2), X4),
    "pixels of many dims": (lambda x: torch.pixel_shuffle(x.transpose(1, 2), 2), X5),
    "pixel module": (nn.PixelShuffle(2), X4),
    "pixels of one sample": (lambda x: F.pixel_shuffle(x.sum(0), 2), X4),
    "pixels of rows": (lambda x: F.pixel_shuffle(x.transpose(1, 2), 3), X4),
    "rows": (lambda x: F.channel_shuffle(x.transpose(1, 2), 3), X4),
    "response norm of rows": (lambda x: F.local_response_norm(x.transpose(1, 2), 4), X4),
    "squares": (lambda x: F.pixel_unshuffle(F.pad(x, (1, 1, 0, 3)), 4), X4),
    "squares of many dims": (lambda x: F.pixel_unshuffle(x.transpose(1, 2)[..., :8, :], 2), X5),
    "square module": (lambda x: nn.PixelUnshuffle(3)(F.pad(x, (1, 1))), X4),
    "there and back": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2).sin(), 2), X4),
    "channels": (lambda x: F.channel_shuffle(x, 2), X5),
    "channels by torch": (lambda x: torch.channel_shuffle(x, groups=2), X3),
    "channel module": (nn.ChannelShuffle(2), X4),
    "response norm": (lambda x: F.local_response_norm(x, 3), X5),
    "response norm module": (nn.LocalResponseNorm(2, alpha=0.1, beta=0.5, k=2), X4),
    "response norm 1-d": (lambda x: F.local_response_norm(x, 3, 0.1, 0.5, 2), X3),
}


def check_case(place, name):
    function, shape = CASES[name]
    cuts = place.cuts_of(len(shape))
    assert_same_as_serial(function, [seeded(*shape)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_a_shuffle_equals_that_of_one_process(run, place, name):
    run(place, check_case, name)


REFUSED = {
    "channels that make no squares": (
        lambda x: F.pixel_shuffle(x.transpose(1, 2), 2),
        hs.LayoutError,
        "squares of 2 pixels cannot be made of 9 channels",
    ),
    "squares that do not fit": (
        lambda x: F.pixel_unshuffle(x, 2),
        hs.LayoutError,
        r"squares of 2 pixels do not fill a shape of \(3, 4, 9, 10\)",
    ),
}


def check_refused(place, name):
    function, error, words = REFUSED[name]
    x = hs.shard(seeded(*X4), place.mesh())
    with pytest.raises(error, match=words):
        function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"height": 2}), check_refused, name)
