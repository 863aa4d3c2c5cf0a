"""Runs of layers that are computed together, by which kernels are measured and looked up."""

from __future__ import annotations

from functools import lru_cache

from hyperslab.planner.network import Layer, Network

LEADERS = ("conv", "norm", "dense", "pool")


@lru_cache(maxsize=64)
def stages(network: Network) -> tuple[tuple[int, ...], ...]:
    """All layers in runs: a convolution or norm with the activations and the pool after it.

    Others are by themselves. Only what has one reader joins the next layer.
    """
    found: list[list[int]] = []
    for number, layer in enumerate(network.layers):
        if found and _joins(network, found[-1], layer):
            found[-1].append(number)
        else:
            found.append([number])
    return tuple(map(tuple, found))


def _joins(network: Network, stage: list[int], layer: Layer) -> bool:
    first, last = network.layers[stage[0]], network.layers[stage[-1]]
    if first.family not in LEADERS or layer.family not in ("pointwise", "pool"):
        return False
    if last.family == "pool" or layer.inputs != (stage[-1],):
        return False
    if layer.family == "pool" and first.family == "dense":
        return False
    return len(network.readers[stage[-1]]) == 1 and network.is_spatial(stage[-1])


def signature(network: Network, stage: tuple[int, ...]) -> str:
    """What a stage computes, whatever the extents of its input.

    Stages with the same signature take the same time for inputs of the same size.
    """
    first = network.layers[stage[0]]
    before = network.shape_of(first.inputs[0])
    words = [f"{before[0] if before else 1} {len(before) - 1}d"]
    for number in stage:
        layer = network.layers[number]
        words.append(f"{layer.op} {layer.channels}{_windows(layer)}")
        if layer.groups > 1:
            words[-1] += f" groups {layer.groups}"
    return ", ".join(words)


def _windows(layer: Layer) -> str:
    numbers = dict.fromkeys(
        "/".join(
            str(getattr(each, name, "-")) for name in ("kernel", "stride", "padding", "dilation")
        )
        for each in layer.windows
    )
    return " " + " ".join(numbers) if numbers else ""
