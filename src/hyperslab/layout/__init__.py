"""Index arithmetic: spans, boxes, cuts, windows, layouts. No torch, no I/O."""

from hyperslab.layout.assembly import (
    OWN as OWN,
    Assembly as Assembly,
    Piece as Piece,
    cut_out as cut_out,
)
from hyperslab.layout.blocks import BlockPlan as BlockPlan, plan_blocks as plan_blocks
from hyperslab.layout.box import Box as Box, Span as Span
from hyperslab.layout.chain import (
    AnyWindow as AnyWindow,
    ChainPlan as ChainPlan,
    Route as Route,
    Step as Step,
    TileBoxes as TileBoxes,
    plan_chain as plan_chain,
)
from hyperslab.layout.channels import (
    Groups as Groups,
    plan_gather_channels as plan_gather_channels,
    plan_scatter_filters as plan_scatter_filters,
)
from hyperslab.layout.conv_pool import (
    ConvPoolPlan as ConvPoolPlan,
    plan_conv_pool as plan_conv_pool,
)
from hyperslab.layout.cuts import (
    Cuts as Cuts,
    cut_evenly as cut_evenly,
    cut_in_chunks as cut_in_chunks,
)
from hyperslab.layout.exchange import (
    Exchange as Exchange,
    Message as Message,
    Windowed as Windowed,
    output_box_reads as output_box_reads,
    plan_exchange as plan_exchange,
    plan_move as plan_move,
    plan_recut as plan_recut,
    plan_windows as plan_windows,
)
from hyperslab.layout.halo import (
    HaloPlan as HaloPlan,
    Strip as Strip,
    local_padding as local_padding,
    plan_halo as plan_halo,
)
from hyperslab.layout.index import (
    Chosen as Chosen,
    Entry as Entry,
    Indexed as Indexed,
    Strided as Strided,
    plan_index as plan_index,
)
from hyperslab.layout.layout import (
    AXES as AXES,
    DIM_AXES as DIM_AXES,
    Grid as Grid,
    Layout as Layout,
    Split as Split,
    recut_over as recut_over,
    split_alike as split_alike,
    split_over as split_over,
)
from hyperslab.layout.piece_call import (
    PieceCall as PieceCall,
    plan_piece_call as plan_piece_call,
    plan_transposed_call as plan_transposed_call,
)
from hyperslab.layout.reshape import (
    infer_shape as infer_shape,
    merges_dims as merges_dims,
    plan_reshape as plan_reshape,
)
from hyperslab.layout.window import (
    AdaptiveWindow as AdaptiveWindow,
    FoldedRows as FoldedRows,
    Reads as Reads,
    Resampling as Resampling,
    TransposedWindow as TransposedWindow,
    UnpaddedStart as UnpaddedStart,
    Window as Window,
    output_cuts as output_cuts,
)
from hyperslab.layout.window_arguments import (
    Numbers as Numbers,
    check_steps as check_steps,
    conv_windows as conv_windows,
    integers as integers,
    per_dim as per_dim,
    pool_numbers as pool_numbers,
    pool_windows as pool_windows,
    transposed_windows as transposed_windows,
)
