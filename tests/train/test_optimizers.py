import pytest
import torch
from torch import nn

from hyperslab.errors import ConfigError
from hyperslab.train.config import OptimizerConfig, ScheduleConfig
from hyperslab.train.optimizers import OPTIMIZERS, RateFactor, give_rate, make_optimizer


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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_may_have_a_share_of_the_learning_rate(weight_decay):
    model, config = network(), OptimizerConfig(weight_decay=weight_decay)
    optimizer = make_optimizer(model, config, {"0.": 0.1})
    give_rate(optimizer, 2.0)
    groups = optimizer.param_groups
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    expected = {name: 0.2 if name.startswith("0.") else 2.0 for name, _ in model.named_parameters()}
    assert {name: rates[p] for name, p in model.named_parameters()} == pytest.approx(expected)
    assert groups[0]["lr"] == 2.0  # that the log tells
    assert sum(len(group["params"]) for group in groups) == 6
    decays = {g["weight_decay"] for g in groups for p in g["params"] if p.ndim == 1}
    assert decays == {0.0}


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


def factors(config, steps_per_epoch=10, num_epochs=10):
    factor = RateFactor(config, steps_per_epoch, num_epochs)
    return [factor(step / steps_per_epoch) for step in range(steps_per_epoch * num_epochs + 1)]


def test_without_settings_the_rate_stays():
    assert set(factors(ScheduleConfig())) == {1.0}


def test_warm_up_rises_evenly_to_one_and_never_begins_at_zero():
    found = factors(ScheduleConfig(warmup_epochs=0.5))
    assert found[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize("decay", ["polynomial", "cosine"])
def test_decay_falls_all_the_way_and_stays_at_its_end(decay):
    config = ScheduleConfig(warmup_epochs=1, decay=decay, decay_epochs=8, final=0.1)
    found = factors(config)
    after = found[10:]
    assert after[0] == 1.0
    assert after == sorted(after, reverse=True)
    assert found[80:] == pytest.approx([0.1] * 21)


def test_a_polynomial_of_power_two_has_a_quarter_half_way():
    assert factors(ScheduleConfig(decay="polynomial", power=2))[50] == pytest.approx(0.25)


def test_cosine_has_half_half_way():
    assert factors(ScheduleConfig(decay="cosine"))[50] == pytest.approx(0.5)


def test_a_warm_up_longer_than_the_run_never_divides_by_nothing():
    found = factors(ScheduleConfig(warmup_epochs=20, decay="cosine"))
    assert max(found) <= 1.0
    assert found == sorted(found)
