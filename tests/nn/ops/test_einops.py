"""What einops makes of Slabs: values and gradients of one process."""

import pytest
import torch

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

einops = pytest.importorskip("einops")
layers = pytest.importorskip("einops.layers.torch")

X5 = (3, 4, 11, 9, 10)
CASES = {
    "other order": lambda x: einops.rearrange(x, "b c d h w -> w b h c d"),
    "tokens": lambda x: einops.rearrange(x, "b c d h w -> b (d h w) c"),
    "windows": lambda x: einops.rearrange(x, "b c d (h p) (w q) -> (b h w) (p q) d c", p=3, q=2),
    "several": lambda x: einops.rearrange([x, x * x], "n b c d h w -> b (n c) d h w"),
    "mean": lambda x: einops.reduce(x, "b c d h w -> b c", "mean"),
    "largest": lambda x: einops.reduce(x, "b c d (h p) w -> b h d c", "max", p=3),
    "product": lambda x: einops.reduce(x, "b c d h w -> b c h 1", "prod"),
    "repeated": lambda x: einops.repeat(x, "b c d h w -> b c (d k) h w l", k=2, l=2),
    "einsum": lambda x: einops.einsum(x, x.sin(), "b c d h w, b k d h w -> b c k d"),
    "packed": lambda x: einops.pack([x, x.mean(1)], "b * d h w")[0],
    "unpacked": lambda x: einops.unpack(x, [[3], []], "b * d h w")[1],
    "layers": lambda x: layers.Reduce("b n (d h) -> b d n", "sum", h=9)(
        layers.Rearrange("b c d h w -> b (w c) (d h)")(x)
    ),
}


def check_case(place, name):
    cuts = place.cuts_of(5)
    if name == "einsum" and "channel" in place.axes:  # whose c and k would both be split
        with pytest.raises(hs.UnsupportedOp, match="would have to be gathered over channel"):
            CASES[name](hs.shard(seeded(*X5), place.mesh(), cuts=cuts))
        return
    assert_same_as_serial(CASES[name], [seeded(*X5)], mesh=place.mesh(), cuts=cuts)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_einops_gives_what_it_gives_in_one_process(run, place, name):
    run(place, check_case, name)


def check_mix(place):
    mix = layers.EinMix("b c d h w -> b d h w k", weight_shape="c k", bias_shape="k", c=4, k=2)

    def function(x, weight, bias):
        return torch.func.functional_call(mix, {"weight": weight, "bias": bias}, (x,))

    weights = [seeded(*p.shape) for p in mix.parameters()]
    assert_same_as_serial(function, [seeded(*X5)], weights, mesh=place.mesh())


def test_a_layer_with_weights_has_their_gradients(run):
    run(Place({"depth": 2}), check_mix)


def check_shape_and_refusal(place):
    x = hs.shard(seeded(*X5), place.mesh())
    assert einops.parse_shape(x, "_ c d _ _") == {"c": 4, "d": 11}
    with pytest.raises(hs.UnsupportedOp, match=r"torch\.Tensor\.numpy .*hyperslab\.gather\(x\)"):
        einops.asnumpy(x)


def test_einops_knows_the_shape_and_makes_no_array(run):
    run(Place({"depth": 2}), check_shape_and_refusal)
