"""Slabs, the rules by which torch functions act on them, and parallel modules."""

from hyperslab.nn import ops as ops
from hyperslab.nn.op import register as register
from hyperslab.nn.parallel import outside_tensors as outside_tensors
from hyperslab.nn.parallel.clip import clip_grad_norm_ as clip_grad_norm_
from hyperslab.nn.parallel.parallelize import parallelize as parallelize
from hyperslab.nn.parallel.summary import summarize as summarize
from hyperslab.nn.placement import from_local as from_local, gather as gather, shard as shard
from hyperslab.nn.single_rank import layers as layers, slab_functions as slab_functions
from hyperslab.nn.slab import Slab as Slab
