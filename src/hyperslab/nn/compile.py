"""Rules inside ``torch.compile``: each is one call in Dynamo's graph.

Dynamo interprets Python with a part of its features; rules need not keep to that part. It sees them
as calls that take and give tensors, and AOTAutograd, which runs them on tensors without values,
looks inside. Dynamo itself sees only how Slabs become tensors before such a call and Slabs after
it. Messages are operators of the graph (``comm.graph``).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from types import CodeType, ModuleType
from typing import Any, NamedTuple, NoReturn

from torch import Tensor
from torch.compiler import assume_constant_result, is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_scalar

from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh, mesh_of
from hyperslab.errors import ConfigError, HyperslabError
from hyperslab.layout import Cuts, Layout, Split
from hyperslab.nn.cuda_graphs.graphed import Graphed
from hyperslab.nn.depth_first.depth_first import DepthFirst
from hyperslab.nn.dispatch import dispatch
from hyperslab.nn.op import OPS, unsupported, writes_in_place
from hyperslab.nn.parallel.gradient_averaging import Replica, prepare_for_graph
from hyperslab.nn.parallel.outside_tensors import mean_in_graph
from hyperslab.nn.parallel.parallelize import Parallel
from hyperslab.nn.single_rank.mode import SingleRank
from hyperslab.nn.slab import Slab
from hyperslab.nn.view_copy import WRITTEN, ViewCopy
from hyperslab.torch_private import (
    keep_from_dynamo,
    let_dynamo_override,
    traced_as_one_call,
    unpatched,
)

# Descriptions are nested tuples of plain values, the only ones that Dynamo takes for constants:
# ("slab" or "copy", number of its piece, shape, splits), ("tensor", number), ("learnable",
# number, number of a weight or None), ("tuple", items), ("list", items), ("slice", its three
# parts), ("dict", pairs) or ("value", what).
Description = tuple[Any, ...]


@dataclass(frozen=True, eq=False, repr=False)
class _GraphCopy(Slab):
    """A ``ViewCopy`` in a graph, where nobody can tell whether what it was taken from lives."""


class _Call(NamedTuple):
    """A call of ``function`` on Slabs, all on ``mesh``, in some graph."""

    function: Callable[..., Any]
    arguments: Description
    mesh: Mesh
    result: list[Description]
    """How its result is made of tensors, once it has run."""


_calls: list[_Call] = []


def dispatch_in_graph(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``dispatch``, while Dynamo interprets it."""
    tensors: list[Tensor] = []
    meshes: list[Mesh] = []
    arguments = _describe((args, kwargs), tensors, meshes)
    number = _remember(function, arguments, index(meshes[0].number))
    pieces = _run(number + 0, *tensors)  # + 0: a constant that Dynamo wants no guard for
    result = _result_of(number)
    if result[0] == "error":  # Dynamo would not tell of an error inside the call
        raise HyperslabError(result[1])
    return _rebuild(result, pieces, meshes[0])


hook_weights_of = assume_constant_result(prepare_for_graph)


@assume_constant_result  # type: ignore[untyped-decorator]
def _remember(function: Callable[..., Any], arguments: Description, mesh: int) -> int:
    _calls.append(_Call(unpatched(function), arguments, mesh_of(mesh), []))
    return len(_calls) - 1


@assume_constant_result  # type: ignore[untyped-decorator]
def _result_of(number: int) -> Description:
    return _calls[number].result[0]


@traced_as_one_call
def _run(number: int, *tensors: Tensor) -> list[Tensor]:
    function, arguments, mesh, result = _calls[number]
    args, kwargs = _rebuild(arguments, tensors, mesh)
    pieces: list[Tensor] = []
    before = journal.count  # when a graph is made, and how often, may differ from rank to rank
    try:
        if writes_in_place(function, kwargs) and args and isinstance(args[0], _GraphCopy):
            raise unsupported(function, args[0], WRITTEN)
        result[:] = [_describe(dispatch(function, args, kwargs), pieces, [])]
    except HyperslabError as error:
        result[:] = [("error", f"{type(error).__name__}: {error}")]
    finally:
        journal.forget_since(before)
    return pieces


def _describe(value: Any, tensors: list[Tensor], meshes: list[Mesh]) -> Description:
    """What ``value`` is; its tensors and the meshes of its Slabs go to the lists."""
    if isinstance(value, Slab):
        tensors.append(value.local)
        meshes.append(value.mesh)
        splits = [
            split and (split.axis, _fixed(split.cuts.bounds)) for split in value.layout.splits
        ]
        label = "copy" if isinstance(value, ViewCopy | _GraphCopy) else "slab"
        return label, len(tensors) - 1, _fixed(value.layout.shape), tuple(splits)
    if isinstance(value, Tensor):
        tensors.append(value)
        if is_dynamo_compiling() and value.requires_grad:
            return "learnable", len(tensors) - 1, getattr(value, "_hyperslab_number", None)
        return "tensor", len(tensors) - 1
    if isinstance(value, tuple):
        return "tuple", tuple([_describe(item, tensors, meshes) for item in value])
    if isinstance(value, list):
        return "list", tuple([_describe(item, tensors, meshes) for item in value])
    if isinstance(value, dict):
        items = [(key, _describe(item, tensors, meshes)) for key, item in value.items()]
        return "dict", tuple(items)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return "slice", tuple([_describe(part, tensors, meshes) for part in parts])
    return "value", guard_scalar(value) if type(value) in (int, float) else value


def _fixed(numbers: Sequence[int]) -> tuple[int, ...]:
    """``numbers``, for which Dynamo puts no symbols: other numbers need another plan."""
    return tuple([index(number) for number in numbers])


def _rebuild(description: Description, tensors: Sequence[Tensor], mesh: Mesh) -> Any:
    """The value that was described, with other tensors in it."""
    label = description[0]
    if label in ("slab", "copy"):
        _, number, shape, splits = description
        layout = Layout(
            shape, tuple([split and Split(split[0], Cuts(split[1])) for split in splits])
        )
        cls = Slab if label == "slab" else _GraphCopy
        return cls(tensors[number], layout, mesh)
    if label == "tensor":
        return tensors[description[1]]
    if label == "learnable":
        return mean_in_graph(tensors[description[1]], mesh, description[2])
    if label == "tuple":
        return tuple([_rebuild(item, tensors, mesh) for item in description[1]])
    if label == "list":
        return [_rebuild(item, tensors, mesh) for item in description[1]]
    if label == "slice":
        return slice(*[_rebuild(item, tensors, mesh) for item in description[1]])
    if label == "dict":
        return {key: _rebuild(item, tensors, mesh) for key, item in description[1]}
    return description[1]


_PACKAGES = tuple(
    f"hyperslab.{package}."
    for package in ("comm", "dist_ops", "kernels", "layout", "nn", "torch_private")
)
_CALL_USERS_MODULES = (
    Parallel.forward,
    Replica.__call__,
    SingleRank.__call__,
    Graphed.__call__,
    DepthFirst.__call__,
)


def _codes_of_this_package() -> Iterator[CodeType]:
    """Those of all functions but the ones that call modules of users."""
    left = {function.__code__ for function in _CALL_USERS_MODULES}
    for name, module in [*sys.modules.items()]:
        if f"{name}.".startswith(_PACKAGES):
            yield from (code for code in _codes_of(module) if code not in left)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if inspect.isclass(value) else (value,):
            for function in _functions_of(member):
                if code := getattr(inspect.unwrap(function), "__code__", None):
                    yield from _with_inner(code)


def _functions_of(member: Any) -> tuple[Any, ...]:
    if isinstance(member, property):
        return tuple(filter(None, (member.fget, member.fset)))
    return (getattr(member, "__func__", member),)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


@assume_constant_result  # type: ignore[untyped-decorator]
def refuse_compiling(what: str, advice: str) -> NoReturn:
    """Raises while Dynamo traces; where traced code raises, it would run what it is in as it is."""
    raise ConfigError(f"{what} cannot be compiled: {advice}")


let_dynamo_override(OPS)
keep_from_dynamo(_codes_of_this_package())
