"""The Triton kernel that merges the statistics of the parts of a whole, such as ranks' pieces."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_moments_kernel(
    stacked, mean_out, var_out, scale_out, num_parts, num_channels, eps: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """``stacked`` has a share, a mean and a variance for each channel of each part."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    mean = tl.zeros((BLOCK,), stacked.dtype.element_ty)
    for part in range(num_parts):
        at = stacked + part * 3 * num_channels + channel
        share = tl.load(at, mask=inside, other=0)
        mean += share * tl.load(at + num_channels, mask=inside, other=0)
    var = tl.zeros((BLOCK,), stacked.dtype.element_ty)
    for part in range(num_parts):
        at = stacked + part * 3 * num_channels + channel
        share = tl.load(at, mask=inside, other=0)
        apart = tl.load(at + num_channels, mask=inside, other=0) - mean
        var += share * (tl.load(at + 2 * num_channels, mask=inside, other=0) + apart * apart)
    tl.store(mean_out + channel, mean, mask=inside)
    tl.store(var_out + channel, var, mask=inside)
    tl.store(scale_out + channel, 1 / tl.sqrt(var + eps), mask=inside)
