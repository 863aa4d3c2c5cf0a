"""Statistics of parts merged in one kernel: those of the whole."""

import pytest
import torch

pytest.importorskip("triton")

from hyperslab.kernels.norm import merge_by_kernel, merged_statistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter


@pytest.mark.parametrize(("num_parts", "num_channels"), [(1, 1), (3, 130)])
def test_the_statistics_of_parts_are_merged(num_parts, num_channels):
    generator = torch.Generator().manual_seed(num_parts)
    parts = [torch.randn(num, num_channels, generator=generator).double() for num in (5, 1, 9)]
    whole = torch.cat(parts[:num_parts])
    rows = [
        torch.stack([torch.full_like(p[0], len(p) / len(whole)), p.mean(0), p.var(0, False)])
        for p in parts[:num_parts]
    ]
    stacked = torch.stack(rows).to(DEVICE, torch.float32)
    var = whole.var(0, False)
    right = whole.mean(0), var, 1 / torch.sqrt(var + 1e-3)
    for found in (merge_by_kernel(stacked, 1e-3), merged_statistics(stacked, 1e-3)):
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours.cpu().double(), theirs, rtol=1e-5, atol=1e-5)
