"""Reads the operators of a module from one forward pass on tensors without values."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.nn.depth_first.chains import find_candidates, install_candidates, installed_chains
from hyperslab.nn.op import OPS, Call, name_of, writes_in_place
from hyperslab.planner.network import INPUT, Family, Layer, Network
from hyperslab.torch_private import tree_leaves, tree_map

BATCH = 2
"""Samples in the pass: norms need more than one number of each channel."""

WIDE = frozenset(
    [
        "softmax",
        "log_softmax",
        "layer_norm",
        "group_norm",
        "cross_entropy",
        "nll_loss",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "exp",
        "log",
        "log1p",
        "pow",
        "prod",
        "sum",
        "cumsum",
        "norm",
        "softplus",
    ]
)
"""The functions that autocast has compute in float32."""
NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm")
RESIZES = ("interpolate", "upsample", "grid_sample")


def read_network(model: nn.Module, input_shape: Sequence[int], name: str = "") -> Network:
    """The operators of ``model`` for a sample of ``input_shape``, without the batch dim.

    Nothing is computed and ``model`` does not change; it may lie on the meta device itself.
    """
    called = name or type(model).__name__
    _check(model, called)
    double = _on_meta(model)
    dtypes = (p.dtype for p in double.parameters() if p.is_floating_point())
    dtype = next(dtypes, torch.get_default_dtype())
    sample = torch.empty(BATCH, *input_shape, dtype=dtype, device="meta")
    reader = _Reader(sample, double)
    try:
        with (
            torch.enable_grad(),
            reader,
            reader.named_modules(),
            saved_tensors_hooks(*reader.hooks),
        ):
            double(sample)
    except HyperslabError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{called} cannot be planned: {_why(error, reader, input_shape)}"
        ) from error
    weights = [*model.parameters()]
    network = Network(
        called,
        tuple(input_shape),
        tuple(reader.layers),
        sum(weight.numel() for weight in weights),
        len(weights),
    )
    known = {each for each, _ in double.named_modules()}
    return replace(
        network,
        chains=_chains(network, double, dtype),
        containers=frozenset(known - reader.called),
    )


def _check(model: nn.Module, called: str) -> None:
    """Raises where operators could not be seen."""
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"{called} cannot be planned: {name or 'it'} is compiled by torch.jit, and its "
                "operators do not show: plan the module that it was made of"
            )
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(weight):
            raise ConfigError(
                f"{called} cannot be planned: {name} of a lazy module has no shape yet: run the "
                "module once on a small sample first"
            )


def _why(error: Exception, reader: _Reader, input_shape: Sequence[int]) -> str:
    """In one line; torch's own words for operators that want values name the meta device."""
    said = re.split(r"\.\s|\n", str(error).strip())[0] or type(error).__name__
    where = f" in module {reader.module}" if reader.module else ""
    if isinstance(error, NotImplementedError) or "meta" in said.lower():
        return f"{reader.latest}{where} does not run on tensors without values ({said})"
    shown = "x".join(map(str, input_shape))
    return f"a sample of {shown} does not go through it: {reader.latest}{where} says: {said}"


def _chains(network: Network, double: nn.Module, dtype: torch.dtype) -> dict[str, tuple[str, ...]]:
    """Those that ``parallelize`` can compute depth first: each is tried, on one number."""
    paths = {chain.name: tuple(chain.paths) for chain in find_candidates(double)}
    network = replace(network, chains=paths)
    double._apply(_of_one_number)
    install_candidates(double)
    found = {}
    for chain in installed_chains(double):
        first = next(
            (n for n in range(len(network.layers)) if network.is_inside(n, chain.name)), None
        )
        if first is not None:
            shape = network.shape_of(network.layers[first].inputs[0])
            sample = torch.empty(BATCH, *shape, dtype=dtype, device="meta")
            if chain.can_run(_of_one_number(sample)):
                found[chain.name] = paths[chain.name]
    return found


def _of_one_number(tensor: Tensor) -> Tensor:
    """Like it, on the CPU; all its elements are one place in memory."""
    return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` in training mode, without values."""
    doubles: dict[int, Tensor] = {}
    for parameter in model.parameters():
        meta = parameter.detach().to("meta")
        doubles[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
    doubles |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, doubles).train()


class _Reader(TorchFunctionMode):
    """Makes a layer of every function that takes and returns tensors of the batch."""

    def __init__(self, sample: Tensor, model: nn.Module) -> None:
        super().__init__()
        self.layers: list[Layer] = []
        self.latest = "its forward pass"
        """What is being called."""
        self._model, self.module = model, ""
        self.called: set[str] = set()
        """The modules that were called so far."""
        self._sources = {_storage(sample): INPUT}
        """The layer that wrote last into a storage."""
        self._weights = {_storage(weight): weight.numel() for weight in model.parameters()}
        self._weights |= {_storage(buffer): 0 for buffer in model.buffers()}
        self._counted: set[int] = set()
        self._saved: list[Tensor] = []
        self._alive: list[Any] = [sample]  # so that no two storages have one id

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return self._save, lambda saved: saved

    def _save(self, saved: Tensor) -> Tensor:
        self._saved.append(saved)
        return saved

    @contextmanager
    def named_modules(self) -> Iterator[None]:
        """Within it, layers know the module that calls them."""
        handles = []
        for name, part in self._model.named_modules():
            outer: list[str] = []

            def enter(*_: object, name: str = name, outer: list[str] = outer) -> None:
                outer.append(self.module)
                self.module = name
                self.called.add(name)

            def leave(*_: object, outer: list[str] = outer) -> None:
                self.module = outer.pop()

            handles.append(part.register_forward_pre_hook(enter))
            handles.append(part.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.latest, self._saved = name_of(func), []
        if not (args and _is_on_cpu(args[0]) and writes_in_place(func, kwargs)):
            args, kwargs = _without_values(args, kwargs)
        op = None if kwargs.get("out") is not None else OPS.get(func)
        call = None if op is None else op.parse(args, kwargs)
        with nullcontext() if op else FlopCounterMode(display=False) as counter:
            out = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not made or not any(_storage(each) in self._sources for each in read):
            return out
        self._alive += [*made, *self._saved]
        saved, self._saved = self._saved, []
        flops = counter.get_total_flops() if counter else call.flops if call else 0
        self._add(func, call, read, made, saved, flops)
        return out

    def _add(
        self,
        func: Callable[..., Any],
        call: Call | None,
        read: list[Tensor],
        made: list[Tensor],
        saved: list[Tensor],
        flops: int,
    ) -> None:
        weights = [each for each in read if _storage(each) in self._weights]
        largest = max(made, key=Tensor.numel)
        in_place = _storage(largest) in self._sources
        known = [_storage(each) for each in read if _storage(each) in self._sources]
        known.sort(key=lambda place: place != _storage(largest))
        inputs = [self._sources[place] for place in known]
        kept = {_storage(each): each for each in saved if _storage(each) not in self._weights}
        own = {_storage(each) for each in made}
        others = [each for place, each in kept.items() if place not in {*self._sources, *own}]
        number = len(self.layers)
        keeps = {
            self._sources.get(place, number) for place in kept if place in {*self._sources, *own}
        }
        family = _family(func, call, in_place)
        layer = Layer(
            self.module,
            self.latest.rpartition(".")[2],
            family,
            tuple(dict.fromkeys(inputs)),
            _of_one_sample(largest.shape),
            call.windows if call is not None and family in ("conv", "pool", "resize") else (),
            int(call.options.get("groups", 1)) if call is not None else 1,
            flops // BATCH,
            sum(self._new_weights(weights)),
            tuple(sorted(keeps)),
            sum(each.numel() * each.element_size() for each in others) // BATCH,
            in_place,
            func.__name__ in WIDE,
        )
        self.layers.append(layer)
        self._sources |= {_storage(each): number for each in made}

    def _new_weights(self, weights: list[Tensor]) -> Iterator[int]:
        for weight in weights:
            place = _storage(weight)
            if place not in self._counted:
                self._counted.add(place)
                yield self._weights[place]


def _without_values(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with what ``forward`` made on the CPU beside tensors of the batch."""
    leaves = tree_leaves((args, kwargs))
    if not any(isinstance(x, Tensor) and x.is_meta for x in leaves):
        return args, kwargs
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
        lambda x: x.to("meta") if _is_on_cpu(x) else x, (args, kwargs)
    )
    return found


def _is_on_cpu(x: object) -> bool:
    """Numbers may meet tensors on any device."""
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.ndim > 0


def _family(func: Callable[..., Any], call: Call | None, in_place: bool) -> Family:
    name, family = func.__name__, None if call is None else call.op.family
    if "conv" in name:
        return "conv"
    if any(word in name for word in NORMS):
        return "norm"
    if any(word in name for word in RESIZES):
        return "resize"
    if (
        "adaptive" in name
        and call is not None
        and all(w.output_extent(1) == 1 for w in call.windows)
    ):
        return "reduce"  # over all of a sample: ranks send sums, not halos
    if family == "windowed" or "pool" in name:
        return "pool"
    if family == "product":
        return "dense"
    if family == "shape":
        return "view" if in_place else "pointwise"
    if family == "reducing":
        return "reduce"
    if family in ("pointwise", "random", "custom"):
        return "pointwise"
    return "view" if in_place else "other"


def _of_one_sample(shape: torch.Size) -> tuple[int, ...]:
    if shape and shape[0] == BATCH:
        return tuple(shape[1:])
    numel = math.prod(shape)
    return (numel // BATCH,) if numel % BATCH == 0 else (numel,)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
