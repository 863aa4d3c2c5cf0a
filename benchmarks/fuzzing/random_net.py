"""Random small networks: directed graphs of layers as published networks have them, and others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.testing.strategies import Place

MAX_EXTENT, MAX_CHANNELS, MAX_NUMEL = 14, 8, 6000


class RandomNet(nn.Module):
    """A network drawn by ``seed``: each node is a layer of one or two earlier nodes.

    Nodes that nothing reads are its outputs. ``sample`` is an input for it, in float64.
    """

    def __init__(self, seed: int, num_nodes: int = 8) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        torch.manual_seed(seed)
        self.sample = _sample(self._rng)
        self.nodes = nn.ModuleList()
        self.reads: list[tuple[int, ...]] = []
        values = [self.sample]
        while len(self.nodes) < num_nodes:
            self._grow(values)
        read = {number for numbers in self.reads for number in numbers}
        self.unread = [n for n in range(1, len(values)) if n not in read]

    def _grow(self, values: list[Tensor]) -> None:
        """Adds a node if the layer that is drawn fits the values that are drawn for it."""
        latest = len(values) - 1
        numbers = [self._rng.choice([latest, latest, self._rng.randint(0, latest)])]
        if self._rng.random() < 0.3:
            make = self._rng.choice(_JOINS)
            numbers.append(self._rng.randint(0, latest))
        else:
            make = self._rng.choice(_LAYERS)
        given = [values[number] for number in numbers]
        layer = make(self._rng, *given)
        if layer is None:
            return
        layer = layer.double()
        try:
            with torch.no_grad():
                value = layer(*given)
        except (RuntimeError, ValueError):  # a kernel larger than its input, say
            return
        if not _fits(value):
            return
        self.nodes.append(layer)
        self.reads.append(tuple(numbers))
        values.append(value)

    def forward(self, x: Any) -> tuple[Any, ...]:
        values = [x]
        for layer, numbers in zip(self.nodes, self.reads, strict=True):
            values.append(layer(*[values[number] for number in numbers]))
        return tuple(values[number] for number in self.unread)

    def describe(self) -> str:
        """The graph in words, a node a line."""
        lines = [f"0: input {tuple(self.sample.shape)}"]
        for number, (layer, reads) in enumerate(zip(self.nodes, self.reads, strict=True), start=1):
            shown = str(layer).replace("\n", " ")
            lines.append(f"{number}: {shown} of {', '.join(map(str, reads))}")
        return "\n".join([*lines, f"outputs: {self.unread}"])


def _sample(rng: random.Random) -> Tensor:
    num_dims = rng.choice([1, 2, 2, 3])
    extents = [rng.randint(4, 12 if num_dims < 3 else 8) for _ in range(num_dims)]
    return torch.randn(rng.randint(1, 3), rng.randint(1, 4), *extents, dtype=torch.float64)


def _fits(value: Tensor) -> bool:
    """Whether ``value`` is well, and small and large enough to go on with."""
    extents = value.shape[2:]
    small = value.numel() <= MAX_NUMEL and max(extents) <= MAX_EXTENT
    grown = value.shape[1] <= MAX_CHANNELS and min(extents) >= 1
    return bool(small and grown and value.isfinite().all() and value.abs().max() < 1e3)


class Lambda(nn.Module):
    """A function with arguments, shown as they are."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)

    def extra_repr(self) -> str:
        return self.name


class Gate(nn.Module):
    """Squeeze and excite: every channel scaled by what its mean says."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, channels)

    def forward(self, x: Any) -> Any:
        means = x.mean(tuple(range(2, x.ndim)))
        gate = torch.sigmoid(self.dense(means))
        return x * gate.view(*gate.shape, *[1] * (x.ndim - 2))


class Dense(nn.Module):
    """A dense layer along the channels, as ConvNeXt has it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.dense = nn.Linear(before, after)

    def forward(self, x: Any) -> Any:
        return self.dense(x.movedim(1, -1)).movedim(-1, 1)


class Beside(nn.Module):
    """Two tensors of one size along the channels, and a convolution of both."""

    def __init__(self, before: int, after: int, num_dims: int) -> None:
        super().__init__()
        self.conv = _of_dims("Conv{}d", num_dims)(before, after, 1)

    def forward(self, x: Any, y: Any) -> Any:
        return self.conv(torch.cat([x, y], dim=1))


def _of_dims(name: str, num_dims: int) -> Callable[..., nn.Module]:
    made: Callable[..., nn.Module] = getattr(nn, name.format(num_dims))
    return made


def _draws(rng: random.Random, choices: Sequence[int], num: int) -> tuple[int, ...]:
    return tuple(rng.choice(choices) for _ in range(num))


def _conv(rng: random.Random, x: Tensor) -> nn.Module:
    num = x.ndim - 2
    kernel = _draws(rng, [1, 2, 3, 3, 4, 5], num)
    dilation = _draws(rng, [1, 1, 1, 2], num)
    before = x.shape[1]
    groups = rng.choice([g for g in range(1, before + 1) if before % g == 0])
    after = groups * rng.randint(1, max(1, 5 // groups))
    if rng.random() < 0.2:
        return _of_dims("Conv{}d", num)(
            before, after, kernel, padding="same", dilation=dilation, groups=groups
        )
    padding = tuple(rng.randint(0, k // 2 + 1) for k in kernel)
    return _of_dims("Conv{}d", num)(
        before,
        after,
        kernel,
        _draws(rng, [1, 1, 2, 3], num),
        padding,
        dilation,
        groups,
        bias=rng.random() < 0.5,
        padding_mode=rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"]),
    )


def _conv_transpose(rng: random.Random, x: Tensor) -> nn.Module:
    num = x.ndim - 2
    stride = _draws(rng, [1, 2, 2, 3], num)
    return _of_dims("ConvTranspose{}d", num)(
        x.shape[1],
        rng.randint(1, 4),
        _draws(rng, [1, 2, 3, 4], num),
        stride,
        _draws(rng, [0, 0, 1], num),
        output_padding=tuple(rng.randint(0, step - 1) for step in stride),
        bias=rng.random() < 0.5,
    )


def _pool(rng: random.Random, x: Tensor) -> nn.Module:
    num = x.ndim - 2
    kernel = _draws(rng, [1, 2, 3, 4], num)
    stride, ceil = _draws(rng, [1, 2, 3], num), rng.random() < 0.3
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    if rng.random() < 0.5:
        dilation = _draws(rng, [1, 1, 2], num)
        return _of_dims("MaxPool{}d", num)(kernel, stride, padding, dilation, ceil_mode=ceil)
    inside = rng.random() < 0.5
    return _of_dims("AvgPool{}d", num)(kernel, stride, padding, ceil, inside)


def _adaptive_pool(rng: random.Random, x: Tensor) -> nn.Module:
    num = x.ndim - 2
    sizes = tuple(rng.choice([None, rng.randint(1, 7)]) for _ in range(num))
    name = rng.choice(["AdaptiveAvgPool{}d", "AdaptiveMaxPool{}d"])
    return _of_dims(name, num)(sizes if num > 1 else sizes[0] or 3)


def _norm(rng: random.Random, x: Tensor) -> nn.Module | None:
    num, channels = x.ndim - 2, x.shape[1]
    if x[:, 0].numel() < 8 or x[0, 0].numel() < 4:
        return None  # hardly any values: the norm of rounding errors
    kind = rng.randrange(4)
    if kind == 0:
        return _of_dims("BatchNorm{}d", num)(channels)
    if kind == 1:
        return _of_dims("InstanceNorm{}d", num)(channels, affine=rng.random() < 0.5)
    if kind == 2:
        return nn.GroupNorm(rng.choice([g for g in (1, 2, 4) if channels % g == 0]), channels)
    return nn.LayerNorm(x.shape[rng.randint(1, x.ndim - 1) :])


def _activation(rng: random.Random, x: Tensor) -> nn.Module:
    inplace = rng.choice([nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardtanh])
    if rng.random() < 0.2:
        # A copy first: other nodes may read the same value.
        act = inplace(inplace=True)
        return Lambda(f"{act} in place", lambda x: act(x.clone()))
    plain = [nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Mish, nn.PReLU, nn.Softsign]
    made: nn.Module = rng.choice([*plain, inplace])()
    return made


def _resize(rng: random.Random, x: Tensor) -> nn.Module:
    num = x.ndim - 2
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[num]
    mode = rng.choice(["nearest", "nearest-exact", "area", *smooth])
    corners = rng.random() < 0.5 if mode in smooth else None
    if rng.random() < 0.5:
        size = tuple(rng.randint(1, 12) for _ in range(num))
        return (
            nn.Upsample(size=size, mode=mode, align_corners=corners)
            if mode != "area"
            else (Lambda(f"area {size}", lambda x: F.interpolate(x, size=size, mode="area")))
        )
    factor = rng.choice([0.5, 1.5, 2.0, 2.7])
    return Lambda(
        f"{mode} x {factor}, {corners}",
        lambda x: F.interpolate(x, scale_factor=factor, mode=mode, align_corners=corners),
    )


def _pad(rng: random.Random, x: Tensor) -> nn.Module:
    mode = rng.choice(["constant", "reflect", "replicate", "circular"])
    low = -1 if mode == "constant" else 0
    pads = [rng.randint(low, 2) for _ in range(2 * (x.ndim - 2))]
    return Lambda(f"pad {pads} {mode}", lambda x: F.pad(x, pads, mode))


def _slice(rng: random.Random, x: Tensor) -> nn.Module:
    where: list[slice] = []
    for extent in x.shape:
        start = rng.randint(0, max(0, extent - 2))
        stop = rng.choice([None, rng.randint(start + 1, extent)])
        free = rng.random() < 0.6
        where.append(slice(None) if free else slice(start, stop, rng.choice([1, 1, 2])))
    return Lambda(f"x[{where}]", lambda x: x[tuple(where)])


def _turn(rng: random.Random, x: Tensor) -> nn.Module:
    dims = list(range(2, x.ndim))
    rng.shuffle(dims)
    shift, dim = rng.randint(-3, 3), rng.randrange(2, x.ndim)
    return rng.choice(
        [
            Lambda(f"permute {dims}", lambda x: x.permute(0, 1, *dims)),
            Lambda(f"flip {dim}", lambda x: x.flip(dim)),
            Lambda(f"roll {shift} {dim}", lambda x: x.roll(shift, dim)),
            Lambda("flatten and back", lambda x: x.flatten(2).reshape(x.shape)),
        ]
    )


def _reduce(rng: random.Random, x: Tensor) -> nn.Module:
    dim = rng.randrange(1, x.ndim)
    spatial = tuple(range(2, x.ndim))
    return rng.choice(
        [
            Lambda(f"softmax {dim}", lambda x: torch.softmax(x, dim)),
            Lambda(f"log_softmax {dim}", lambda x: F.log_softmax(x, dim)),
            Lambda(f"less its mean over {dim}", lambda x: x - x.mean(dim, keepdim=True)),
            Lambda("by its spread", lambda x: x / (1 + x.std(spatial, keepdim=True, correction=0))),
            Lambda("by its largest", lambda x: x / (1 + x.abs().amax(spatial, keepdim=True))),
            Lambda(f"normalize {dim}", lambda x: F.normalize(x + 0.1, dim=dim)),
            Lambda(f"cumsum {dim}", lambda x: x.cumsum(dim)),
            Lambda("response norm", lambda x: F.local_response_norm(x, 2)),
        ]
    )


def _mix(rng: random.Random, x: Tensor) -> nn.Module:
    channels = x.shape[1]
    return rng.choice([Gate(channels), Dense(channels, rng.randint(1, 4))])


def _parts(rng: random.Random, x: Tensor) -> nn.Module:
    dim, num = rng.randrange(1, x.ndim), rng.choice([2, 3])
    return Lambda(
        f"{num} chunks along {dim}, reversed",
        lambda x: torch.cat(
            [part * (n + 1) for n, part in enumerate(x.chunk(num, dim))][::-1], dim
        ),
    )


def _shuffle(rng: random.Random, x: Tensor) -> nn.Module | None:
    if x.ndim != 4 or min(x.shape[2:]) < 2:
        return None
    if x.shape[1] % 4 == 0:
        return nn.PixelShuffle(2)
    return nn.PixelUnshuffle(2) if x.shape[2] % 2 == 0 == x.shape[3] % 2 else None


_LAYERS: list[Callable[..., nn.Module | None]] = [
    _conv, _conv, _conv, _conv, _conv_transpose, _pool, _pool, _adaptive_pool, _norm, _norm,
    _activation, _activation, _resize, _pad, _slice, _turn, _reduce, _mix, _parts, _shuffle,
]  # fmt: skip


def _join(rng: random.Random, x: Tensor, y: Tensor) -> nn.Module | None:
    if x.shape == y.shape:
        name = rng.choice(["add", "mul", "maximum"])
        return Lambda(name, getattr(torch, name))
    return None


def _concatenate(rng: random.Random, x: Tensor, y: Tensor) -> nn.Module | None:
    if x.shape[0] != y.shape[0] or x.shape[2:] != y.shape[2:]:
        return None
    return Beside(x.shape[1] + y.shape[1], rng.randint(1, 4), x.ndim - 2)


def _fit_and_add(rng: random.Random, x: Tensor, y: Tensor) -> nn.Module | None:
    """A skip connection from another scale, as U-Nets have it."""
    if x.shape[:2] != y.shape[:2]:
        return None
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[x.ndim - 2]
    return Lambda(
        f"{mode} to the other's size, add",
        lambda x, y: x + F.interpolate(y, size=x.shape[2:], mode=mode, align_corners=False),
    )


def _crop_and_add(rng: random.Random, x: Tensor, y: Tensor) -> nn.Module | None:
    if x.shape[:2] != y.shape[:2]:
        return None

    def run(x: Any, y: Any) -> Any:
        sizes = [min(pair) for pair in zip(x.shape[2:], y.shape[2:], strict=True)]
        where = (slice(None), slice(None), *map(slice, sizes))
        return x[where] + y[where]

    return Lambda("crop to the smaller, add", run)


def _scale(rng: random.Random, x: Tensor, y: Tensor) -> nn.Module | None:
    if x.shape[:2] != y.shape[:2]:
        return None
    return Lambda(
        "times the other's means",
        lambda x, y: x * y.mean(tuple(range(2, y.ndim)), keepdim=True),
    )


_JOINS: list[Callable[..., nn.Module | None]] = [
    _join, _join, _concatenate, _concatenate, _fit_and_add, _crop_and_add, _scale,
]  # fmt: skip


def random_place(seed: int, shape: Sequence[int]) -> Place:
    """A mesh of 2 to 4 ranks, and even, uneven, thin or empty pieces of a tensor of ``shape``."""
    rng = random.Random(f"place {seed}")
    spatial = ("depth", "height", "width")[5 - len(shape) :]
    known = {"sample": shape[0], **dict(zip(spatial, shape[2:], strict=True))}
    sizes = rng.choice([(2,), (2,), (3,), (4,), (2, 2)])
    chosen = rng.sample(sorted(known), min(len(sizes), len(known)))
    axes = dict(zip(chosen, sizes, strict=False))
    cuts = {}
    for axis, num in axes.items():
        if known[axis] < num or rng.random() < 0.6:
            inner = sorted(rng.randint(0, known[axis]) for _ in range(num - 1))
            cuts[axis] = [0, *inner, known[axis]]
    return Place(axes, cuts)


def random_channel_axes(seed: int, num_ranks: int, shape: Sequence[int]) -> dict[str, int]:
    """The axes of a mesh of ``num_ranks`` that cuts channels of a tensor of ``shape``."""
    rng = random.Random(f"channels {seed}")
    others = _axes_for(2, shape)
    if num_ranks != 4 or not others or rng.random() < 0.3:
        return {"channel": num_ranks}
    return {"channel": 2, rng.choice(others): 2}


def _axes_for(num: int, shape: Sequence[int]) -> list[str]:
    """The axes besides channel along which ``num`` ranks can each have a part."""
    names = ("sample", "channel", *("depth", "height", "width")[5 - len(shape) :])
    return [n for n, size in zip(names, shape, strict=True) if size >= num and n != "channel"]


def random_plan(
    seed: int, module: nn.Module, num_ranks: int, shape: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Other cuts of ``num_ranks`` for up to three parts of ``module``, which takes ``shape``."""
    rng = random.Random(f"plan {seed}")
    names = [name for name, part in module.named_modules() if name and not [*part.children()]]
    plan: dict[str, dict[str, Any]] = {}
    for name in rng.sample(names, min(len(names), rng.randint(0, 3))):
        axes = random_channel_axes(rng.randint(0, 10**6), num_ranks, shape)
        if (others := _axes_for(num_ranks, shape)) and rng.random() < 0.5:
            axes = {rng.choice(others): num_ranks}
        given = rng.choice([{}, {}, {"split": "filter"}, {"split": "channel"}])
        plan[name] = {**axes, **given}
    return plan
