"""Writes the operators of every preset's network into the package, where the planner finds them.

    python tests/planner/renew_networks.py

Run it when a model or what is read of an operator has changed; `test_network.py` tells.
"""

import torch

from hyperslab.models import build
from hyperslab.planner.network import FOLDER, to_json
from hyperslab.planner.read_network import read_network
from hyperslab.train.preset_list import PRESETS
from hyperslab.train.read_config import read_config


def network_of(name):
    """The network that the preset ``name`` trains, read from its module."""
    model = read_config(name).model
    with torch.device("meta"):
        return read_network(build(model.name, model.options), PRESETS[name].shape, name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for preset in PRESETS:
        (FOLDER / f"{preset}.json").write_text(to_json(network_of(preset)))
