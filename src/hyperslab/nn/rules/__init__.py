"""The rules of torch functions on Slabs; importing this package registers them."""

from hyperslab.nn.rules import (
    adaptive_pool as adaptive_pool,
    along_table as along_table,
    arrange as arrange,
    assign as assign,
    attention as attention,
    attributes as attributes,
    bypass as bypass,
    conv as conv,
    conv_transpose as conv_transpose,
    cumulative as cumulative,
    dims as dims,
    dropout as dropout,
    extreme as extreme,
    index as index,
    interpolate as interpolate,
    join as join,
    linear as linear,
    lookup as lookup,
    loss as loss,
    matmul as matmul,
    moments as moments,
    norm as norm,
    pad as pad,
    pointwise as pointwise,
    pool as pool,
    random as random,
    reduction as reduction,
    repeat as repeat,
    response_norm as response_norm,
    sample as sample,
    select as select,
    shape as shape,
    shuffle as shuffle,
    softmax as softmax,
    unfold as unfold,
    unpool as unpool,
    values as values,
    vector_norm as vector_norm,
    whole as whole,
)

# These put rules before others, and fall back to them.
from hyperslab.nn.rules import (  # isort: skip
    act_pool as act_pool,
    activation as activation,
    few_channels as few_channels,
)

from hyperslab.nn.rules import alone as alone  # isort: skip # before all others
