"""What each part of a parallel module holds and sends: a table of one forward pass."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperslab.comm.messages import Traffic, counted_traffic
from hyperslab.errors import ConfigError
from hyperslab.nn.parallel.gradient_averaging import own_part
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_leaves


@dataclass(frozen=True)
class ModuleRow:
    """One call of a module, as this rank saw it."""

    name: str
    module: str
    """Its class."""
    cut: str
    """The ranks along each axis, such as ``depth=2 x channel=2``."""
    shape: tuple[int, ...]
    """Of its output: the whole."""
    shard: tuple[int, ...]
    """And this rank's part of it."""
    num_weights: int
    num_own_weights: int
    """Of which this rank holds as many."""
    recut_nbytes: int
    """What it sent so that the module found its input on its own mesh."""
    sent_nbytes: int
    """What it sent within the module."""


@dataclass(frozen=True)
class Summary:
    """The modules that were called, in order. ``print`` it for a table."""

    rows: tuple[ModuleRow, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(
            "module", "", "cut", "output", "this rank's", "weights", "sent to re-cut", "sent"
        )
        for row in self.rows:
            weights = f"{row.num_own_weights:,} of {row.num_weights:,}" if row.num_weights else ""
            table.add_row(
                row.name,
                row.module,
                row.cut,
                "x".join(map(str, row.shape)),
                "x".join(map(str, row.shard)),
                weights,
                *(_in_bytes(nbytes) for nbytes in (row.recut_nbytes, row.sent_nbytes)),
            )
        out = io.StringIO()
        Console(file=out, width=160).print(table)
        return out.getvalue().rstrip()


def _in_bytes(nbytes: int) -> str:
    return f"{nbytes:,} B" if nbytes else ""


def summarize(model: nn.Module, *args: Any, **kwargs: Any) -> Summary:
    """What each module without parts, or with a cut of its own, does in ``model(*args)``.

    The model runs once as in evaluation, without gradients.

    Collective over the mesh.
    """
    if not hasattr(model, "_hyperslab"):
        raise ConfigError("summarize takes a module that hyperslab.parallelize has returned")
    was_training = [part for part in model.modules() if part.training]
    rows: list[ModuleRow] = []
    handles: list[Any] = []
    with counted_traffic() as traffic:
        try:
            model.eval()
            for name, part in model.named_modules():
                if name and (not [*part.children()] or hasattr(part, "_hyperslab_cut")):
                    handles += _watch(name, part, traffic, rows)
            with torch.no_grad():
                model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            for part in was_training:
                part.training = True
    return Summary(tuple(rows))


def _watch(name: str, part: nn.Module, traffic: Traffic, rows: list[ModuleRow]) -> list[Any]:
    begun: list[int] = []

    def note(*_: object) -> None:
        begun.append(traffic.nbytes)

    def finish(module: nn.Module, args: object, out: object) -> None:
        inside, before = begun.pop(), begun.pop()
        found = _first_tensor(out)
        if found is None:
            return
        weights = [*module.parameters()]
        rows.append(
            ModuleRow(
                name,
                type(module).__name__,
                found.mesh.grid.describe() if isinstance(found, Slab) else "whole on every rank",
                tuple(found.shape),
                tuple(found.local.shape if isinstance(found, Slab) else found.shape),
                sum(weight.numel() for weight in weights),
                sum(own_part(weight).numel() for weight in weights),
                inside - before,
                traffic.nbytes - inside,
            )
        )

    return [
        part.register_forward_pre_hook(note, prepend=True),
        part.register_forward_pre_hook(note),
        part.register_forward_hook(finish),
    ]


def _first_tensor(out: object) -> Slab | Tensor | None:
    leaves = tree_leaves(out, is_leaf=is_slab)
    return next((leaf for leaf in leaves if isinstance(leaf, Slab | Tensor)), None)
