"""Modules made on the meta device: weights get memory and values once it is known who holds what.

So no rank holds a matrix that is cut over ranks, not even at first. Values are drawn by global
index: they are the same on any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.nn.plain_random import PlainDraws


def meta_parts(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` that have weights or buffers without values, outer ones last.

    Raises where one of them, or what is around it, does not know how its weights begin.
    """
    found: list[nn.Module] = []
    for name, part in reversed([*module.named_modules()]):
        has_meta = [key for key, tensor in _own_tensors(part) if tensor.is_meta]
        if has_meta and not hasattr(part, "reset_parameters"):
            where = ".".join(filter(None, (name, has_meta[0])))
            raise ConfigError(
                f"{where} is on the meta device, without values, and {type(part).__name__} has no "
                "reset_parameters() that gives them: add one, or call module.to_empty(device=...) "
                "and initialize the weights, or load them, before parallelize"
            )
        inside = any(child in found for child in part.modules() if child is not part)
        if has_meta or (inside and hasattr(part, "reset_parameters")):
            found.append(part)
    return found


def _own_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (part._parameters, part._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def give_values(parts: list[nn.Module], mesh: Mesh) -> None:
    """Has ``parts``, whose cut weights have memory already, initialize themselves.

    Collective over the mesh, as all ranks draw the same numbers.
    """
    done: dict[int, Tensor] = {}
    for part in parts:
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    table[name] = done.setdefault(id(tensor), _with_memory(tensor, mesh))
    with PlainDraws(mesh):
        for part in parts:
            part.reset_parameters()  # type: ignore[operator]


def _with_memory(tensor: Tensor, mesh: Mesh) -> Tensor:
    found = torch.empty_like(tensor, device=mesh.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, tensor.requires_grad)
    return found
