"""Networks of MONAI, unmodified, on several ranks: one training step against one process."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import hyperslab as hs

pytest.importorskip("monai")


def _load_benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
    spec = importlib.util.spec_from_file_location("hyperslab_zoo", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = sys.modules.get("hyperslab_zoo") or _load_benchmark()

SAME = [
    "UNet",
    "UNet 2-d",
    "BasicUNet",
    "BasicUNetPlusPlus",
    "SegResNet",
    "SegResNet, pixel shuffle",
    "SegResNetDS",
    "DynUNet",
    "AttentionUnet",
    "DenseNet",
    "ResNet",
    "EfficientNetBN 2-d",
    "RegUNet",
    "LocalNet",
    "AutoEncoder",
    "Classifier",
    "DiNTS",
    "MedNeXt",
    "PatchDiscriminator",
    "VoxelMorphUNet",
    "SPADENet 2-d",
    "HighResNet",
]


# All meshes of a network in a row: its step in one process is made once.
MOST = [
    (name, mesh)
    for number, name in enumerate(SAME)
    for mesh in ("uneven", "sample")[: 1 if number % 8 else 2]
]
FOUR_RANKS = [
    (name, mesh) for name in ("UNet 2-d", "SegResNet, deconv") for mesh in ("grid", "corner")
]


@pytest.mark.every(9)
@pytest.mark.parametrize(("name", "mesh"), MOST)
def test_a_training_step_equals_that_of_one_process(team_of, name, mesh):
    row = zoo.run(f"monai/{name}", mesh, "cpu", team_of)
    assert row.verdict == "same", row


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "mesh"), FOUR_RANKS)
def test_a_training_step_on_four_ranks_equals_that_of_one_process(team_of, name, mesh):
    row = zoo.run(f"monai/{name}", mesh, "cpu", team_of)
    assert row.verdict == "same", row


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_compiled_training_step_equals_that_of_one_process(team_of, name):
    row = zoo.run(f"monai/{name}", "uneven", "cpu", team_of, compiled=True)
    assert row.verdict == "same", row


def test_a_network_that_cannot_be_exact_is_refused_by_the_name_of_a_function(team_of):
    row = zoo.run("monai/VoxelMorph", "split", "cpu", team_of)
    assert row.verdict == "refused"
    assert row.why.startswith("UnsupportedOp: torch.nn.functional.grid_sample")


def evaluate(name, dtype, tolerance):
    """Compares the outputs in eval mode, under autocast where ``dtype`` is a short one."""
    serial = zoo.step_in_one_process(f"monai/{name}", "cpu")
    (x,) = serial.inputs
    mesh = hs.init(height=2, device="cpu")
    model = copy.deepcopy(serial.model).eval()
    short = dtype is not torch.float64
    if short:
        model, x = model.float(), x.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=short):
        expected = model(x)
        ours = hs.gather(hs.parallelize(model, mesh)(hs.shard(x, mesh)))
    assert ours.dtype == expected.dtype
    assert (ours - expected).norm() < tolerance * expected.norm()


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["DenseNet", "EfficientNetBN 2-d"])
@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_equals_that_of_one_process(team_of, name, dtype):
    team_of(2).run(evaluate, name, dtype, 1e-12 if dtype is torch.float64 else 0.03)
