"""Passes of a module on one GPU that are recorded in CUDA graphs, and replayed.

Where kernels are short, a GPU waits for the host, which launches one after the other. A graph
launches all of them at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.fsdp import FSDPModule
from torch.jit import ScriptModule
from torch.nn import Parameter

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import ConfigError
from hyperslab.nn.cuda_graphs.module_state import PLAIN, ModuleState, version_of
from hyperslab.nn.cuda_graphs.own_pass import Given, Places, tensors_in
from hyperslab.nn.cuda_graphs.recorded_pass import Recorded, Turn, note_used
from hyperslab.nn.cuda_graphs.recorder import Recorder
from hyperslab.nn.cuda_graphs.replayable import CannotReplayError, check_output, check_state
from hyperslab.nn.depth_first.depth_first import DepthFirst
from hyperslab.nn.dispatch import settle
from hyperslab.nn.op import num_registered
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.nn.trial_run import HOOKS
from hyperslab.torch_private import (
    has_global_module_hooks,
    has_saved_tensor_hooks,
    is_forward_ad_active,
    is_parametrization_cached,
    is_traced,
    num_function_modes,
    peek_interpreter_stack,
    tree_flatten,
    tree_leaves,
)

_log = logging.getLogger("hyperslab")

MOST_KINDS = 8
"""Kinds of passes that are recorded; others run as without graphs."""

MOST_TRIES = 3
"""How often a recording is tried for which there is no memory."""

PASSES_BETWEEN = 50
"""How many passes lie between them: memory may be free again then."""


def check_graphs(mesh: Mesh) -> None:
    if mesh.backend is not None:
        raise ConfigError(
            f"cuda_graphs=True is for one rank on a GPU, and the mesh has {mesh.num_ranks}: leave "
            "it out, as messages between ranks are not recorded"
        )


@dataclass
class _Kind:
    """Passes on arguments of one kind, while the module is in one state."""

    state: ModuleState
    recorded: Recorded | None = None
    used: Places | None = None
    """Which outputs had gradients in the first backward pass."""
    tries: int = MOST_TRIES
    """How often it may still be tried to record them."""
    pause: int = 0
    """How many passes are to come before the next try."""

    def may_record(self) -> bool:
        self.pause -= 1
        return self.tries > 0 and self.pause < 0

    def note_used(self, places: Places) -> None:
        self.used = self.used or places


class Graphed:
    """The forward pass ``run`` of ``module``, on a mesh of one rank."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        mesh: Mesh,
        chains: Sequence[DepthFirst],
        recorder: Recorder,
    ) -> None:
        self._module, self._run, self._mesh, self._chains = module, run, mesh, chains
        self._name = type(module).__name__
        self._recorder, self._turn = recorder, Turn()
        self._kinds: dict[object, list[_Kind]] = {}
        self._changes: list[str] = []
        """What passes have changed of the module, each the first of its kind."""
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._run(*args, **kwargs)
        key = self._key(args, kwargs)
        if key is None:
            return self._run(*args, **kwargs)
        settle(self._run, ())  # or what waits would be computed in a graph
        kind = self._find(key)
        if kind is None:
            return self._first(key, args, kwargs)
        if kind.tries > 0 and not self._is_occupied():
            if kind.recorded is None and kind.may_record():
                self._record(kind, (args, kwargs))
            if kind.recorded is not None:
                return kind.recorded((args, kwargs))
        return self._run(*args, **kwargs)

    def _find(self, key: object) -> _Kind | None:
        return next((k for k in self._kinds.get(key, ()) if not k.state.change()), None)

    def _first(self, key: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A first pass of its kind runs as ever: there may be no second one."""
        for kinds in self._kinds.values():
            kinds[:] = [kind for kind in kinds if not kind.state.moved]
        like = self._kinds.get(key, [])
        if len(self._changes) + sum(map(len, self._kinds.values())) >= MOST_KINDS:
            changes = [*self._changes, *(kind.state.change() for kind in like)]
            self._tell(f"there were {MOST_KINDS} kinds of passes before", changes[-1:])
            return self._run(*args, **kwargs)
        state, versions = ModuleState(self._module, self._mesh.device), self._versions()
        out = self._run(*args, **kwargs)
        written = "" if versions == self._versions() else "a weight has been written into"
        if change := state.change() or written:
            self._changes.append(change)
            return out
        kind = _Kind(state)
        self._kinds[key] = [*like, kind]
        return self._note_used(kind, out, (args, kwargs))

    def _note_used(self, kind: _Kind, out: Any, given: Given) -> Any:
        """``out``, that tells which of its tensors get gradients, if it can be recorded at all."""
        inputs = tensors_in(tree_leaves(given, is_leaf=is_slab))
        try:
            check_state(kind.state)
            check_output(out, self._mesh.device, [*inputs, *kind.state.tensors])
        except CannotReplayError as error:
            self._refuse(kind, error)
            return out
        return note_used(out, kind.note_used)

    def _versions(self) -> list[int]:
        return [version_of(weight) for weight in self._module.parameters()]

    def _record(self, kind: _Kind, given: Given) -> None:
        try:
            self._check_parts(kind.state.parts)
            kind.recorded = Recorded(
                self._run, self._module, self._recorder, self._turn, given, kind.used
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it runs without a graph
            if "out of memory" in str(error):
                kind.tries, kind.pause = kind.tries - 1, PASSES_BETWEEN
                self._tell("the GPU ran out of memory when it was recorded")
            else:
                self._refuse(kind, error)

    def _refuse(self, kind: _Kind, error: Exception) -> None:
        kind.tries = 0
        self._tell(str(error).partition("\n")[0] or type(error).__name__)

    def _is_occupied(self) -> bool:
        if not self._turn.is_taken:
            return False
        self._tell("the backward pass of an earlier one is yet to come")
        return True

    def _tell(self, why: str, since: Sequence[str] = ()) -> None:
        if why not in self._told:
            self._told.add(why)
            more = "".join(f", and since then {change}" for change in since)
            _log.warning("a pass of %s runs without CUDA graphs: %s%s", self._name, why, more)

    def _check_parts(self, parts: Sequence[nn.Module]) -> None:
        for part in parts:
            is_compiled = part._compiled_call_impl or "_orig_mod" in part._modules
            if is_compiled or isinstance(part, ScriptModule | FSDPModule):
                raise CannotReplayError("a part of it is compiled, or its weights are sharded")
        for part in parts[1:]:
            if any(getattr(part, name, None) for name in HOOKS):
                raise CannotReplayError(f"its {type(part).__name__} has hooks")
        if any(chain.picked for chain in self._chains):
            raise CannotReplayError("a part of it is computed depth first")

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What passes depend on besides values and the module; None where none is recorded."""
        device = self._mesh.device
        if is_traced() or _is_observed() or _is_capturing(device):
            return None
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_slab)
        kinds = tuple([_kind_of(leaf, device) for leaf in leaves])
        if None in kinds or not any(isinstance(leaf, Slab | Tensor) for leaf in leaves):
            self._tell(f"an argument is neither a tensor on {device} nor a number or a word")
            return None
        casts = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return kinds, spec, casts, grads, _settings(), num_registered()


def _kind_of(leaf: Any, device: torch.device) -> object:
    """What passes depend on besides values; None where they may depend on more."""
    if type(leaf) in PLAIN:
        return type(leaf), leaf
    layout, tensor = (leaf.layout, leaf.local) if isinstance(leaf, Slab) else (None, leaf)
    if type(tensor) not in (Tensor, Parameter) or tensor.device != device:
        return None
    if tensor.layout != torch.strided:
        return None
    return layout, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_observed() -> bool:
    """Whether somebody wants to see what a pass does."""
    return (
        has_global_module_hooks()
        or torch.is_anomaly_enabled()
        or has_saved_tensor_hooks()
        or peek_interpreter_stack() is not None
        or is_forward_ad_active()
        or is_parametrization_cached()
    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _settings() -> tuple[object, ...]:
    backends: Any = torch.backends
    return (
        backends.cudnn.conv.fp32_precision,
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        num_function_modes(),  # that of a default device among them
    )
