"""Whether the GPU's own 3-d convolutions are right.

Releases of cuDNN were silently wrong in one dtype. On the first use of a GPU with a cuDNN, small
convolutions are compared with exact ones, in less than two seconds, and the verdict is kept on
disk. ``torch_conv`` does without those that are wrong.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from torch import Tensor

_log = logging.getLogger("hyperslab")

PRECISIONS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
PASSES = ("forward", "input gradient", "weight gradient")
SHAPES = (((2, 16, 8, 8, 8), (32, 16, 3, 3, 3)), ((1, 5, 7, 9, 11), (3, 5, 3, 3, 3)))
"""Of inputs and weights: one as kernels like it, and one with nothing even."""
TOLERANCE = 0.02
"""Of the largest value. Rounding to bf16 is a tenth of it, and wrong kernels are far beyond it."""
VERSION = 1
"""Of this check: verdicts of others are not used."""

Convolve = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From input, weight and the output's gradient to output and the other two gradients."""


@dataclass(frozen=True)
class Verdict:
    """What was measured, by ``bf16 channels_last weight gradient`` and the like."""

    errors: Mapping[str, float]
    """The largest, as a part of the largest value; what raised an error is not there."""
    seconds: float

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        return tuple(name for name, error in self.errors.items() if not error <= TOLERANCE)


def find_wrong(device: torch.device) -> tuple[str, ...]:
    """The names of what is wrong on ``device``; nothing is looked for on CPUs."""
    if device.type != "cuda" or os.environ.get("HYPERSLAB_CONV_CHECK") == "0":
        return ()
    return verdict_of(device).wrong


@lru_cache
def verdict_of(device: torch.device) -> Verdict:
    """The verdict on disk, or a new one."""
    return _recall(describe(device)) or check(device)


def check(device: torch.device) -> Verdict:
    """A new verdict, which is kept on disk."""
    try:
        verdict = measure(device)
    except torch.OutOfMemoryError:
        _log.debug("the convolutions of %s are not checked: its memory is full", device)
        return Verdict({}, 0.0)
    if verdict.errors:
        _remember(describe(device), verdict)
    return verdict


def describe(device: torch.device) -> str:
    """What a verdict depends on."""
    if device.type != "cuda":
        return f"the {device.type}, torch {torch.__version__}"
    gpu = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()
    return f"{gpu.name} ({gpu.major}.{gpu.minor}), cuDNN {cudnn}, torch {torch.__version__}"


# Measuring


def convolve(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What torch computes, padded by 1."""
    rest = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
    out = torch.convolution(x, weight, None, *rest)
    backward = torch.ops.aten.convolution_backward.default
    grad_x, grad_weight, _ = backward(grad, x, weight, None, *rest, (True, True, False))
    return out, grad_x, grad_weight


def measure(device: torch.device, convolve: Convolve = convolve) -> Verdict:
    """Compares ``convolve`` on ``device`` with float64 on the CPU.

    The numbers are small and whole: products and sums are exact in float32, so only the rounding of
    results remains.
    """
    start, errors = time.perf_counter(), dict[str, float]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _as_it_comes():
        for shape, weight_shape in SHAPES:
            shapes = shape, weight_shape, (shape[0], weight_shape[0], *shape[2:])
            given = [torch.randint(-2, 3, each, generator=generator) for each in shapes]
            exact = _convolve_exactly(*(each.double() for each in given))
            for precision in PRECISIONS:
                for layout, memory_format in LAYOUTS.items():
                    found = _attempt(convolve, given, device, precision, memory_format)
                    for name, ours, due in zip(PASSES, found, exact, strict=False):
                        assert ours.dtype == PRECISIONS[precision]
                        key = f"{precision} {layout} {name}"
                        errors[key] = max(errors.get(key, 0.0), _error(ours, due))
    return Verdict(errors, time.perf_counter() - start)


_convolve_exactly = convolve


def _attempt(
    convolve: Convolve,
    given: list[Tensor],
    device: torch.device,
    precision: str,
    memory_format: torch.memory_format,
) -> tuple[Tensor, ...]:
    """Nothing where an error is raised: that is not silently wrong."""
    operands = [
        each.to(device, PRECISIONS[precision]).contiguous(memory_format=memory_format)
        for each in given
    ]
    try:
        with fp32_precision("tf32" if precision == "tf32" else "ieee"):
            return convolve(*operands)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return ()


def _error(found: Tensor, due: Tensor) -> float:
    off = (found.double().cpu() - due).abs().max() / due.abs().max()
    return off.item() if off.isfinite() else float("inf")


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """Within it, convolutions in float32 are computed by TF32 (``tf32``) or not (``ieee``)."""
    settings = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


@contextmanager
def _as_it_comes() -> Iterator[None]:
    """Within it, cuDNN picks kernels without timing them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# On disk


def cache_folder() -> Path:
    """The user's, for all programs that keep what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyperslab"


def _file_of(about: str) -> Path:
    digest = hashlib.sha256(about.encode()).hexdigest()[:16]
    return cache_folder() / f"convolutions-{digest}.json"


def _recall(about: str) -> Verdict | None:
    """None if there is no verdict, or none that can be read."""
    try:
        found = json.loads(_file_of(about).read_bytes())
        errors = {str(name): float(error) for name, error in found["errors"].items()}
        is_ours = (found["about"], found["version"]) == (about, VERSION)
        return Verdict(errors, float(found["seconds"])) if is_ours else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remember(about: str, verdict: Verdict) -> None:
    """Writes a file that is whole or not there; where none can be written, there is none."""
    content = {"version": VERSION, "about": about, "seconds": verdict.seconds}
    with suppress(OSError, RuntimeError):
        path = _file_of(about)
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump({**content, "errors": dict(verdict.errors)}, file, indent=1)
                file.flush()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
