"""The rules of torch functions on Slabs, by family; importing this package registers them."""

from hyperslab.comm.mesh import with_first_mesh
from hyperslab.nn.ops import bypass as bypass, whole as whole
from hyperslab.nn.ops.each import pointwise as pointwise, random as random
from hyperslab.nn.ops.products import attention as attention, dense as dense, matmul as matmul
from hyperslab.nn.ops.reduce import (
    along_table as along_table,
    extremes as extremes,
    losses as losses,
    norms as norms,
    reductions as reductions,
    softmax as softmax,
    vector_norm as vector_norm,
)
from hyperslab.nn.ops.shape import (
    arrange as arrange,
    assign as assign,
    attributes as attributes,
    dims as dims,
    join as join,
    reshape as reshape,
    select as select,
    shuffle as shuffle,
    values as values,
)
from hyperslab.nn.ops.windows import (
    adaptive_pool as adaptive_pool,
    conv as conv,
    fused as fused,
    grid_sample as grid_sample,
    interpolate as interpolate,
    pad as pad,
    pool as pool,
    unfold as unfold,
    unpool as unpool,
)
from hyperslab.nn.plain_random import substitute_draws

with_first_mesh(substitute_draws)  # after all rules, which are those of functions as torch has them
