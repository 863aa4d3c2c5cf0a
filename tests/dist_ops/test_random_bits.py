"""Counter-based random bits, of ranks that need not exist."""

import threading
from datetime import timedelta

import pytest
import torch

from hyperslab.comm.mesh import Mesh
from hyperslab.dist_ops import random_bits as module
from hyperslab.dist_ops.random_bits import (
    NUM_VALUES,
    bits_of as drawn_bits_of,
    draw_or_ask,
    drawing_from,
    random_bits_reach,
)
from hyperslab.layout import Box, Grid, Layout, split_over

CPU = torch.device("cpu")
SHAPE = (3, 4, 6, 5)
ONE = Grid((1,) * 5)


def bits_of(layout, grid, rank, num_dims=4, seed=0):
    mesh = Mesh(grid, rank, CPU, None, timedelta(seconds=1))
    torch.manual_seed(seed)
    return drawn_bits_of(draw_or_ask(), layout, mesh, CPU, num_dims)


@pytest.mark.parametrize("kept_numel", [module.KEPT_NUMEL, 0], ids=["small", "large"])
def test_an_element_has_the_same_bits_on_any_mesh(monkeypatch, kept_numel):
    monkeypatch.setattr(module, "KEPT_NUMEL", kept_numel)
    whole = bits_of(Layout.unsplit(SHAPE), ONE, 0)
    assert whole.shape == SHAPE
    assert 0 <= int(whole.min()) <= int(whole.max()) < NUM_VALUES
    grid = Grid((2, 1, 1, 2, 1))
    layout = split_over(SHAPE, grid, cuts={"height": [0, 5, 6]})
    for rank, coords in enumerate(grid.coords):
        piece = whole[layout.box(coords).slices_in(Box.whole(SHAPE))]
        assert torch.equal(bits_of(layout, grid, rank), piece)


@pytest.mark.parametrize("kept_numel", [module.KEPT_NUMEL, 0], ids=["small", "large"])
@pytest.mark.parametrize("least", [0, 1, NUM_VALUES // 5, NUM_VALUES // 2, NUM_VALUES - 1])
def test_bits_are_compared_as_they_are(monkeypatch, kept_numel, least):
    monkeypatch.setattr(module, "KEPT_NUMEL", kept_numel)
    layout, mesh = Layout.unsplit((7, 211)), Mesh(ONE, 0, CPU, None, timedelta(seconds=1))
    for seed in range(20):
        bits = bits_of(layout, ONE, 0, num_dims=2, seed=seed)
        for each in (least, int(bits[3, 5]), int(bits[3, 5]) + 1, NUM_VALUES):
            torch.manual_seed(seed)
            assert torch.equal(random_bits_reach(each, layout, mesh, CPU, 2), bits >= each)


def test_elements_differ_along_the_dims_that_count_and_no_others():
    bits = bits_of(Layout.unsplit(SHAPE), ONE, 0, num_dims=2)
    assert bits.shape == (*SHAPE[:2], 1, 1)
    assert len(bits.unique()) == bits.numel()


def test_bits_follow_from_the_seed():
    layout = Layout.unsplit(SHAPE)
    first, again, other = (bits_of(layout, ONE, 0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.99


def test_another_thread_draws_as_ever_while_a_pass_is_recorded():
    found = []

    def take():
        found.append(bits_of(Layout.unsplit((4, 3)), ONE, 0, num_dims=2))

    with drawing_from(lambda: torch.zeros(2, dtype=torch.int64)):
        other = threading.Thread(target=take)
        other.start()
        other.join()
        take()
    assert not torch.equal(*found)
