"""Single operators, timed beside the least time they could take."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu.clock import Ceilings, device_times
from rich.console import Console
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True)
class Row:
    what: str
    ms: float | None = None
    nbytes: int | None = None
    """That must be read or written."""
    floor_ms: float | None = None
    note: str = ""
    """Why it failed, if there is no time, or whatever else is to be told."""

    @property
    def cells(self) -> list[str]:
        times = self.ms / self.floor_ms if self.ms and self.floor_ms else None
        gib = None if self.nbytes is None else self.nbytes / 2**30
        numbers = (self.ms, gib, self.floor_ms, times)
        return [self.what, *("" if n is None else f"{n:.4g}" for n in numbers), self.note]


class Timer:
    """Makes rows, one after the other."""

    def __init__(self, device: torch.device, ceilings: Ceilings, *, seconds: float) -> None:
        self.device, self._ceilings, self._seconds = device, ceilings, seconds

    def row(
        self,
        what: str,
        run: Callable[[], object],
        *,
        nbytes: int,
        flops: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        note: str = "",
    ) -> Row:
        """The median time of ``run``. What fails is a row too."""
        precision = "tf32" if dtype == torch.float32 else "bf16"
        floor = self._ceilings.floor_ms(flops, nbytes, precision)
        try:
            return Row(what, self._median(run), nbytes, floor, note)
        except Exception as error:  # noqa: BLE001 - the other rows are still wanted
            words = (str(error).splitlines() or [""])[0]
            note = f"{type(error).__name__}: {words}"
        gc.collect()
        return Row(what, None, nbytes, floor, note)

    def _median(self, run: Callable[[], object]) -> float:
        run()
        first = device_times(run, 1, self.device)[0]
        repeats = min(20, max(2, round(self._seconds * 1e3 / max(first, 1e-3))))
        return statistics.median(device_times(run, repeats, self.device))


@dataclass(frozen=True)
class Bench:
    """What a section needs."""

    timer: Timer
    small: bool

    @property
    def device(self) -> torch.device:
        return self.timer.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def randn(self, shape: tuple[int, ...], *, last: bool) -> Tensor:
        layout = torch.channels_last_3d if last else torch.contiguous_format
        x = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=layout)
        return x.normal_()


def backward_of(forward: Callable[[], Tensor], source: Tensor) -> Callable[[], object]:
    """The backward pass of ``forward``, which runs once, before it."""
    kept: list[tuple[Tensor, Tensor]] = []

    def run() -> object:
        if not kept:
            out = forward()
            kept.append((out, torch.randn_like(out)))
        return torch.autograd.grad(kept[0][0], source, kept[0][1], retain_graph=True)

    return run


def errors_of(
    run: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], source: Tensor
) -> str:
    """How far output and gradient are from those of ``reference``, of ``source`` in float32."""
    found, coefficients = [], None
    try:
        for function, dtype in ((reference, torch.float32), (run, source.dtype)):
            x = source.detach().to(dtype).requires_grad_()
            out = function(x)
            coefficients = torch.randn_like(out) if coefficients is None else coefficients
            (grad,) = torch.autograd.grad(out, x, coefficients.to(out.dtype))
            found.append((out.detach().float(), grad.float()))
    except Exception as error:  # noqa: BLE001 - it will fail again when it is timed, and be told
        return type(error).__name__
    pairs = zip(*found, strict=True)
    return "error " + ", ".join(f"{float((b - a).norm() / a.norm()):.0e}" for a, b in pairs)


def print_rows(title: str, rows: list[Row]) -> None:
    table = Table(title, "ms", "GiB", "floor ms", "x floor", "")
    for column in table.columns[1:5]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row.cells)
    Console(width=160).print(table)
