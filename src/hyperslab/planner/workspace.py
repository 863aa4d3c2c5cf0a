"""What convolutions on CPUs take besides what they read and make.

torch has two of them: oneDNN's, which copies both into blocks of channels, and one that writes out
what each output reads. GPUs are asked for so little that it is part of what is left free there.
"""

from __future__ import annotations

import math

from hyperslab.planner.network import INPUT, Layer
from hyperslab.planner.shards import Shards

BLOCK = 16
"""Channels that oneDNN has side by side, which is as many as fit a register of AVX-512."""
FEW = 20480
"""Numbers but for the last dim, of an input of one sample, up to which oneDNN is not asked."""


def conv_workspace(shards: Shards, number: int) -> float:
    """In elements, at most, of the pass of a layer; 0 if that is no convolution."""
    layer = shards.network.layers[number]
    if layer.family != "conv" or not shards.samples:
        return 0.0
    source = layer.inputs[0]
    if _is_by_blocks(shards, layer):
        return _in_blocks(shards, number) + _of_input(shards, source)
    kernel = math.prod(_kernel(layer))
    places = shards.made[number] / shards.channels(number)
    return kernel * shards.channels(source) * places if kernel > 1 else 0.0


def _of_input(shards: Shards, source: int) -> float:
    """Few channels of a sample are read as they are; what has a gradient has it in blocks."""
    reads_as_it_is = source == INPUT and shards.channels(source) < BLOCK
    return 0.0 if reads_as_it_is else _in_blocks(shards, source)


def _in_blocks(shards: Shards, number: int) -> float:
    channels = shards.channels(number)
    return shards.numel(number) / channels * (-(-channels // BLOCK) * BLOCK)


def _is_by_blocks(shards: Shards, layer: Layer) -> bool:
    """As ``ConvParams::use_mkldnn`` of torch has it, for ranks of one thread."""
    samples, kernel = shards.samples, _kernel(layer)
    simple = all(getattr(w, "stride", 1) == 1 == getattr(w, "dilation", 1) for w in layer.windows)
    if simple and samples < BLOCK and all(size == 1 for size in kernel[-2:]):
        return False
    last = shards.network.shape_of(layer.inputs[0])[-1]
    outer = shards.numel(layer.inputs[0]) / max(1, last)
    is_large = layer.groups > 1 or min(kernel[-2:], default=1) > 3
    return is_large or samples > 1 or outer > FEW


def _kernel(layer: Layer) -> list[int]:
    return [getattr(window, "kernel", 1) for window in layer.windows]
