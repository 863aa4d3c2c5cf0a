"""Slabs, the rules by which torch functions act on them, and parallel modules."""

from hyperslab.nn import (
    buffers as buffers,
    einops_backend as einops_backend,
    means as means,
    ops as ops,
)
from hyperslab.nn.enter import from_local as from_local, shard as shard
from hyperslab.nn.parallelize import parallelize as parallelize
from hyperslab.nn.recut import gather as gather
from hyperslab.nn.registry import register as register
from hyperslab.nn.slab import Slab as Slab
