import pytest
import torch
from torch import nn

from hyperslab.errors import ConfigError
from hyperslab.train.config import OptimizerConfig
from hyperslab.train.optimizers import OPTIMIZERS, make_optimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name):
    model = network()
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=0.01, weight_decay=1e-3))
    x = torch.randn(32, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_biases_and_scales_do_not_decay():
    optimizer = make_optimizer(network(), OptimizerConfig(weight_decay=0.1))
    decays = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_frozen_weights_are_left_out():
    model = network()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_options_reach_the_optimizer():
    config = OptimizerConfig(name="sgd", options={"momentum": 0.9, "nesterov": True})
    assert make_optimizer(network(), config).defaults["momentum"] == 0.9


def test_a_class_is_found_by_its_module():
    found = make_optimizer(network(), OptimizerConfig(name="torch.optim:RAdam"))
    assert isinstance(found, torch.optim.RAdam)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OptimizerConfig(name="adamm"), "got 'adamm'; did you mean 'adam'?"),
        (OptimizerConfig(options={"beta": [0.9, 0.99]}), "no option 'beta'; did you mean 'betas'?"),
        (OptimizerConfig(options={"betas": [0.9, 2.0]}), "Invalid beta parameter"),
        (OptimizerConfig(name="sgd", options={"momentum": -1.0}), "Invalid momentum"),
    ],
)
def test_wrong_settings_are_told_in_one_line(config, words):
    with pytest.raises(ConfigError) as error:
        make_optimizer(network(), config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_without_weights_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameters to train"):
        make_optimizer(nn.ReLU(), OptimizerConfig())
