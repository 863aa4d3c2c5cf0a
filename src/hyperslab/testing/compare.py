"""A function on Slabs against the same function in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import hyperslab as hs


def assert_same_as_serial(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] = (),
    *,
    mesh: hs.Mesh,
    cuts: Mapping[str, Sequence[int]] | Sequence[Mapping[str, Sequence[int]] | None] | None = None,
    input_grads: bool = True,
    tolerance: float = 1e-10,
) -> None:
    """Checks values, input gradients and weight gradients of ``function(*inputs, *weights)``.

    The loss weights every output with a random number, because sums of squares hide and fake errors
    of norms. ``cuts`` are those of all inputs, or a list with those of each. Without
    ``input_grads`` no input requires a gradient, as in the first layer of a network.

    Collective over the mesh: every rank calls it with the same tensors.
    """
    per_input = [cuts] * len(inputs) if cuts is None or isinstance(cuts, Mapping) else cuts
    serial_in, serial_weights = _leaves(inputs, mesh, input_grads), _leaves(weights, mesh)
    serial_out = function(*serial_in, *serial_weights)
    our_in, our_weights = _leaves(inputs, mesh, input_grads), _leaves(weights, mesh)
    slabs = [hs.shard(x, mesh, cuts=c) for x, c in zip(our_in, per_input, strict=True)]
    out = function(*slabs, *our_weights)
    assert tuple(out.shape) == tuple(serial_out.shape), (out.shape, serial_out.shape)
    assert out.requires_grad == serial_out.requires_grad, (out, out.requires_grad)
    if serial_out.requires_grad:
        coefficients = seeded(*serial_out.shape, seed=1).to(serial_out.detach())
        (serial_out * coefficients).sum().backward()
        (out * coefficients).sum().backward()

    def close(ours: Tensor | None, serial: Tensor | None, what: str) -> None:
        torch.testing.assert_close(
            ours, serial, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )

    if isinstance(out, hs.Slab):
        assert tuple(out.local.shape) == out.box.shape, (out, out.box.shape)
    close(hs.gather(out).detach(), serial_out.detach(), "output")
    for number, (ours, serial) in enumerate(zip(our_in, serial_in, strict=True)):
        close(ours.grad, serial.grad, f"gradient of input {number}")
    for number, (ours, serial) in enumerate(zip(our_weights, serial_weights, strict=True)):
        if serial.grad is not None:
            close(ours.grad, serial.grad, f"gradient of weight {number}")


def averaged(weight: Tensor, mesh: hs.Mesh) -> Tensor:
    """The mean over ranks of gradients of which each has a part. Collective."""
    assert weight.grad is not None, f"rank {mesh.rank} has no gradient for a weight"
    mean = weight.grad.clone(memory_format=torch.contiguous_format)
    if mesh.num_ranks > 1:
        dist.all_reduce(mean, group=mesh.group)
    return mean / mesh.num_ranks


def whole(tensor: Any) -> Any:
    """All of a weight, a gradient or a buffer, however its ranks hold it. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _leaves(tensors: Sequence[Tensor], mesh: hs.Mesh, grads: bool = True) -> list[Tensor]:
    return [
        t.detach().to(mesh.device, copy=True).requires_grad_(grads and t.is_floating_point())
        for t in tensors
    ]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor that is the same on every rank and every call."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator, dtype=dtype)
