"""The private names of torch that this package uses, and what it changes in torch.

Nothing else here uses a private name of torch or patches it. Each stands with its reason;
``tests/test_torch_private.py`` fails when torch has a public name, or does by itself what a patch
is for: then it may go. Nothing is patched before a process makes a mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from types import CodeType, MethodType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._functorch import peek_interpreter_stack as peek_interpreter_stack
from torch._library.effects import EffectType as EffectType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_dynamo_compiling
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.jit._builtins import _register_builtin
from torch.nn.modules.module import _has_any_global_hook as has_global_module_hooks
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes as untraced,
)
from torch.utils._pytree import (
    register_pytree_node as register_container,
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)
from torch.utils.checkpoint import _CheckpointFrame

__all__ = [
    "DataDependentOutputException",
    "EffectType",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "TorchDispatchMode",
    "default_store",
    "has_global_module_hooks",
    "peek_interpreter_stack",
    "register_container",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "untraced",
]

if TYPE_CHECKING:  # it takes a second to load
    from torch.distributed.tensor import DTensor

Made = TypeVar("Made", bound=Callable[..., Any])

# Names above without a public one: pytrees (torch.utils has no public module for them), tensors
# without values (FakeTensor, FunctionalTensor), modes that see operators (TorchDispatchMode, whose
# page in torch's documentation imports it from there) and how to leave them, the transforms of
# torch.func that are running, hooks of all modules, operators whose order a compiler keeps, and the
# store of torch.distributed, which outlives its process groups.


def swap_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Makes ``group`` the default process group, or leaves none; gives the one before.

    Torch can only end the default group, and all others with it. A part of the ranks that is to
    live and die apart needs a default group of its own, and that of all ranks may be a user's.
    """
    before = distributed_c10d._world.default_pg
    distributed_c10d._update_default_pg(group)
    return before


def forget_placements() -> None:
    """Empties what torch remembers of operators on DTensors.

    It tells meshes apart by their ranks, not by their process groups: after those have ended, equal
    ranks with new groups would be sent to the old ones.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def known_groups() -> list[dist.ProcessGroup]:
    """The process groups of this process that were not destroyed."""
    return [*distributed_c10d._world.pg_map]


# --- What torch is doing now ------------------------------------------------------------------

backward_pass_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs, or -1. Passes have no public name."""

is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Public functions ask for one type of device; this is called for every operator."""

is_cudnn_enabled: Callable[[], bool] = torch._C._get_cudnn_enabled
"""``torch.backends.cudnn.enabled``, which takes five times as long and is read in every norm."""


def current_stream_key(device: torch.device) -> tuple[int, int, int]:
    """What tells the current stream of a GPU from others, in a tenth of the time of a ``Stream``.

    Replays and exchanges ask for it, mostly to find the stream that they had before.
    """
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device.index)
    return key


def active_function_modes() -> Iterable[Any]:
    """The ``TorchFunctionMode`` of this thread, outermost first; torch shows only their number."""
    return _get_current_function_mode_stack() if num_function_modes() else ()


num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many ``TorchFunctionMode`` are active: that of a default device is one."""

pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
"""Leaves the innermost one, and gives it; its ``__exit__`` gives nothing and takes longer."""
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack

past_torch_functions = torch._C.DisableTorchFunction
"""Within it functions ask neither arguments nor modes, as operators of C++ do not."""

past_subclasses = torch._C.DisableTorchFunctionSubclass
"""Within it they do not ask arguments; torch's documentation names it so."""

_TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.PROXY,
)


def is_traced() -> bool:
    """Whether operators are traced, as by a compiler, so that tensors may have no values.

    Modes that look on while values are computed, such as those that count FLOPs, are no tracers.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)


def has_saved_tensor_hooks() -> bool:
    """Whether someone, such as activation checkpointing, packs what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_forward_ad_active() -> bool:
    """Whether forward-mode derivatives are computed; only the levels are counted, privately."""
    return forward_ad._current_level >= 0


def is_parametrization_cached() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is active."""
    return parametrize._cache_enabled > 0


def will_run_in_backward(node: Any) -> bool:
    """Whether the running backward pass executes ``node`` of the autograd graph.

    Raises ``RuntimeError`` where ``torch.autograd.grad`` runs, which stops before leaves.
    """
    return torch._C._will_engine_execute_node(node)


def num_storage_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages, of Python or C++, hold the memory of ``storage``."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


# --- What torch does on request -----------------------------------------------------------------

foreach_mul = torch._foreach_mul
"""Lists of tensors in one kernel: torch's optimizers use it, and there is no public name."""

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_


is_all_true = torch._is_all_true
"""What torch.distributions asks of its arguments."""

is_any_true = torch._is_any_true

builtin_nn = torch._C._nn
"""The built-in functions behind those of ``torch.nn.functional``, which users can call too."""

functional_builtins = torch._VF
"""What dropouts of ``torch.nn.functional`` call; whoever holds one of these calls it there too."""

PYTREE_MODULE = tree_map.__module__
"""The name of torch's module of pytrees, to find who calls it."""


def fake_tensor_mode() -> FakeTensorMode:
    """A mode in which tensors have no values.

    They refuse to say where in memory they lie. By default they say 0, and a kernel of a user's own
    that gets it ends the process.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def offset_of_shard(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the whole tensor; DTensor itself does not tell."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    place = tensor.shape, tensor.device_mesh, tensor.placements
    return tuple(compute_local_shape_and_global_offset(*place)[1])


def make_symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory on ``device`` that ranks can share. Symmetric memory has no public name."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def share_symmetric_memory(
    memory: torch.Tensor, group: dist.ProcessGroup
) -> tuple[list[int], object]:
    """Where the memory of each rank of ``group`` lies, and what keeps all of it.

    Collective over ``group``.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(memory, group.group_name)
    return list(handle.buffer_ptrs), handle


def release_graph_pool(device_index: int, pool: Any) -> None:
    """Ends the allocation of memory to ``pool`` where a CUDA graph failed to end it."""
    torch._C._cuda_endAllocateToPool(device_index, pool)
    torch._C._cuda_releasePool(device_index, pool)


# --- What Dynamo is told: only by ``hyperslab.nn.compile``, as it loads the compiler --------------


def is_dynamo_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def traced_as_one_call(function: Made) -> Made:
    """``function`` as one call in Dynamo's graph, which AOTAutograd looks into."""
    from torch._dynamo import nonstrict_trace

    return cast(Made, nonstrict_trace(function))


_overridable: set[Callable[..., Any]] = set()
"""The functions that Dynamo was told of."""


def let_dynamo_override(functions: Iterable[Callable[..., Any]]) -> None:
    """Has Dynamo ask arguments for ``__torch_function__`` in ``functions``.

    By itself it does not for ``F.sigmoid``, ``torch.randn_like``, ``torch.relu_`` and others.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    _overridable.update(functions)
    patched = [now for now, before in _originals.items() if before in _overridable]
    get_overridable_functions().update((*_overridable, *patched))


def keep_from_dynamo(codes: Iterable[CodeType]) -> None:
    """Has functions with these ``codes`` run as written where Dynamo would compile them.

    Between two graphs, and in a backward pass, Dynamo takes up whatever Python calls. It still
    looks into functions that are called by what it compiles.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction as FrameAction,
        _FrameExecStrategy as FrameExecStrategy,
        set_code_exec_strategy,
    )

    as_written = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for code in codes:
        set_code_exec_strategy(code, as_written)


def change_class(instance: object, cls: type) -> None:
    """Makes ``instance`` one of ``cls``, as FSDP2 does with modules.

    A module that is given to ``parallelize`` stays the same object, to those who hold it too; a
    tensor that has become a Slab is refused wherever it is used.
    """
    instance.__class__ = cls


def swap_contents(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swaps classes, attributes and contents of two tensors that nothing holds past Python.

    ``torch.utils.swap_tensors`` refuses those that are held weakly. The objects stay what they are.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


# --- Patches: how layers are called ---------------------------------------------------------------

jit_tracing_state: Callable[[], object] = torch._C._get_tracing_state
"""None unless ``torch.jit.trace`` runs; ``torch.jit.is_tracing`` takes three times as long."""


def patch_call(cls: type[nn.Module], call: Callable[..., Any]) -> None:
    """Has ``call`` run layers of ``cls`` and its subclasses, in the place of ``_call_impl``.

    It is a method of the class, so that copies, pickles and changed layers are given themselves.
    ``nn.Module.compile`` sets this attribute for one layer, and compilers do not look at it.
    """
    cls._compiled_call_impl = call


def patch_handler(cls: type[Any], argument: type[Any]) -> None:
    """Has functions of ``torch.nn.functional`` ask a mode of ``cls`` in half of torch's time.

    Torch gathers the types of arguments first, which such a mode does not look at. Nor does an
    ``argument`` of that type, which is asked by itself where all others are tensors of torch.
    """
    space: Any = torch.nn.functional
    handle = space.handle_torch_function
    known = {argument, torch.Tensor, nn.Parameter, NoneType}

    @wraps(handle)
    def ask_or_handle(
        function: Callable[..., Any], relevant: Collection[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if is_dynamo_compiling():
            return handle(function, relevant, *args, **kwargs)
        if num_function_modes():
            mode = pop_function_mode()
            try:
                if type(mode) is cls:
                    return mode.__torch_function__(function, (), args, kwargs)
            finally:
                push_function_mode(mode)
        elif argument in (types := {*map(type, relevant)}) and types <= known:
            return argument.__torch_function__(function, (argument,), args, kwargs)
        return handle(function, relevant, *args, **kwargs)

    _replace(space, "handle_torch_function", ask_or_handle)


def patch_item() -> None:
    """Has ``item()`` of a DTensor give the number of the whole, on all ranks that hold parts of it.

    Torch gives what this rank has of it: of the norm of a gradient, that of this rank's part.
    Collective over these ranks from then on.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def item(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = args[0].redistribute(placements=[Replicate()] * args[0].device_mesh.ndim)
        return op_call(whole.to_local())

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)


# --- Patches: functions of torch that ask no argument for ``__torch_function__`` ------------------
#
# Torch takes a Slab for no tensor in them, and so would drop a branch of a network or the gradient
# of a function without a word.

_originals: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What was there before, by what is there now."""

_GIVE_BACK = {"_NoopSaveInputs"}
"""Functions of torch that give back what they get: that of activation checkpointing."""


def unpatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as it was before ``patch_for`` changed it: what ``__torch_function__`` gets."""
    if isinstance(function, MethodType) and function.__func__ in _originals:
        return MethodType(_originals[function.__func__], function.__self__)
    return _originals.get(function, function)


def patched(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is in the place of ``function`` now."""
    return next((now for now, before in _originals.items() if before == function), function)


def patch_for(cls: type[Any], find_mode: Callable[[], Any]) -> None:
    """Has torch ask objects of ``cls`` where it does not, and the mode that ``find_mode`` finds.

    ``torch.autograd.Function.apply`` and ``torch.as_tensor`` ask for ``__torch_function__``, and
    ``torch.jit.isinstance`` takes them for the tensors in their attribute ``local``. The mode, if
    there is one, runs ``Function.apply``, and what a checkpoint computes again in a backward pass,
    where it is not active any more.
    """
    apply = _asking_apply(cls, find_mode, Function.apply.__func__)  # type: ignore[attr-defined]
    _replace(Function, "apply", apply, classmethod)
    make_frame = _recomputing_in_mode(find_mode, _CheckpointFrame.__init__)
    _replace(_CheckpointFrame, "__init__", make_frame)
    _replace(torch, "as_tensor", _asking_as_tensor(cls, torch.as_tensor))
    _register_builtin(torch.as_tensor, "aten::as_tensor")  # as TorchScript knows it
    _replace(torch.jit, "isinstance", _judging_pieces(cls, torch.jit.isinstance))
    if _overridable:
        let_dynamo_override(())  # of what was patched after it was told


def apply_function(function: type[Function], *args: Any) -> Any:
    """What ``function.apply`` does where no Slab is given, in less time.

    Unless a transform of ``torch.func`` runs, it does not look at arguments in Python, of which
    there may be as many as a module has weights.
    """
    if is_dynamo_compiling() or peek_interpreter_stack() is not None:
        return function.apply(*args)
    return super(Function, function).apply(*args)  # type: ignore[misc]


def substitute(owner: Any, name: str, run: Callable[..., Any]) -> None:
    """Has ``run`` called with the function ``name`` of ``owner``, its arguments and keywords.

    A mode could do so too, and would cost every function of a pass.
    """
    function = getattr(owner, name)

    @wraps(function)
    def run_substitute(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        return run(function, args, kwargs)

    _replace(owner, name, run_substitute)
    _register_builtin(run_substitute, f"aten::{name}")


def _replace(
    owner: Any, name: str, function: Callable[..., Any], as_member: Callable[..., Any] | None = None
) -> None:
    _originals[function] = function.__wrapped__  # type: ignore[attr-defined]
    setattr(owner, name, as_member(function) if as_member else function)


def _asking_apply(
    cls: type[Any], find_mode: Callable[[], Any], apply: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(apply)
    def ask_or_apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, cls) and function.__name__ not in _GIVE_BACK:
                return _ask(arg, MethodType(apply, function), args, kwargs)
        mode = None if is_dynamo_compiling() else find_mode()
        if mode is not None and function.__name__ not in _GIVE_BACK:
            return mode.apply(MethodType(apply, function), args, kwargs)
        return apply(function, *args, **kwargs)

    return ask_or_apply


def _recomputing_in_mode(
    find_mode: Callable[[], Any], make: Callable[..., None]
) -> Callable[..., None]:
    @wraps(make)
    def make_frame(frame: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        mode = find_mode()
        make(frame, recompute if mode is None else mode.again(recompute), *args, **kwargs)

    return make_frame


def _asking_as_tensor(cls: type[Any], as_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(as_tensor)
    def ask_or_convert(data: Any, **kwargs: Any) -> Any:
        if isinstance(data, cls):
            return _ask(data, as_tensor, (data,), kwargs)
        return as_tensor(data, **kwargs)

    return ask_or_convert


def _ask(
    arg: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return type(arg).__torch_function__(function, (type(arg),), args, kwargs)


def _judging_pieces(cls: type[Any], judge: Callable[..., bool]) -> Callable[..., bool]:
    def piece_of(leaf: Any) -> Any:
        return leaf.local if isinstance(leaf, cls) else leaf

    @wraps(judge)
    def judge_pieces(obj: Any, *args: Any, **kwargs: Any) -> bool:
        if isinstance(obj, (cls, list, tuple, dict)):
            obj = tree_map(piece_of, obj, is_leaf=lambda leaf: isinstance(leaf, cls))
        return judge(obj, *args, **kwargs)

    return judge_pieces
