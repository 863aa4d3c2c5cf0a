import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.io import open as open_data
from hyperslab.synth import Meshes, produce
from hyperslab.synth.mesh import (
    CHANNELS,
    Eddy,
    Motion,
    QuadMesh,
    ShearLayer,
    at_nodes,
    make_tangling,
    tangled_fractions,
)


def squares(num, pitch=1.0):
    ticks = pitch * np.arange(num + 1)
    return QuadMesh(ticks[None, :] + 1j * ticks[:, None])


def test_a_cell_is_tangled_as_soon_as_one_corner_is_turned_over():
    nodes = squares(3).nodes.copy()
    assert not QuadMesh(nodes).is_tangled.any()
    nodes[1, 1] = 2.2 + 2.2j  # beyond the middle of the cell above it and to the right
    assert QuadMesh(nodes).is_tangled.tolist() == [
        [False, True, False],
        [True, True, False],
        [False, False, False],
    ]


def test_areas_are_those_of_the_quadrilaterals():
    rng = np.random.default_rng(0)
    mesh = QuadMesh.at_rest(8, rng)
    assert not mesh.is_tangled.any()
    outline = np.concatenate(
        [mesh.nodes[0, :-1], mesh.nodes[:-1, -1], mesh.nodes[-1, :0:-1], mesh.nodes[:0:-1, 0]]
    )
    around = (np.conj(outline) * np.roll(outline, -1)).imag.sum() / 2
    assert mesh.areas.sum() == pytest.approx(around)


def test_gradients_of_linear_values_are_exact_on_any_mesh():
    mesh = QuadMesh.at_rest(8, np.random.default_rng(0))
    found = mesh.gradient(3 * mesh.nodes.real - 2 * mesh.nodes.imag)
    np.testing.assert_allclose(found, 3 - 2j, atol=1e-12)


def test_values_at_nodes_are_means_of_the_cells_around():
    cells = np.array([[1.0, 3.0], [5.0, 7.0]])
    assert at_nodes(cells).tolist() == [[1, 2, 3], [3, 4, 5], [5, 6, 7]]


@pytest.mark.parametrize(
    "flow",
    [Eddy(5 + 5j, 1.5, 0.8j), Eddy(2 + 7j, 1.0, -0.2 + 0.1j), ShearLayer(5 + 5j, 1j, 0.5, 0.3)],
    ids=str,
)
def test_what_moves_with_a_flow_has_its_velocity(flow):
    start = QuadMesh.at_rest(16, np.random.default_rng(0)).nodes
    moved, velocity = start.copy(), np.zeros_like(start)
    flow.move(moved, 1e-6)
    flow.add_velocity(start, velocity)
    np.testing.assert_allclose((moved - start) / 1e-6, velocity, atol=1e-5)
    assert np.abs(velocity).max() > 0.1


def test_eddies_that_turn_keep_areas_and_end_far_from_their_centre():
    mesh = squares(200, 0.05)
    nodes = mesh.nodes.copy()
    Eddy(5 + 5j, 1.0, 1j).move(nodes, 1.0)
    np.testing.assert_allclose(QuadMesh(nodes).areas, mesh.areas, rtol=0.01)
    assert (nodes == mesh.nodes)[:40].all()
    Eddy(-90 + 0j, 1.0, 1j).move(nodes, 1.0)  # nowhere near


def test_shear_alone_never_tangles():
    mesh = squares(50, 0.2)
    nodes = mesh.nodes.copy()
    ShearLayer(5 + 5j, 1.0, 0.5, 5.0).move(nodes, 1.0)
    assert not QuadMesh(nodes).is_tangled.any()


def test_corners_are_told_apart():
    mesh = QuadMesh(np.array([[0, 1], [1j, 1 + 3j]]))
    corners = {name: float(value[0, 0]) for name, value in mesh.jacobians._asdict().items()}
    assert corners == {"low": 1, "right": 3, "top": 1, "far": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("mesh")
    produce(Meshes(size=128, count=8), out)
    return out


def test_files_have_eighteen_channels_and_four_numbers_a_block(folder):
    with h5py.File(folder / "mesh_000003.h5") as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "data": ((18, 128, 128), "<f4"),
            "target": ((4, 2, 2), "<f4"),
            "names": ((18,), "|S15"),
        }
        assert list(file["names"].asstr()) == list(CHANNELS)
    data = open_data(folder / "*.h5", preset="mesh")
    assert data.shape == (18, 128, 128)
    assert not data.arrays["target"].is_cut


def test_meshes_tangle_more_with_every_step_and_not_yet(folder):
    data = open_data(folder / "*.h5", preset="mesh")
    targets = np.stack([data.read(index, array="target") for index in range(len(data))])
    assert targets.min() >= 0
    assert targets.max() <= 1
    assert (np.diff(targets, axis=1) >= 0).all()
    means = targets.mean((0, 2, 3))
    assert means[0] < 0.15
    assert 0.1 < means[3] < 0.6
    quality = CHANNELS.index("scaled Jacobian")
    for index in range(len(data)):
        sample = data.read(index)
        assert np.isfinite(sample).all()
        assert sample[quality].min() > 0


def test_velocities_tell_what_will_tangle_better_than_any_channel():
    targets, told, alone = [], [], []
    for index in range(8):
        sample, target = make_tangling(128, 16, np.random.default_rng([0, index]))
        (vy, vx), (wy, wx) = (np.gradient(sample[channel], 10 / 128) for channel in (2, 3))
        areas = [(1 + t * vx) * (1 + t * wy) - t * t * vy * wx for t in (1, 2, 3, 4)]
        told.append(over_blocks(np.min(areas, axis=0) < 0))
        alone.append([over_blocks(np.abs(channel)) for channel in sample])
        targets.append(target[3].ravel())
    targets = np.concatenate(targets)
    by_velocity = np.corrcoef(np.concatenate(told), targets)[0, 1]
    by_channel = [np.corrcoef(each, targets)[0, 1] for each in np.concatenate(alone, axis=1)]
    assert by_velocity > 0.8
    assert by_velocity > np.abs(by_channel).max() + 0.05


def over_blocks(values):
    return values.reshape(8, 16, 8, 16).mean((1, 3)).ravel()


def test_cells_that_are_drawn_together_tangle_when_they_should():
    # Drawn to the middle at a speed that grows evenly, all is turned over after 1 / rate steps.
    mesh = QuadMesh.at_rest(8, np.random.default_rng(0))
    still = np.zeros_like(mesh.nodes)
    for rate, steps in ((0.4, [0, 0, 1, 1]), (0.1, [0, 0, 0, 0])):
        # Both directions turn over together, which is a turn by half: one alone is inside out.
        motion = Motion(mesh, -rate * (mesh.nodes.real - 5) + 0j, still)
        assert tangled_fractions(motion, 4).mean((1, 2)).tolist() == steps
    pulled = Motion(mesh, still, -0.3 * (mesh.nodes.real - 5) + 0j)  # 1 - 0.15 t^2 < 0 from t = 3
    assert tangled_fractions(pulled, 8).mean((1, 2)).tolist() == [0, 0, 1, 1]


def test_a_mesh_depends_on_its_number_alone():
    first, again, other = (make_tangling(64, 32, np.random.default_rng([0, n])) for n in (5, 5, 6))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert first[1].shape == (4, 2, 2)
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"size": 100}, "must be a multiple of 64, the size of its blocks, up to 8192, got 100"),
        ({"size": 0}, "got 0"),
        ({"size": 16384}, "up to 8192, got 16384"),
        ({"block": 0}, "multiple of 0"),
        ({"count": 0}, "count must be above 0"),
    ],
)
def test_settings_that_will_not_do_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        Meshes(**setting)
