"""The table of what each part of a module holds and sends."""

import pytest
import torch
from torch import nn

import hyperslab as hs


def make():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 1), nn.Flatten()
    )


@pytest.mark.ranks(2)
def test_each_module_is_shown_with_its_cut_its_shard_and_what_it_sends():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    model = hs.parallelize(make(), mesh, plan={"2": {"channel": 2}})
    found = hs.summarize(model, hs.shard(torch.rand(1, 2, 6, 5), mesh))
    conv, norm, wide, _ = found.rows
    assert (conv.name, conv.module, conv.cut) == ("0", "Conv2d", "height=2")
    assert (conv.shape, conv.shard) == ((1, 4, 6, 5), (1, 4, 3, 5))
    assert (conv.num_weights, conv.num_own_weights) == (76, 76)
    assert (conv.recut_nbytes, conv.sent_nbytes) == (0, 2 * 5 * 4)  # a row of both channels
    assert norm.sent_nbytes == 0  # in evaluation
    assert (wide.cut, wide.shard) == ("channel=2", (1, 4, 6, 5))
    assert (wide.num_weights, wide.num_own_weights) == (40, 20)
    assert wide.recut_nbytes == 2 * 3 * 5 * 4  # half of the rows of two channels, to the other
    assert wide.sent_nbytes == 2 * 6 * 5 * 4  # its own two channels
    shown = str(found)
    assert "channel=2" in shown
    assert "20 of 40" in shown
    assert found.to_dicts()[2]["recut_nbytes"] == 120


@pytest.mark.ranks(2)
def test_the_model_is_left_as_it_was():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    model = hs.parallelize(make(), mesh)
    model[1].eval()
    hs.summarize(model, hs.shard(torch.rand(1, 2, 6, 5), mesh))
    assert [part.training for part in model] == [True, False, True, True]
    assert model.training
    assert int(model[1].num_batches_tracked) == 0
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model)


def test_one_rank_holds_all_and_sends_nothing():
    mesh = hs.init(device="cpu")
    rows = hs.summarize(hs.parallelize(make(), mesh), hs.shard(torch.rand(1, 2, 6, 5), mesh)).rows
    assert [row.shard for row in rows] == [row.shape for row in rows]
    assert not any(row.sent_nbytes or row.recut_nbytes for row in rows)


def test_a_module_that_is_not_parallel_is_refused():
    with pytest.raises(hs.ConfigError, match=r"a module that hyperslab\.parallelize has returned"):
        hs.summarize(make(), torch.rand(1, 2, 6, 5))
