"""Modules made on the meta device: each rank draws what it holds, and the numbers are the same."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hyperslab as hs
from hyperslab.models import DenseAutoencoder


def made_on_meta(make, mesh, **options):
    torch.manual_seed(3)
    with torch.device("meta"):
        net = make()
    return hs.parallelize(net, mesh, **options)


def values(model):
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in state.items()
    }


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 1))


NETS = {
    "autoencoder": lambda: DenseAutoencoder(13, (7, 5)),
    "convolutions": convolutions,
}
PLANS = {"blocks": {"*": {"split": "blocks"}}, "none": None}


@pytest.fixture(scope="module")
def on_one_rank():
    return {name: values(made_on_meta(make, hs.init(device="cpu"))) for name, make in NETS.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("axes", "plan"),
    [
        ({"channel": 2}, "none"),
        ({"sample": 2}, "none"),
        ({"channel": 2, "sample": 2}, "blocks"),
        ({"channel": 2, "depth": 2}, "blocks"),
    ],
)
def test_what_is_drawn_is_the_same_on_any_mesh(net, axes, plan, on_one_rank):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    found = values(made_on_meta(NETS[net], mesh, plan=PLANS[plan]))
    assert found.keys() == on_one_rank[net].keys()
    for name, expected in on_one_rank[net].items():
        assert torch.equal(found[name], expected), name


def test_weights_are_drawn_as_torch_spreads_them():
    mesh = hs.init(device="cpu")
    weight = values(made_on_meta(lambda: nn.Linear(400, 300), mesh))["weight"]
    bound = 400**-0.5
    assert 0.99 * bound < weight.max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


class Scaled(nn.Module):
    """A weight that nothing knows how to begin."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.dense = nn.Linear(3, 3)

    def forward(self, x):
        return self.dense(x * self.scale)


@pytest.mark.ranks
@pytest.mark.parametrize("axes", [{}, {"channel": 2}])
def test_a_weight_that_nothing_gives_values_is_named(axes):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    with torch.device("meta"):
        net = nn.Sequential(Scaled())
    words = r"^0\.scale is on the meta device.* Scaled has no reset_parameters"
    with pytest.raises(hs.ConfigError, match=words):
        hs.parallelize(net, mesh)


class Begun(Scaled):
    def reset_parameters(self):
        nn.init.constant_(self.scale, 2.0)


@pytest.mark.ranks(2)
def test_a_module_of_yours_begins_by_its_own_reset_parameters():
    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    model = made_on_meta(lambda: nn.Sequential(Begun()), mesh)
    assert torch.equal(values(model)["0.scale"], torch.full((3,), 2.0))
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))


@pytest.mark.ranks(2)
def test_so_does_one_whose_layers_lie_deeper():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.ReLU())

        def reset_parameters(self):
            nn.init.constant_(self.parts[0][0].weight, 0.5)

    with torch.device("meta"):
        model = Nested()
    ours = hs.parallelize(model, hs.init(channel=2, device="cpu"))
    assert all((p == 0.5).all() for name, p in ours.named_parameters() if "weight" in name)


@pytest.mark.ranks(2)
def test_weights_that_layers_share_stay_shared():
    def make():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = net[0].weight
        return net

    mesh = hs.init(channel=2, device="cpu", timeout_seconds=100)
    model = made_on_meta(make, mesh)
    assert model[0].weight is model[1].weight
    first, last = values(model)["0.weight"], model.state_dict()["1.weight"].full_tensor()
    assert torch.equal(first, last)
