"""For which convolutions are the kernels for few channels faster than cuDNN's?

    python benchmarks/gpu_channels.py --folder out
    python benchmarks/gpu_channels.py --dims 3 --dtype bf16
    python benchmarks/gpu_channels.py --small       (one tiny layer, also without a GPU)

Times are medians between CUDA events, in ms, of cuDNN / of ours, channels last, TF32 allowed; the
packing of inputs that ours need is counted, the host's time is not. `*` marks what hyperslab takes
on its own: kernels are taken where they are faster here (`few_channels.is_faster`). All kernels are
compiled first, by many processes at once. channels.json and channels.md in --folder are written
again after every layer.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from gpu.ahead import run_ahead
from gpu.clock import device_times
from gpu.record import NO_TIME, Found, Record
from torch import Tensor

from hyperslab.kernels import few_channels
from hyperslab.kernels.few_channels_operands import pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUMEL = 1 << 27
"""Of the larger of input and output."""
AHEAD_CYCLES = 3_000_000
"""Of the GPU's clock, 1.5 ms: the host takes less to launch a pass, and is not to be timed."""
PASSES = ("forward", "weight", "input")
Runs = dict[str, Callable[[], object]]
"""A call for each pass that can be had."""


class Layer(NamedTuple):
    dims: int
    channels: int
    filters: int
    kernel: int
    dtype: str

    @property
    def padding(self) -> tuple[int, ...]:
        return (self.kernel // 2,) * self.dims

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Of a volume of 64 planes, or an image."""
        depth = (64,) if self.dims == 3 else ()
        side = (numel // max(self.channels, self.filters) // (depth or (1,))[0]) ** 0.5
        return (*depth, *[max(8, int(side) // 8 * 8)] * 2)

    def tensors(self, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Input, weight, gradient of the output; without values."""
        last = torch.channels_last_3d if self.dims == 3 else torch.channels_last
        like = {"device": DEVICE, "dtype": DTYPES[self.dtype]}
        x, grad = (
            torch.empty((1, n, *self.sizes(numel)), memory_format=last, **like)
            for n in (self.channels, self.filters)
        )
        return x, torch.empty(self.filters, self.channels, *[self.kernel] * self.dims, **like), grad

    def __str__(self) -> str:
        return f"{self.channels}->{self.filters}, {self.kernel}^{self.dims} {self.dtype}"


def make_layers(dims: list[int], dtypes: list[str]) -> list[Layer]:
    """Those on both sides of where `is_faster` draws its line; what matters most first."""
    layers = []
    for num_dims, dtype in product(sorted(dims, reverse=True), dtypes):
        channels = (1, 4, 8, 16, 32) if num_dims == 3 else (1, 3, 16, 32)
        layers += [Layer(num_dims, *each, 3, dtype) for each in product(channels, (16, 32, 64))]
        wide = [(1, 16), (4, 16), (4, 64)] if num_dims == 3 else [(1, 16), (3, 64), (16, 16)]
        layers += [Layer(num_dims, *each, 5, dtype) for each in wide]
    return layers


def ours(layer: Layer, x: Tensor, weight: Tensor, grad: Tensor) -> Runs:
    """What there are kernels for."""
    ones, found = (1,) * (2 * layer.dims), {}
    if DEVICE.type != "cuda":
        return found
    if few_channels.is_supported(weight, weight.dtype, ones, 1):
        found["forward"] = lambda: few_channels.convolve(x, weight, None, layer.padding)
        found["weight"] = lambda: few_channels.weight_grads(
            pack(x, weight, layer.padding), grad, weight, want_bias=False
        )
    if few_channels.is_supported(weight.transpose(0, 1), weight.dtype, ones, 1):
        found["input"] = lambda: few_channels.input_grad(grad, weight, layer.padding)
    return found


def cudnn(layer: Layer, x: Tensor, weight: Tensor, grad: Tensor) -> Runs:
    ones, zeros = (1,) * layer.dims, (0,) * layer.dims
    rest = (ones, layer.padding, ones, False, zeros, 1)

    def backward(*wants: bool) -> object:
        return torch.ops.aten.convolution_backward.default(grad, x, weight, None, *rest, wants)

    return {
        "forward": lambda: torch.convolution(x, weight, None, *rest),
        "weight": lambda: backward(False, True, False),
        "input": lambda: backward(True, False, False),
    }


def is_taken(what: str, weight: Tensor) -> bool:
    if what == "weight":
        return few_channels.is_weight_grad_faster(weight, weight.dtype)
    turned = weight.transpose(0, 1) if what == "input" else weight
    return few_channels.is_faster(turned, weight.dtype)


def compile_kernels(layer: Layer) -> None:
    """Has the kernels compiled, into the cache on disk, for the very tensors that will be timed.

    Whatever fails will fail again where it is told.
    """
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: object, **kwargs: object) -> object:
        return run(kernel, *args, **kwargs | {"warmup": True})

    with patch.object(JITFunction, "run", compile_only):
        for call in ours(layer, *layer.tensors(NUMEL)).values():
            try:
                call()
            except Exception as error:  # noqa: BLE001
                print(f"{layer}: {type(error).__name__}", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()


def measure(layer: Layer, numel: int) -> Found:
    tensors = layer.tensors(numel)
    for tensor in tensors:
        tensor.normal_()
    found: Found = {"layer": layer._asdict()}
    theirs = cudnn(layer, *tensors)
    for what, run in ours(layer, *tensors).items():
        try:
            times = {"cudnn": _median(theirs[what]), "ours": _median(run)}
        except RuntimeError as error:
            found["failure"] = f"{what}: {str(error).splitlines()[0]}"
            continue
        found[what] = {**times, "taken": is_taken(what, tensors[1])}
    return found


def _median(run: Callable[[], object]) -> float:
    run()
    return statistics.median(device_times(run, 5, DEVICE, _let_host_go_ahead))


def _let_host_go_ahead() -> None:
    if DEVICE.type == "cuda":
        torch.cuda._sleep(AHEAD_CYCLES)


def cells(found: Found) -> list[str]:
    layer = str(Layer(**found["layer"]))
    return [layer, *(_cell(found.get(what)) for what in PASSES), found.get("failure", "")]


def _cell(times: dict | None) -> str:
    if times is None:
        return ""
    ratio = times["cudnn"] / times["ours"]
    told = f"{times['cudnn']:.3f} / {times['ours']:.3f} = {ratio:.2f}"
    return told + (" *" if times["taken"] else "")


def measure_all(layers: list[Layer], record: Record, seconds: float) -> None:
    """After ``seconds`` at most, for compiling."""
    done = run_ahead(compile_kernels, layers, seconds=seconds)
    for layer in layers:
        if record.is_over or layer not in done:
            late = NO_TIME if layer in done else f"not measured: not compiled in {seconds:.0f} s"
            record.add({"layer": layer._asdict(), "failure": late})
        else:
            record.add(measure(layer, NUMEL))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", choices=(2, 3), default=[2, 3])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--folder", type=Path, help="for channels.json and channels.md")
    parser.add_argument("--budget", type=float, default=150.0, help="begin nothing after as many s")
    parser.add_argument("--small", action="store_true", help="tiny; so without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    columns = ("layer", *(f"{what}: cuDNN / ours" for what in PASSES), "")
    record = Record("channels", columns, cells, folder=options.folder, budget=options.budget)
    if options.small or DEVICE.type != "cuda":
        record.add(measure(Layer(3, 4, 16, 3, "fp32"), 1 << 12))
    else:
        measure_all(make_layers(options.dims, options.dtype), record, options.budget / 2)
    if options.json:
        print(json.dumps(record.report(), indent=1))
    else:
        record.print()


if __name__ == "__main__":
    main()
