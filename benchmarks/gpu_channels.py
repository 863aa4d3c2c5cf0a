"""For which convolutions are the kernels for few channels faster than cuDNN's?

    python benchmarks/gpu_channels.py
    python benchmarks/gpu_channels.py --dims 3 --dtype bf16
    python benchmarks/gpu_channels.py --small       (one tiny layer, also without a GPU)

Times are medians between CUDA events, in ms, of cuDNN / of ours, channels last, TF32 allowed; the
packing of inputs that ours need is counted. `*` marks what hyperslab takes on its own: kernels are
taken where they are faster here (`few_channels.is_faster`).
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from gpu.clock import device_times
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hyperslab.kernels import few_channels
from hyperslab.kernels.packed import pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUMEL = 1 << 27
"""Of the larger of input and output."""


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
        """Input, weight, gradient of the output."""
        last = torch.channels_last_3d if self.dims == 3 else torch.channels_last
        like = {"device": DEVICE, "dtype": DTYPES[self.dtype]}
        x, grad = (
            torch.empty((1, n, *self.sizes(numel)), memory_format=last, **like).normal_()
            for n in (self.channels, self.filters)
        )
        return x, torch.randn(self.filters, self.channels, *[self.kernel] * self.dims, **like), grad


def make_layers(dims: list[int], dtypes: list[str]) -> list[Layer]:
    layers = []
    for num_dims, dtype in product(dims, dtypes):
        layers += [
            Layer(num_dims, channels, filters, 3, dtype)
            for channels, filters in product((1, 3, 4, 8, 16, 32), (16, 32, 64, 128))
        ]
        wide = product((1, 4), (16, 64)) if num_dims == 3 else product((1, 3, 16), (16, 64))
        layers += [Layer(num_dims, *each, 5, dtype) for each in wide]
    return layers


def ours(layer: Layer, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """What there are kernels for."""
    ones, found = (1,) * (2 * layer.dims), {}
    if DEVICE.type != "cuda":
        return found
    if few_channels.is_supported(weight, weight.dtype, ones, 1):
        found["forward"] = lambda: few_channels.convolve(x, weight, None, layer.padding)
        found["weight"] = lambda: few_channels.weight_grads(
            pack(x, weight, layer.padding), grad, weight, want_bias=False
        )
    if few_channels.is_supported(few_channels.turned(weight), weight.dtype, ones, 1):
        found["input"] = lambda: few_channels.input_grad(grad, weight, layer.padding)
    return found


def cudnn(layer: Layer, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
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
    turned = few_channels.turned(weight) if what == "input" else weight
    return few_channels.is_faster(turned, weight.dtype)


def compile_kernels(layer: Layer) -> None:
    for run in ours(layer, *layer.tensors(1 << 16)).values():
        run()


def measure(layer: Layer, numel: int) -> dict:
    tensors = layer.tensors(numel)
    report: dict = {"layer": layer._asdict()}
    theirs = cudnn(layer, *tensors)
    for what, run in ours(layer, *tensors).items():
        try:
            found = {"cudnn": _median(theirs[what]), "ours": _median(run)}
        except RuntimeError as error:
            report["failure"] = f"{what}: {str(error).splitlines()[0]}"
            continue
        report[what] = {**found, "taken": is_taken(what, tensors[1])}
    return report


def _median(run: Callable[[], object]) -> float:
    run()
    return statistics.median(device_times(run, 5, DEVICE))


def print_table(reports: list[dict]) -> None:
    table = Table("layer", "forward", "weight gradient", "input gradient")
    for report in reports:
        layer = Layer(**report["layer"])
        name = f"{layer.channels}->{layer.filters}, {layer.kernel}^{layer.dims} {layer.dtype}"
        name += f" ({report['failure']})" if "failure" in report else ""
        table.add_row(name, *(_cell(report.get(what)) for what in ("forward", "weight", "input")))
    Console(width=120).print(table)


def _cell(times: dict | None) -> str:
    if times is None:
        return "no kernel"
    ratio = times["cudnn"] / times["ours"]
    told = f"{times['cudnn']:.3f} / {times['ours']:.3f} = {ratio:.2f}"
    return told + (" *" if times["taken"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", choices=(2, 3), default=[2, 3])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--small", action="store_true", help="tiny; so without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = True
    if options.small or DEVICE.type != "cuda":
        layers, numel = [Layer(3, 4, 16, 3, "fp32")], 1 << 12
    else:
        layers, numel = make_layers(options.dims, options.dtype), NUMEL
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            pool.map(compile_kernels, layers, chunksize=1)
    reports = [measure(layer, numel) for layer in layers]
    if options.json:
        print(json.dumps(reports, indent=1))
    else:
        print_table(reports)


if __name__ == "__main__":
    main()
