import pytest
import torch
from torch import nn

import hyperslab as hs


def test_a_lazy_module_is_run_before_it_is_parallelized():
    mesh = hs.init(device="cpu")
    module = nn.Sequential(nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d())
    with pytest.raises(hs.ConfigError, match=r"^0\.weight of a lazy module has no shape yet: run"):
        hs.parallelize(module, mesh)
    module(torch.zeros(1, 2, 4, 4))
    assert hs.parallelize(module, mesh)(hs.shard(torch.zeros(1, 2, 4, 4), mesh)).shape[1] == 3


@pytest.mark.ranks(2)
def test_batch_norm_of_another_kind_of_parallel_training_is_refused():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    module = nn.Sequential(nn.SyncBatchNorm(2)).double()
    with pytest.raises(hs.ConfigError, match=r"^0 is a SyncBatchNorm.*use BatchNorm"):
        hs.parallelize(module, mesh)
