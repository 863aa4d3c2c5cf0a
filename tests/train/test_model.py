import pytest
import torch
from torch import nn

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.train import model as training_model
from hyperslab.train.config import Config, DataConfig, ModelConfig, TrainConfig
from hyperslab.train.model import checkpoint_activations, float32_products, forward_context


def network():
    torch.manual_seed(0)
    block = [nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(nn.Sequential(*block), nn.Conv3d(4, 2, 3, padding=1)).double()


def gradients(model, mesh):
    torch.manual_seed(1)
    x = hs.shard(torch.randn(2, 2, 6, 4, 4, dtype=torch.float64), mesh)
    hs.parallelize(model, mesh)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.ranks(2)
def test_gradients_stay_the_same_to_the_bit():
    mesh = hs.init(depth=2, device="cpu")
    model = network()
    assert checkpoint_activations(model, ["0*"]) == ["0"]
    kept = gradients(network(), mesh)
    assert all(map(torch.equal, gradients(model, mesh), kept))


def test_the_forward_pass_runs_twice_and_keys_stay():
    model, calls = network(), []
    keys = list(model.state_dict())
    model[0][0].register_forward_hook(lambda *_: calls.append(1))
    checkpoint_activations(model, ["0"])
    model(torch.randn(1, 2, 3, 3, 3, dtype=torch.float64)).sum().backward()
    assert len(calls) == 2
    assert list(model.state_dict()) == keys


def test_a_pattern_that_fits_nothing_names_modules_that_are_there():
    with pytest.raises(ConfigError, match=r"has 'features\.\*', which no module's name fits"):
        checkpoint_activations(network(), ["features.*"])


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp64", "tf32"])
def test_on_cpus_forward_passes_run_as_they_are(precision):
    with forward_context(precision, torch.device("cpu")):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_bf16_is_for_gpus():
    with pytest.raises(ConfigError, match="is for GPUs"):
        forward_context("bf16", torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", False), ("bf16", False), ("tf32", True)]
)
def test_short_products_are_those_asked_for_and_only_for_the_run(precision, allowed):
    flags = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [flag.allow_tf32 for flag in flags]
    with float32_products(precision):
        assert [flag.allow_tf32 for flag in flags] == [allowed, allowed]
    assert [flag.allow_tf32 for flag in flags] == before


@pytest.mark.parametrize(
    ("name", "asked", "given"),
    [
        ("cosmoflow", {}, "auto"),
        ("cosmoflow", {"cuda_graphs": False}, False),
        ("nets.py:Net", {}, False),  # whose code may do something besides
        ("nets.py:Net", {"cuda_graphs": True}, True),
    ],
)
def test_graphs_are_automatic_for_models_of_hyperslab(monkeypatch, name, asked, given):
    options = []
    monkeypatch.setattr(training_model, "build_model", lambda config: network())
    monkeypatch.setattr(training_model, "parallelize", lambda *_, **more: options.append(more))
    config = Config(
        model=ModelConfig(name=name), data=DataConfig(files="a.h5"), train=TrainConfig(**asked)
    )
    training_model.make_model(config, hs.init(device="cpu"), None)
    assert options[0]["cuda_graphs"] == given


@pytest.mark.parametrize("wrong", ["yes", "True", 2])
def test_other_words_for_graphs_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs must be true, false or auto, got"):
        TrainConfig(cuda_graphs=wrong)
