import numpy as np
import pytest

from hyperslab.synth.lagrangian import Eddy, QuadMesh, ShearLayer, at_nodes


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
