"""Whole weights, loaded into modules whose weights are spread, and got back from them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import hyperslab as hs
from hyperslab.testing import seeded, whole
from hyperslab.testing.strategies import Place

PLACES = [
    (Place({"channel": 2}), {}),
    (Place({"channel": 3}), {}),
    (Place({"channel": 2, "sample": 2}), {"plan": {"4": {"split": "blocks"}}}),
    (Place({"channel": 2, "sample": 2}), {"shard_weights": True}),
    (Place({"sample": 2}), {"shard_weights": True}),
]


def net(seed):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(8)
    norm.running_mean.normal_()
    layers = [nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: whole(weight.grad) for name, weight in model.named_parameters()}


def check_loaded(place, options, assign):
    mesh, plain, x = place.mesh(), net(1), seeded(4, 3, 6, 6)
    state = copy.deepcopy(plain.state_dict())
    ours = hs.parallelize(net(2), mesh, **options)
    for model in (ours, *([] if "shard_weights" in options else [copy.deepcopy(ours)])):
        kinds = [type(each) for each in model.state_dict().values()]
        assert not model.load_state_dict(state, assign=assign).missing_keys
        assert [type(each) for each in model.state_dict().values()] == kinds
        for key, mine in model.state_dict().items():
            torch.testing.assert_close(whole(mine), state[key], rtol=0, atol=0, msg=key)
        due = gradients(copy.deepcopy(plain), x)
        torch.testing.assert_close(gradients(model, hs.shard(x, mesh)), due, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("place", "options"), PLACES, ids=str)
def test_each_rank_takes_its_part_of_whole_weights(run, place, options, assign):
    run(place, check_loaded, options, assign)


def check_parts(place):
    """A part of a module, another dtype, and DTensors as before."""
    ours, plain = hs.parallelize(net(2), place.mesh()), net(1)
    ours[0].load_state_dict(plain[0].float().state_dict())
    assert whole(ours[0].weight).equal(plain[0].weight.double())
    before = {key: each.clone() for key, each in ours.state_dict().items()}
    ours.load_state_dict(before)
    assert whole(ours[4].weight).equal(net(2)[4].weight)


def test_parts_of_a_module_load_whole_weights_too(run):
    run(Place({"channel": 2}), check_parts)


def check_refused(place):
    ours, state = hs.parallelize(net(2), place.mesh()), net(1).state_dict()
    wrong = {**state, "0.weight": torch.zeros(8, 3, 5, 5)}
    words = r"size mismatch for 0.weight: .*\[8, 3, 5, 5\].* model is torch.Size\(\[8, 3, 3, 3\]\)"
    with pytest.raises(RuntimeError, match=words):
        ours.load_state_dict(wrong)
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        ours.load_state_dict(state)
    assert ours.load_state_dict(state, strict=False).missing_keys == ["0.weight"]


def test_wrong_shapes_and_names_are_named(run):
    run(Place({"channel": 2}), check_refused)


def check_got_back(place, options):
    plain = net(1)
    ours = hs.parallelize(copy.deepcopy(plain), place.mesh(), **options)
    found = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    assert not any(isinstance(each, DTensor) for each in found.values())
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)
    net(2).load_state_dict(found)


@pytest.mark.parametrize(("place", "options"), PLACES, ids=str)
def test_torch_gives_whole_weights_back(run, place, options):
    run(place, check_got_back, options)
