"""Plans of stages, and what sparsity adds to the loss."""

import math

import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.train.config import StagesConfig
from hyperslab.train.stages import check_unit_range, plan_stages, sparsity


def planned(**settings):
    return plan_stages(StagesConfig(**settings), 2, together=3, lr=0.1)


def test_epochs_are_counted_over_all_stages():
    stages = planned(epochs=[2, 4], noise=[0.1, 0.2], lr=0.5)
    assert [(s.first_epoch, s.end_epoch) for s in stages] == [(0, 2), (2, 6), (6, 9)]
    assert [s.pairs for s in stages] == [(0, 1), (1, 2), (0, 2)]
    assert [s.noise for s in stages] == [0.1, 0.2, 0.1]
    assert [s.lr for s in stages] == [0.5, 0.5, 0.1]


def test_lists_of_another_length_than_the_stack_are_refused():
    with pytest.raises(ConfigError, match=r"stages.lr = \[0.1\] has 1 entries, .* 2 pairs"):
        planned(epochs=1, lr=[0.1])


def test_penalties_are_what_their_formulas_say():
    code = torch.rand(6, 3, 4, 5, dtype=torch.float64)
    stage = planned(epochs=1, kl=0.7, rho=0.2, l1=0.3)[0]
    kl = 0.0
    for unit in range(3):
        mean = float(code[:, unit].mean())
        kl += 0.2 * math.log(0.2 / mean) + 0.8 * math.log(0.8 / (1 - mean))
    expected = 0.7 * kl / 3 + 0.3 * float(code.abs().mean())
    assert float(sparsity([code], stage)) == pytest.approx(expected, rel=1e-12)
    assert float(sparsity([code, code], stage)) == pytest.approx(2 * expected, rel=1e-12)


def test_units_that_never_fire_have_a_finite_penalty():
    stage = planned(epochs=1, kl=1.0)[0]
    assert math.isfinite(float(sparsity([torch.zeros(2, 3)], stage)))


def test_codes_beyond_0_to_1_have_no_such_means():
    check_unit_range([torch.tensor([[0.0, 1.0]])])
    with pytest.raises(ConfigError, match="these go from -1 to 2"):
        check_unit_range([torch.tensor([[-1.0, 2.0]])])
