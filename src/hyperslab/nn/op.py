"""Operators as values: what is known of each torch function that runs on Slabs.

``OPS`` maps a torch function to its ``Op``. ``Op.parse`` makes a ``Call`` of arguments: tensors,
windows or dims, options. Whoever needs to know an operator asks its ``Call``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from hyperslab.errors import ConfigError, UnsupportedOp
from hyperslab.layout import Reads, integers
from hyperslab.torch_private import patched, tree_leaves, tree_map, unpatched

if TYPE_CHECKING:
    from hyperslab.nn.slab import Slab

Function = Callable[..., Any]
Rule = TypeVar("Rule", bound=Callable[..., Any])
Family = Literal["pointwise", "windowed", "reducing", "shape", "product", "random", "custom"]

_ALIASES = {"axis": "dim", "keepdims": "keepdim", "train": "training", "input": "x"}
"""Names of arguments that numpy has, or only some of a function's spellings, and those of rules."""


@dataclass(frozen=True, eq=False)
class Op:
    """A torch function that runs on Slabs."""

    function: Function
    family: Family
    rule: Callable[..., Any]
    """Computes it on Slabs; takes the function's own arguments."""
    reader: Callable[..., Call] | None = None
    """Takes the Op and the function's own arguments, where a Call has more than their names say."""
    windows: Callable[[Any, Mapping[str, Any]], tuple[Reads, ...]] | None = None
    """Those of a Call of an input and options, where it has some and no ``reader``."""
    flops: Callable[[Call], int] | None = None
    """Counts the multiplications and additions of a Call, where these are what takes time."""
    fused: tuple[FusedRule, ...] = ()
    """What is tried before the rule; the first that fits and gives a result is taken."""
    implementations: tuple[Implementation, ...] = ()
    """Of pieces, in the place of torch's own function; the first that fits is taken."""

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def in_place(self) -> bool:
        """Whether it writes into its first argument."""
        return writes_in_place(self.function)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.family == "random"

    def parse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
        """What the arguments say, with all defaults filled in."""
        named = self.keywords(dict(kwargs)) if kwargs else {}
        if self.reader is not None:
            return self.reader(self, *args, **named)
        bound = self._signature().bind(*args, **named)
        bound.apply_defaults()
        operands = tuple(filter(is_operand, tree_leaves((args, named), is_leaf=is_operand)))
        options = {name: arg for name, arg in bound.arguments.items() if not _has_operand(arg)}
        named_dims = [options[name] for name in ("dim", "dimension") if name in options]
        dims = _dims(operands[0], named_dims[0]) if named_dims and operands else ()
        windows = () if self.windows is None else self.windows(operands[0], options)
        return Call(self, operands, options, windows, dims, given=(args, kwargs or {}))

    def _signature(self) -> inspect.Signature:
        """The rule's, or where that takes anything the function's own, if it tells."""
        found = _signature(self.rule)
        takes_anything = found.parameters.keys() == {"args", "kwargs"}
        return (_signature_if_told(self.function) or found) if takes_anything else found

    def keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` by the names that the rule knows, without ``out=None``."""
        if "out" in kwargs and kwargs["out"] is None:
            kwargs = {name: arg for name, arg in kwargs.items() if name != "out"}
        if _ALIASES.keys().isdisjoint(kwargs):
            return kwargs
        known = _signature(self.rule).parameters
        renamed = {old: new for old, new in _ALIASES.items() if new in known and old not in known}
        return {renamed.get(name, name): arg for name, arg in kwargs.items()}

    def run_fused(self, call: Call) -> Any:
        """What the first of the fused rules that fits makes of the call; None where none does."""
        for each in self.fused:
            if each.fits(call) and (out := each.run(call)) is not None:
                return out
        return None


@dataclass(frozen=True, eq=False, init=False)
class Call:
    """One call of an operator: on Slabs, on plain tensors, or on pieces of them."""

    op: Op
    operands: tuple[Any, ...]
    """The Slabs and tensors it is given, its input first; of a windowed function None too."""
    options: Mapping[str, Any]
    """Its other arguments, by torch's names."""
    windows: tuple[Reads, ...] = ()
    """Those of a windowed function, for each of its last dims; of ``Tensor.unfold`` for its dim."""
    dims: tuple[int, ...] = ()
    """The dims over which a function reduces, or along which it works."""
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    """The arguments themselves, where operands and options do not tell how to call again."""

    def __init__(
        self,
        op: Op,
        operands: tuple[Any, ...],
        options: Mapping[str, Any],
        windows: tuple[Reads, ...] = (),
        dims: tuple[int, ...] = (),
        given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    ) -> None:
        """As a dataclass does it, in a third of the time: convolutions and pools make one each."""
        fields = self.__dict__
        fields["op"], fields["operands"], fields["options"] = op, operands, options
        fields["windows"], fields["dims"], fields["given"] = windows, dims, given

    @property
    def input(self) -> Any:
        return self.operands[0]

    def on(self, *operands: Any, **options: Any) -> Call:
        """The same call of other operands, and with some other options."""
        changed = {**self.options, **options} if options else self.options
        return Call(self.op, operands, changed, self.windows, self.dims)

    def run(self) -> Any:
        """What torch's own function makes of the operands."""
        if self.given is not None:
            return self.op.function(*self.given[0], **self.given[1])
        return self.op.function(*self.operands, **self.options)

    def implementation(self) -> Implementation | None:
        """The first of the operator's that fits, where the operands are pieces."""
        found = self.op.implementations
        return next((each for each in found if each.fits(self, self.input)), None)

    @property
    def flops(self) -> int:
        """Multiplications and additions, where these are what takes time: else 0."""
        return 0 if self.op.flops is None else self.op.flops(self)

    @property
    def nbytes(self) -> int:
        """What is read and written."""
        tensors = (*filter(is_operand, self.operands), *self.outputs())
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def saved_nbytes(self) -> int:
        """What autograd keeps for the backward pass, operands among it."""
        saved: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            saved[tensor.untyped_storage()._cdata] = tensor.numel() * tensor.element_size()
            return tensor

        kept: list[Tensor] = []  # so that no place in memory is taken twice
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            self.outputs()
        return sum(saved.values())

    def outputs(self) -> list[Tensor]:
        """What it makes, on the meta device: shapes and dtypes without values."""
        given = self.given or (self.operands, self.options)
        args, kwargs = tree_map(_without_values, given, is_leaf=is_operand)
        made = self.op.function(*args, **kwargs)
        return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator on a rank's piece, such as a kernel of its own."""

    name: str
    fits: Callable[[Call, Tensor], bool]
    """Whether it is right, and worth it, for this call whose input is this piece."""
    run: Callable[[Call, Tensor], Any]


@dataclass(frozen=True)
class FusedRule:
    """A rule that computes Slabs together with what was deferred before, or defers them itself."""

    name: str
    fits: Callable[[Call], bool]
    """Whether it is worth a try: a look at the input."""
    run: Callable[[Call], Any]
    """The result, or None where it turns out that there is no kernel for the call."""


def is_operand(leaf: object) -> bool:
    """Whether it is a tensor or a Slab: for ``tree_map``, which otherwise looks into Slabs."""
    return isinstance(leaf, Tensor) or hasattr(leaf, "with_local")


def _has_operand(value: object) -> bool:
    return any(map(is_operand, tree_leaves(value, is_leaf=is_operand)))


def _dims(x: Tensor | Slab, dim: Any) -> tuple[int, ...]:
    given = range(x.ndim) if dim is None else integers(dim)
    return tuple(each % max(1, x.ndim) for each in given) or tuple(range(x.ndim))


def _without_values(leaf: Any) -> Any:
    if not is_operand(leaf):
        return leaf
    meta = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
    return meta.requires_grad_(leaf.requires_grad)


@lru_cache(maxsize=1024)
def _signature_if_told(function: Function) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # a built-in one
        return None


@lru_cache(maxsize=1024)
def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(rule)


OPS: dict[Function, Op] = {}
"""What is known of each torch function that runs on Slabs."""


def define(
    family: Family,
    *functions: Function,
    reader: Callable[..., Call] | None = None,
    windows: Callable[[Any, Mapping[str, Any]], tuple[Reads, ...]] | None = None,
    flops: Callable[[Call], int] | None = None,
) -> Callable[[Rule], Rule]:
    """Makes the decorated rule what runs when one of ``functions`` gets a Slab: once for each."""

    def keep(rule: Rule) -> Rule:
        for function in dict.fromkeys(functions):  # torch has some under two names
            assert function not in OPS, f"{name_of(function)} has a rule"
            OPS[function] = Op(function, family, rule, reader, windows, flops)
        return rule

    return keep


USERS: set[Function] = set()
"""The functions that users have registered rules for."""
_num_registered = 0


def register(*functions: Function) -> Callable[[Rule], Rule]:
    """Makes the decorated rule what runs when one of ``functions`` gets a Slab.

    The rule takes the function's own arguments, Slabs among them, and returns Slabs (or a plain
    tensor that is equal on every rank). It replaces an earlier rule.

    ```python
    @hs.register(torch.special.entr)
    def entr(x):
        return x.with_local(torch.special.entr(x.local))
    ```
    """
    _check_callable("register takes torch functions", *functions)

    def keep(rule: Rule) -> Rule:
        _check_callable("register makes a function a rule", rule)
        global _num_registered
        given = [*map(unpatched, functions)]
        OPS.update({function: Op(function, "custom", rule) for function in given})
        USERS.update(given)
        _num_registered += 1
        return rule

    return keep


def _check_callable(what: str, *functions: object) -> None:
    for each in functions:
        if not callable(each):
            raise ConfigError(f"{what}, got {each!r}: write @hyperslab.register(torch.roll)")
    if not functions:
        raise ConfigError(f"{what}, got none: write @hyperslab.register(torch.roll)")


def num_registered() -> int:
    """How many rules users have ever registered, to tell whether some have changed."""
    return _num_registered


IMPLEMENTED: set[Function] = set()
"""The functions that have implementations of their pieces."""


def implement(function: Function, *implementations: Implementation) -> None:
    """Puts ``implementations`` of a pointwise function, a convolution or a pool before others."""
    op = OPS[function]
    if op.family != "pointwise" and (op.family != "windowed" or op.reader is None):
        raise UnsupportedOp(f"{op.name} is {op.family}: its rule asks for no implementations")
    OPS[function] = replace(op, implementations=(*implementations, *op.implementations))
    IMPLEMENTED.add(function)


def fuse(rule: FusedRule, *functions: Function) -> None:
    """Has ``rule`` tried before the rules of ``functions``."""
    OPS.update({f: replace(OPS[f], fused=(*OPS[f].fused, rule)) for f in functions})


def compute(function: Function, *args: Any, **kwargs: Any) -> Any:
    """What the first implementation that fits makes of pieces; else torch's own function."""
    call = OPS[function].parse(args, kwargs)
    found = call.implementation()
    return function(*args, **kwargs) if found is None else found.run(call, call.input)


def writes_in_place(function: Function, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether ``function`` writes into its first argument, by its name or ``inplace=True``."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_") or bool(kwargs and kwargs.get("inplace"))


def unsupported(function: Function, slab: Slab, why: str = "") -> UnsupportedOp:
    """The error to raise where ``function`` has no exact rule for ``slab``."""
    reason = why or "there is no rule for it on a split tensor"
    return UnsupportedOp(
        f"{name_of(function)} cannot run on a tensor of {slab.layout.describe()} (rank "
        f"{slab.mesh.rank} holds {'x'.join(map(str, slab.box.shape))}): {reason}. Call "
        "hyperslab.gather(x) first to have the whole tensor on every rank, or add a rule with "
        f"hyperslab.register({name_of(function)})"
    )


def name_of(function: Function) -> str:
    """The function as a user would write it, such as ``torch.roll`` or ``torch.Tensor.roll``."""
    if isinstance(function, MethodType):  # of a class, as ``MyFunction.apply``
        owner: Any = function.__self__
        return f"{owner.__module__}.{owner.__qualname__}.{function.__name__}"
    name = getattr(function, "__qualname__", repr(function))
    known = resolve_name(function) or resolve_name(patched(function))
    return known or f"{getattr(function, '__module__', '')}.{name}".lstrip(".")
