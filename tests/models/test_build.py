import pytest
import torch
from torch import nn

from hyperslab.errors import ConfigError
from hyperslab.models import MODELS, CosmoFlow, Tiramisu, build, check_options


def test_a_model_is_made_by_name_with_the_options_of_a_table():
    model = build("cosmoflow", {"size": 16, "base_channels": 2, "dropout": 0})
    assert isinstance(model, CosmoFlow)
    assert model.size == 16
    assert isinstance(build("tiramisu", {"blocks": [1, 2], "growth": 2}), Tiramisu)


def test_an_unknown_model_is_answered_with_the_nearest_and_the_list():
    names = ", ".join(MODELS)
    with pytest.raises(
        ConfigError, match=f"no model 'CosmoFow'; did you mean 'cosmoflow'.*{names}"
    ):
        build("CosmoFow")
    with pytest.raises(ConfigError, match=rf"no model 'gpt' \(the models are {names}"):
        build("gpt")


def test_an_unknown_option_is_answered_with_the_nearest_and_the_list():
    words = "model cosmoflow has no option 'droput'; did you mean 'dropout'.*size, in_channels"
    with pytest.raises(ConfigError, match=words):
        build("cosmoflow", {"droput": 0.1})
    with pytest.raises(ConfigError, match=r"model mesh-2k has no option 'x' \(it has in_ch"):
        build("mesh-2k", {"x": 1})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cosmoflow", {"size": "128"}, "size must be a whole number, got '128'"),
        ("cosmoflow", {"size": 128.0}, "size must be a whole number, got 128.0"),
        ("cosmoflow", {"size": True}, "size must be a whole number, got True"),
        ("cosmoflow", {"dropout": "no"}, "dropout must be a number, got 'no'"),
        ("cosmoflow", {"batch_norm": 1}, "batch_norm must be true or false, got 1"),
        ("tiramisu", {"blocks": 3}, "blocks must be a list of whole numbers, got 3"),
        ("tiramisu", {"blocks": [3, 1.5]}, "blocks must be a list of whole numbers"),
        ("mesh-1k", {"outputs": "4"}, "outputs must be a whole number or .none., got '4'"),
        ("unet3d", {"norm": 3}, "norm must be a string, got 3"),
        ("unet3d", {"levels": 0}, "levels must be at least 1, got 0"),
        ("hepcnn", {"dropout": float("nan")}, "dropout must be a finite number, got nan"),
        ("cosmoflow", {"size": 100}, "power of two from 8 on, such as 128, got 100"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(name, options, words):
    with pytest.raises(ConfigError, match=f"^model {name}: (?!model).*{words}"):
        build(name, options)


def test_the_options_of_a_model_of_ones_own_are_checked_by_name():
    def make(width, depth=3):
        return nn.Linear(width, depth)

    check_options(make, {"width": 4}, "my model")
    with pytest.raises(ConfigError, match="my model has no option 'dept'; did you mean 'depth'"):
        check_options(make, {"width": 4, "dept": 2}, "my model")
    with pytest.raises(ConfigError, match="my model needs the option 'width'"):
        check_options(make, {}, "my model")
    check_options(lambda **options: None, {"anything": 1}, "my model")


def test_the_seed_decides_the_weights():
    def weights():
        torch.manual_seed(5)
        return build("unet3d", {"base_channels": 1, "levels": 2}).state_dict()

    torch.testing.assert_close(weights(), weights(), rtol=0, atol=0)
