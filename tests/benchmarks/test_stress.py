"""Random networks on random meshes, a few of those that benchmarks/stress.py tries."""

import pytest
import torch
from fuzzing.networks import (
    Outcome,
    check_channels,
    check_compiled,
    check_network,
    stress,
    try_seed,
)
from fuzzing.random_net import RandomNet, random_place
from fuzzing.ways_of_use import check_way

from hyperslab.testing import rank_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    # The compiler itself does what torch warns of.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_networks_are_drawn_by_their_seed():
    one, same, other = RandomNet(3), RandomNet(3), RandomNet(4)
    assert one.describe() == same.describe() != other.describe()
    torch.testing.assert_close(one(one.sample), same(same.sample))
    assert random_place(3, (2, 3, 8, 8)) == random_place(3, (2, 3, 8, 8))


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_random_networks_give_the_numbers_of_one_process_on_random_meshes(team_of, count):
    outcomes = [try_seed(seed, team_of, check_network) for seed in range(count)]
    assert [one for one in outcomes if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in outcomes) >= 0.9 * count


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_networks_used_in_random_ways_give_the_numbers_of_one_process(team_of, count):
    outcomes = [try_seed(seed, team_of, check_way) for seed in range(count)]
    assert [one for one in outcomes if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in outcomes) >= 0.8 * count


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_random_networks_whose_channels_and_parts_are_cut_give_the_numbers_of_one_process(
    team_of, count
):
    outcomes = [try_seed(seed, team_of, check_channels) for seed in range(count)]
    assert [one for one in outcomes if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in outcomes) >= 0.7 * count


@pytest.mark.slow
def test_compiled_random_networks_give_the_numbers_of_one_process(team_of):
    outcomes = [try_seed(seed, team_of, check_compiled) for seed in range(60)]
    assert [one for one in outcomes if one.verdict == "wrong"] == []
    assert sum(one.verdict == "right" for one in outcomes) >= 54


@pytest.mark.parametrize("seed", [8, pytest.param(27, marks=pytest.mark.slow)])
def test_a_compiled_random_network_on_two_ranks(team_of, seed):
    assert team_of(2).run(check_compiled, seed, "cpu") == ["", ""]


def test_a_network_that_hangs_is_wrong_and_the_next_is_tried(monkeypatch):
    monkeypatch.setattr(rank_processes, "STACK_SECONDS", 0)
    first, second = stress(range(2), timeout_seconds=0)
    assert (first.seed, first.verdict) == (0, "wrong")
    assert second.seed == 1
    assert isinstance(second, Outcome)
