import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import MODELS, MeshTangling, describe

mesh_1k, mesh_2k = MODELS["mesh-1k"], MODELS["mesh-2k"]


@pytest.mark.parametrize(
    ("make", "size", "parameters", "tflop"),
    [(mesh_1k, 1024, 34_418_688, 2.37), (mesh_2k, 2048, 12_387_584, 1.90)],
)
def test_parameters_and_flops_are_the_published_ones(make, size, parameters, tflop):
    with torch.device("meta"):
        found = describe(make(), (18, size, size))
    assert found.num_parameters == parameters
    assert found.forward_flops / 1e12 == pytest.approx(tflop, abs=0.005)
    assert found.output_shape == (1, size, size)


def test_both_see_a_grid_of_32x32_cells():
    with torch.device("meta"):
        assert describe(mesh_1k(outputs=4), (18, 1024, 1024)).output_shape == (4, 32, 32)
        assert describe(mesh_2k(outputs=4), (18, 2048, 2048)).output_shape == (4, 32, 32)


def test_a_cells_numbers_lie_where_the_cell_lies():
    torch.manual_seed(0)
    model = MeshTangling([[4], [4]], num_strided=2, in_channels=1).eval()
    x = torch.zeros(1, 1, 32, 32)
    x[..., 8:12, 16:20] = 1
    changed = (model(x) != model(torch.zeros_like(x)))[0, 0].nonzero()
    assert changed.amin(0).tolist() == [4, 12]  # two more nodes at each side, and whole cells
    assert changed.amax(0).tolist() == [15, 23]


def test_outputs_are_chances():
    chances = mesh_1k(in_channels=2, base_channels=2)(torch.rand(2, 2, 64, 32))
    assert chances.shape == (2, 1, 64, 32)
    assert 0 < chances.min() < chances.max() < 1


def test_extents_that_cells_do_not_fill_are_refused():
    model = mesh_2k(in_channels=2, base_channels=2)
    with pytest.raises(ConfigError, match="multiples of 64, got 128x100: pad or crop"):
        model(torch.zeros(1, 2, 128, 100))
    with pytest.raises(ConfigError, match="extents of at least 64, got 32x64"):
        model(torch.zeros(1, 2, 32, 64))


def test_outputs_and_channels_are_at_least_one():
    with pytest.raises(ConfigError, match="outputs must be at least 1, got 0"):
        mesh_2k(outputs=0)
    with pytest.raises(ConfigError, match="base_channels must be at least 1, got 0"):
        mesh_1k(base_channels=0)


def test_no_more_blocks_halve_than_there_are():
    with pytest.raises(ConfigError, match="num_strided must be from 0 to 1, got 2"):
        MeshTangling([[4]], num_strided=2)
