"""Attention with queries and batches that are split."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

attend = F.scaled_dot_product_attention
X = (3, 4, 11, 6)
MASK = seeded(11, 7, seed=3)
KEYS, VALUES = (3, 4, 7, 6), (3, 4, 7, 5)

CASES = {
    "plain": lambda q, k, v: attend(q, k, v),
    "scaled": lambda q, k, v: attend(query=q, key=k, value=v, scale=0.3),
    "causal": lambda q, k, v: attend(q, k, v, is_causal=True),
    "masked": lambda q, k, v: attend(q, k, v, MASK),
    "masked by truths": lambda q, k, v: attend(q, k, v, attn_mask=MASK.abs() > 0.1),
    "masked each": lambda q, k, v: attend(q, k, v, MASK.expand(3, 1, 11, 7)),
}


def check_case(place, name):
    keys, values = seeded(*KEYS, seed=1), seeded(*VALUES, seed=2)
    assert_same_as_serial(
        CASES[name], [seeded(*X)], [keys, values], mesh=place.mesh(), cuts=place.cuts
    )


@pytest.mark.parametrize(
    "place",
    [
        Place({"height": 3}, {"height": [0, 5, 5, 11]}),
        Place({"sample": 2, "height": 2}, {"height": [0, 1, 11]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_split_queries_attend_as_in_one_process(run, place, name):
    run(place, check_case, name)


def check_batches(place):
    mesh = place.mesh()
    x = seeded(3, 4, 7, 6)
    assert_same_as_serial(lambda q, k: attend(q, k, k * 2), [x, x + 1], mesh=mesh)
    few = seeded(3, 2, 7, 6, seed=1)
    assert_same_as_serial(lambda q, k: attend(q, k, k, enable_gqa=True), [x, few], mesh=mesh)


def test_split_samples_attend_as_in_one_process(run):
    run(Place({"sample": 3}), check_batches)


def check_modules(place):
    mesh = place.mesh()
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    x, keys, late = seeded(3, 11, 6), seeded(3, 7, 6, seed=1), torch.ones(11, 7).triu(1).bool()
    absent = torch.arange(7) > torch.tensor([[3], [6], [4]])
    for model, function in (
        (plain, lambda x: plain(x, keys, keys)[0]),
        (plain, lambda x: plain(x, keys, keys, attn_mask=late, average_attn_weights=False)[1]),
        (plain, lambda x: plain(x, keys, keys, absent, need_weights=False)[0]),
        (plain, lambda x: plain(x, keys, keys, None, False, late, is_causal=True)[0]),
        (layer, lambda x: layer(x)),
    ):
        if model is plain or not place.axes.get("height"):
            axes = ("sample", "height", None)
            slab = hs.shard(x, mesh, axes=axes, cuts=place.cuts)
            torch.testing.assert_close(hs.gather(function(slab)), function(x))


@pytest.mark.parametrize(
    "place",
    [Place({"sample": 2}), Place({"sample": 2, "height": 2}, {"height": [0, 0, 11]})],
    ids=str,
)
def test_modules_attend_as_in_one_process(run, place):
    run(place, check_modules)


REFUSED = {
    "split keys": (lambda q, k: attend(k, q, q), "gather keys and values first"),
    "split parts": (lambda q, k: attend(q.mT, k.mT, k.mT), "gather keys and values first"),
    "dropout": (lambda q, k: attend(q, k, k, dropout_p=0.1), "draws random numbers"),
    "shared heads that are split": (
        lambda q, k: attend(q.transpose(1, 2), k[:, :1], k[:, :1], enable_gqa=True),
        "its heads are split and shared by queries",
    ),
}


def check_refused(place, name):
    function, words = REFUSED[name]
    q = hs.shard(seeded(3, 4, 8, 8), place.mesh())
    with pytest.raises(hs.UnsupportedOp, match=words):
        function(q, torch.ones(3, 4, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_in_the_same_words(run, name):
    run(Place({"height": 2}), check_refused, name)
