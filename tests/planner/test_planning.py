import pytest

from hyperslab.planner.planning import machine_at_hand


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (None, "laptop"),
        ("NVIDIA H100 80GB HBM3", "DGX H100"),
        ("NVIDIA H200", "DGX H200"),
        ("NVIDIA A100-SXM4-40GB", "Perlmutter"),
        ("Tesla V100-SXM2-16GB", "Lassen"),
        ("NVIDIA L40S", "DGX H100"),
    ],
)
def test_a_machine_that_was_not_measured_is_taken_for_the_nearest(gpu, name):
    machine, measured = machine_at_hand(gpu)
    assert machine.name.lower() == name.lower()
    assert measured is None
