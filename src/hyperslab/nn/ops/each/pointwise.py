"""Functions that act on each element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperslab.errors import LayoutError
from hyperslab.kernels import fused
from hyperslab.nn.adopt import write_adopted
from hyperslab.nn.align import align, check_input, of_channels
from hyperslab.nn.deferred import ACTIVATIONS, Deferred, defer_activation
from hyperslab.nn.op import IMPLEMENTED, Function, compute, define, unsupported, writes_in_place
from hyperslab.nn.slab import Slab

_UNARY = """
    abs absolute acos acosh airy_ai angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh
    atan atanh bessel_j0 bessel_j1 bessel_y0 bessel_y1 bfloat16 bitwise_not bool byte cdouble ceil
    celu cfloat chalf char clamp clamp_max clamp_min clip clone conj conj_physical cos
    cosh cpu cuda deg2rad digamma double elu empty_like entr erf erfc erfcx erfinv exp exp2
    expit expm1 fill fix float floor frac frexp full_like gammaln gelu half hardshrink hardsigmoid
    hardswish hardtanh i0 i0e i1 i1e int isfinite isinf isnan isneginf isposinf isreal leaky_relu
    lgamma log log10 log1p log2 log_ndtr logical_not logit logsigmoid long mish modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma nan_to_num ndtr
    ndtri neg negative ones_like pin_memory positive psi rad2deg reciprocal relu relu6
    requires_grad_ resolve_conj resolve_neg round rsqrt scaled_modified_bessel_k0
    scaled_modified_bessel_k1 selu sgn short sigmoid sign signbit silu sin sinc sinh softplus
    softshrink softsign spherical_bessel_j0 sqrt square tan tanh tanhshrink threshold trunc type
    zero_ zeros_like __neg__ __pos__ __abs__ __invert__
"""
_BROADCASTING = """
    add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift
    bitwise_xor chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w complex copysign div divide eq float_power floor_divide fmax fmin fmod
    gammainc gammaincc gcd ge greater greater_equal gt heaviside hermite_polynomial_h
    hermite_polynomial_he hypot igamma igammac isclose laguerre_polynomial_l lcm ldexp le
    legendre_polynomial_p lerp less less_equal logaddexp logaddexp2 logical_and logical_or
    logical_xor lt masked_fill maximum minimum mul multiply ne nextafter not_equal polar polygamma
    pow remainder rsub shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w sub subtract true_divide where
    xlog1py xlogy zeta __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
    __truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__
    __rpow__ __ipow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __eq__ __ne__ __lt__ __le__
    __gt__ __ge__ __lshift__ __rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__ __iand__
    __ior__ __ixor__ __ifloordiv__ __imod__
"""


def _functions(names: str) -> Iterator[Callable[..., Any]]:
    """Every function of these names in torch's namespaces and Tensor's methods, in place too."""
    for name in names.split():
        for space in (Tensor,) if name.startswith("__") else (torch, F, Tensor, torch.special):
            for spelling in (name, f"{name}_"):
                function = getattr(space, spelling, None)
                if callable(function):
                    yield function


def _make_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    in_place = writes_in_place(function)

    def rule(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        run = function if function not in IMPLEMENTED else partial(compute, function)
        if type(x) is Slab and len(args) == 1 and not kwargs:
            local = run(x.local)
        elif type(x) is Slab and not _has_tensors(args, kwargs):
            local = run(x.local, *args[1:], **kwargs)
        else:
            return _run_aligned(function, args, kwargs, in_place=in_place)
        if local is x.local:
            return x
        if type(local) is Tensor:  # as ``_result`` has it, in less time
            return Slab(local, x.layout, x.mesh)
        return _result(function, local, x)

    return rule


def _make_activation(
    function: Function, slope_of: Callable[..., tuple[float, bool]]
) -> Callable[..., Any]:
    """The rule of a ReLU, which waits for the pool after it where one kernel does both."""
    pointwise = _make_rule(function)

    def activate(input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not Slab or fused.pays(piece := input.local):
            slope, in_place = slope_of(*args, **kwargs)
            if _can_wait(input, slope, in_place=in_place):
                return defer_activation(input, slope, in_place=in_place)
        elif not args and not kwargs and function not in IMPLEMENTED:  # the rule, in less time
            out = function(piece)
            return input if out is piece else Slab(out, input.layout, input.mesh)
        return pointwise(input, *args, **kwargs)

    return activate


def _can_wait(x: Any, slope: float, *, in_place: bool) -> bool:
    if not 0 <= slope < math.inf or slope == 1:  # with 1 nothing is there to wait for
        return False
    if isinstance(x, Deferred) and x.source is not None:
        return x.slope == 1
    if type(x) is not Slab or not fused.pays(x.local) or x.local.is_inference():
        return False
    is_leaf = x.local.is_leaf and x.local.requires_grad  # torch refuses to write into it
    return not in_place or not (x.is_view or x.is_part or is_leaf)


def _relu(inplace: bool = False) -> tuple[float, bool]:
    return 0.0, inplace


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> tuple[float, bool]:
    return negative_slope, inplace


_SLOPES: dict[Function, Callable[..., tuple[float, bool]]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), lambda: _relu(inplace=True)),
    F.leaky_relu: _leaky_relu,
    F.leaky_relu_: lambda negative_slope=0.01: _leaky_relu(negative_slope, inplace=True),
}
"""By what ReLUs multiply what is below zero, and whether in place, from their other arguments."""
ACTIVATIONS.update(_SLOPES)


def _has_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there are tensors besides the first argument."""
    for arg in (*args[1:], *kwargs.values()):  # noqa: SIM110 - any() takes twice as long
        if isinstance(arg, Tensor | Slab):
            return True
    return False


def _run_aligned(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, in_place: bool
) -> Any:
    operands = [*args, *kwargs.values()]
    if in_place and not isinstance(args[0], Slab):

        def write(x: Slab) -> Any:
            return _run_aligned(function, (x, *args[1:]), kwargs, in_place=True)

        return write_adopted(function, args[0], operands, write)
    aligned, like = align(operands, to=args[0] if in_place else None)
    local = function(*aligned[: len(args)], **dict(zip(kwargs, aligned[len(args) :], strict=True)))
    return args[0] if in_place else _result(function, local, like)


def _result(function: Callable[..., Any], local: Any, like: Slab) -> Any:
    """The Slab of what ``function`` made of the pieces; ``NotImplemented`` and such as they are."""
    if isinstance(local, Tensor):
        return Slab(local, like.layout, like.mesh)
    if isinstance(local, torch.return_types.frexp):
        slabs: Any = tuple(_result(function, each, like) for each in local)
        return torch.return_types.frexp(slabs)
    if isinstance(local, tuple):  # indices within the piece: torch.where of one argument
        raise unsupported(function, like, "it gives indices")
    return local


def _make_conversion(function: Callable[..., Any]) -> None:
    """Another tensor among the arguments gives a dtype and a device, whatever its shape."""

    @define("pointwise", function)
    def convert(x: Slab | Tensor, *args: Any, **kwargs: Any) -> Slab | Tensor:
        given = [arg.local if isinstance(arg, Slab) else arg for arg in args]
        named = {name: arg.local if isinstance(arg, Slab) else arg for name, arg in kwargs.items()}
        if not isinstance(x, Slab):
            return function(x, *given, **named)  # type: ignore[no-any-return]
        local = function(x.local, *given, **named)
        return x if local is x.local else x.with_local(local)


@define("pointwise", torch.prelu, F.prelu, Tensor.prelu)
def _prelu(x: Slab, weight: Slab | Tensor) -> Slab:
    """The weights, if there are several, follow dim 1, the channels."""
    x = check_input(torch.prelu, x)
    several = weight.numel() > 1
    if several and (x.ndim < 2 or tuple(weight.shape) != x.layout.shape[1:2]):
        raise LayoutError(
            f"prelu: {tuple(weight.shape)} is not one number for each channel of an input of shape "
            f"{tuple(x.shape)}"
        )
    own: Any = of_channels(x, weight) if several else weight
    return x.with_local(torch.prelu(x.local, own.local if isinstance(own, Slab) else own))


@define("pointwise", F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_)
def rrelu(
    x: Slab,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Slab:
    """The leaky ReLU with the mean of both slopes; in training it would draw one an element."""
    if lower > upper:
        raise RuntimeError(f"rrelu: the lower bound {lower} is above the upper bound {upper}")
    if training:
        raise unsupported(F.rrelu, x, "it draws random numbers, which differ between ranks")
    return F.leaky_relu(x, (lower + upper) / 2, inplace)  # type: ignore[arg-type, return-value]


POINTWISE = frozenset((*_functions(_UNARY), *_functions(_BROADCASTING)))
for _function in POINTWISE:
    _slope_of = _SLOPES.get(_function)
    define("pointwise", _function)(
        _make_activation(_function, _slope_of) if _slope_of else _make_rule(_function)
    )
for _function in (Tensor.to, Tensor.type_as):
    _make_conversion(_function)
