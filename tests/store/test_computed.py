"""Samples that were computed: served like those of files, cut as they were."""

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.errors import ConfigError, FormatError
from hyperslab.io.schedule import permutation
from hyperslab.store.computed import Computed

MESHES = [{"sample": 2}, {"height": 2}, {"channel": 2}, {"sample": 2, "height": 2}]


def values(num=8):
    return torch.arange(num * 3 * 5 * 4, dtype=torch.float64).reshape(num, 3, 5, 4)


def kept(mesh, batch_size=3, cuts=None):
    """All samples of ``values``, computed in the order of epoch 2."""
    x, computed = values(), Computed("code", 8, mesh)
    order = permutation(8, 0, 2).tolist()
    for start in range(0, 8, batch_size):
        samples = order[start : start + batch_size]
        computed.add(hs.shard(x[samples], mesh, cuts=cuts), samples)
    return computed.dataset(2)


@pytest.mark.every(2)
@pytest.mark.ranks
@pytest.mark.parametrize("axes", MESHES)
def test_they_come_in_every_order_with_their_values(axes):
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    cuts = {"height": [0, 4, 5]} if "height" in axes else None
    whole = values()
    with hs.Loader(kept(mesh, cuts=cuts), mesh, batch_size=3, dtype=torch.float64) as loader:
        for _ in range(3):
            seen = []
            for batch in loader:
                seen += loader.taken
                assert torch.equal(hs.gather(batch), whole[list(loader.taken)])
                if cuts:
                    assert batch.layout.splits[2].cuts.bounds == (0, 4, 5)
            assert sorted(seen) == list(range(8))


def test_a_visit_leaves_the_loader_where_it_was():
    mesh = hs.init(device="cpu")
    with hs.Loader(kept(mesh), mesh, batch_size=3, drop_last=True) as loader:
        first = [loader.taken for _ in loader]
        visited = [i for _ in loader.visit_all(0) for i in loader.taken]
        assert sorted(visited) == list(range(8))
        assert [each for row in first for each in row] == visited[:6]
        assert loader.epoch == 1


def test_a_sample_that_no_rank_keeps_is_told():
    data = kept(hs.init(device="cpu"))
    assert np.array_equal(data.read(0), values()[0].numpy())
    with pytest.raises(FormatError, match=r"does not hold it: .* raise\s+data.memory_budget"):
        data.read(0)


def test_samples_without_channels_cannot_be_kept():
    mesh = hs.init(device="cpu")
    with pytest.raises(ConfigError, match="1 to 4 dims, channels first"):
        Computed("code", 2, mesh).add(hs.shard(torch.ones(2), mesh), [0, 1])
