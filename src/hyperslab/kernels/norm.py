"""Batch norm of one process's tensors by statistics that are given."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hyperslab.kernels import tiles
from hyperslab.kernels.tiled_call import Work, run_by_tiles
from hyperslab.kernels.tiles import Each, Tile, outermost_first


def fits(x: Tensor) -> bool:
    """Whether a norm of ``x`` is one call's work."""
    return x.numel() <= tiles.MAX_NUMEL


def standardize_by(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps)``, with one mean and variance a channel, tile by tile."""

    def call(part: Tensor, tile: Tile) -> list[Tensor]:
        here = slice(*tile[1].own)
        return [F.batch_norm(part, mean[here], var[here], eps=eps)]

    return run_by_tiles(x, Work(call, tuple(map(Each, x.shape)), outermost_first(x)))[0]
