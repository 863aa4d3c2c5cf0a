"""The norm of all gradients, however weights are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_ as clip_by_torch_

from hyperslab.comm.mesh import Mesh, mesh_of_device_mesh
from hyperslab.comm.reduce import reduce_sum_
from hyperslab.layout import AXES
from hyperslab.nn.parallel.gradient_averaging import axes_beside_cuts, mesh_of, own_part


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales gradients so that their norm is at most ``max_norm``; returns what it was.

    As ``torch.nn.utils.clip_grad_norm_``, which wants all weights spread over the same ranks: with
    a plan some are cut in one way, some in another, and some are whole.

    Collective over all ranks.
    """
    weights = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    weights = [weight for weight in weights if weight.grad is not None]
    mesh = next(filter(None, map(_mesh_of_cut, weights)), None)
    if mesh is None:
        return clip_by_torch_(weights, max_norm)
    squares = [_share_of_square(weight, mesh) for weight in weights]
    norm = reduce_sum_(torch.stack(squares).sum().view(1), mesh, AXES)[0].sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch has it
    for grad in map(_local_grad, weights):
        grad.mul_(scale.to(grad.dtype))
    return norm


def _mesh_of_cut(weight: Tensor) -> Mesh | None:
    return mesh_of_device_mesh(weight.device_mesh) if isinstance(weight, DTensor) else None


def _share_of_square(weight: Tensor, mesh: Mesh) -> Tensor:
    """What this rank adds to the square of the norm, where others hold the same part."""
    own = mesh_of(weight, mesh)
    num = math.prod(own.grid.size(axis) for axis in axes_beside_cuts(weight, own))
    norm: Tensor = torch.linalg.vector_norm(_local_grad(weight), dtype=torch.float64)
    return norm.square() / num


def _local_grad(weight: Tensor) -> Tensor:
    grad = weight.grad
    assert grad is not None
    return own_part(grad)
