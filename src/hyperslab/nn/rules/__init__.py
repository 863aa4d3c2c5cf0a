"""The rules of torch functions on Slabs; importing this package registers them."""

from hyperslab.nn.rules import (
    conv as conv,
    conv_transpose as conv_transpose,
    dropout as dropout,
    linear as linear,
    loss as loss,
    norm as norm,
    pad as pad,
    pointwise as pointwise,
    pool as pool,
    reduction as reduction,
    shape as shape,
    whole as whole,
)
