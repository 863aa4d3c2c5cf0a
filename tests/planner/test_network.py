import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from hyperslab.errors import ConfigError, FormatError
from hyperslab.layout import Window
from hyperslab.planner.network import (
    INPUT,
    Layer,
    Network,
    from_json,
    load_shipped,
    shipped_names,
    to_json,
)
from hyperslab.planner.read_network import read_network
from hyperslab.train.preset_list import PRESETS

QUICK = ("autoencoder-wide", "cosmoflow-64", "hepcnn")
LAYERS = (
    Layer("a", "conv1d", "conv", (INPUT,), (4, 9), (Window(3, 1, 1, 1),), keeps=(INPUT,)),
    Layer("b", "relu", "pointwise", (0,), (4, 9), keeps=(0,), is_in_place=True),
    Layer("c", "add", "pointwise", (1, 0), (4, 9)),
)
NETWORK = Network("three", (2, 9), LAYERS, 24, 1)


@pytest.fixture(scope="module")
def network_of():
    path = Path(__file__).parent / "renew_networks.py"
    spec = importlib.util.spec_from_file_location("renew_networks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.network_of


def test_every_preset_is_shipped():
    assert shipped_names() == sorted(PRESETS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(PRESETS)
    ],
)
def test_what_is_shipped_is_what_the_module_is(network_of, name):
    assert load_shipped(name).layers == network_of(name).layers, (
        "run python tests/planner/renew_networks.py"
    )
    assert to_json(load_shipped(name)) == to_json(network_of(name))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_shipped_network_is_that_of_its_preset(name):
    network, preset = load_shipped(name), PRESETS[name]
    assert network.name == name
    assert network.input_shape == preset.shape
    assert network.num_weights == preset.num_parameters
    assert network.flops / 1e9 == pytest.approx(preset.gflop, rel=0.003)


def test_neither_shipped_networks_nor_the_search_need_torch():
    code = """
import sys
from hyperslab.planner.cost import Job
from hyperslab.planner.machine import load_machine
from hyperslab.planner.network import load_shipped
from hyperslab.planner.search import search
found = search(Job(load_shipped("cosmoflow-512"), 8), load_machine("dgx-h100"), 64)
assert found.best.fits
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_json_and_back():
    again = from_json(to_json(NETWORK), "here")
    assert again.layers == NETWORK.layers
    assert to_json(again) == to_json(NETWORK)
    assert (again.name, again.input_shape) == ("three", (2, 9))
    assert (again.num_weights, again.num_tensors) == (24, 1)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", to_json(NETWORK).replace("Window", "Door"), '{"layers": [{}]}']
)
def test_what_is_no_list_of_operators(text):
    with pytest.raises(FormatError, match=r"^mine\.json is no list of operators: "):
        from_json(text, "mine.json")


def test_an_unknown_network_is_answered_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"no network 'cosmo' \(there are autoencoder-conv, "):
        load_shipped("cosmo")


def test_who_reads_whom():
    assert NETWORK.readers == ((1, 2), (2,), ())
    assert [NETWORK.storage_of(n) for n in (INPUT, 0, 1, 2)] == [INPUT, 0, 0, 2]
    assert NETWORK.axes == ("width",)


@pytest.mark.parametrize(("size", "family"), [(1, "reduce"), ((1, 2), "pool")])
def test_a_pool_over_a_whole_sample_sends_sums_and_no_halos(size, family):
    pool = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(size))
    last = read_network(pool, (3, 8, 8)).layers[-1]
    assert (last.family, bool(last.windows)) == (family, family == "pool")
