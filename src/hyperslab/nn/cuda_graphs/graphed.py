"""Passes of a module that are recorded in CUDA graphs, and replayed.

Where kernels are short, a GPU waits for the host, which launches one after the other. A graph
launches all of them at once. On several ranks it has the exchanges between them in it. A replay
sends the messages of an ordinary pass and is journaled like one, so ranks need not agree on who
records or replays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.fsdp import FSDPModule
from torch.jit import ScriptModule

from hyperslab.comm.mesh import Mesh
from hyperslab.nn.call_signature import call_signature
from hyperslab.nn.cuda_graphs.recorded_pass import ActivationMemory, Recorded, note_used
from hyperslab.nn.cuda_graphs.recorder import CudaRecorder
from hyperslab.nn.cuda_graphs.replayable import CannotReplayError, check_output, check_state
from hyperslab.nn.cuda_graphs.static_pass import Given, OutputNumbers, given_tensors
from hyperslab.nn.cuda_graphs.worth import CudaMeter, PassTrial
from hyperslab.nn.depth_first.depth_first import DepthFirst
from hyperslab.nn.dispatch import materialise
from hyperslab.nn.module_snapshot import ModuleSnapshot, TensorVersions
from hyperslab.nn.parallel.gradient_averaging import Replica
from hyperslab.nn.trial_run import HOOKS
from hyperslab.torch_private import (
    has_global_module_hooks,
    has_saved_tensor_hooks,
    is_forward_ad_active,
    is_parametrization_cached,
    is_traced,
    peek_interpreter_stack,
)

_log = logging.getLogger("hyperslab")

MAX_SIGNATURES = 8
"""Signatures of passes that are recorded; others run as without graphs."""

MOST_TRIES = 3
"""How often a recording is tried for which there is no memory."""

PASSES_BETWEEN = 50
"""How many passes lie between them: memory may be free again then."""


AUTO = "auto"
"""Passes are recorded where that is worth it; see ``worth``."""


def can_record(mesh: Mesh, level: int = logging.WARNING) -> bool:
    """Whether passes on ``mesh`` can be recorded; where a GPU could do it, a line says why not."""
    if mesh.device.type != "cuda":
        return False
    if mesh.grid.size("channel") > 1:
        if mesh.rank == 0:
            _log.warning(
                "passes run without CUDA graphs: weights are cut over channel=%d, and their "
                "gradients are not recorded",
                mesh.grid.size("channel"),
            )
        return False
    if mesh.backend is None or mesh.transport is not None:
        return True
    if mesh.rank == 0:
        _log.log(
            level,
            "passes run without CUDA graphs: ranks exchange by %s, which is not recorded; "
            'hyperslab.init(transport="device") is for ranks of one node',
            mesh.backend,
        )
    return False


@dataclass
class _Entry:
    """Passes of one signature, while the module is in one state."""

    snapshot: ModuleSnapshot
    recorded: Recorded | None = None
    used: OutputNumbers | None = None
    """Which outputs had gradients in the first backward pass."""
    tries: int = MOST_TRIES
    """How often it may still be tried to record them."""
    pause: int = 0
    """How many passes are to come before the next try."""
    trial: PassTrial | None = None
    """As long as it is not known whether it is worth it."""

    def may_record(self) -> bool:
        self.pause -= 1
        return self.tries > 0 and self.pause < 0

    def note_used(self, outputs: OutputNumbers) -> None:
        self.used = self.used or outputs


class Graphed:
    """The forward pass ``run`` of ``module``."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        mesh: Mesh,
        chains: Sequence[DepthFirst],
        recorder: CudaRecorder,
        replica: Replica | None = None,
        make_meter: Callable[[], CudaMeter] | None = None,
    ) -> None:
        """``replica`` averages the gradients of the module's weights, where there are any.

        With ``make_meter``, passes are recorded only where their costs say that it is worth it.
        """
        self._replica, self._make_meter = replica, make_meter
        self._level = logging.WARNING if make_meter is None else logging.INFO
        self._module, self._run, self._mesh, self._chains = module, run, mesh, chains
        self._name = type(module).__name__
        self._recorder, self._memory = recorder, ActivationMemory()
        self._entries: dict[object, list[_Entry]] = {}
        """By signature."""
        self._changes: list[str] = []
        """What passes have changed of the module, each the first of its signature."""
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self._run(*args, **kwargs)
        signature = self._signature(args, kwargs)
        if signature is None:
            return self._run(*args, **kwargs)
        materialise(self._run, ())  # or deferred operators would be computed in a graph
        entry = self._find(signature)
        if entry is None:
            return self._first(signature, args, kwargs)
        if entry.trial is not None and not self._is_decided(entry):
            return entry.trial.run(self._run, args, kwargs)
        if entry.tries > 0 and not self._is_occupied():
            if entry.recorded is None and entry.may_record():
                self._record(entry, (args, kwargs))
            if entry.recorded is not None:
                return entry.recorded((args, kwargs))
        return self._run(*args, **kwargs)

    def _find(self, signature: object) -> _Entry | None:
        found = self._entries.get(signature, ())
        return next((entry for entry in found if not entry.snapshot.change()), None)

    def _first(self, signature: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A first pass of its signature runs as ever: there may be no second one."""
        for entries in self._entries.values():
            entries[:] = [entry for entry in entries if not entry.snapshot.moved]
        alike = self._entries.get(signature, [])
        if len(self._changes) + sum(map(len, self._entries.values())) >= MAX_SIGNATURES:
            changes = [*self._changes, *(entry.snapshot.change() for entry in alike)]
            self._tell(f"there were {MAX_SIGNATURES} signatures of passes before", changes[-1:])
            return self._run(*args, **kwargs)
        snapshot = ModuleSnapshot(self._module, self._mesh.device)
        weights = TensorVersions(self._module.parameters())
        out = self._run(*args, **kwargs)
        written = "a weight has been written into" if weights.have_changed() else ""
        if change := snapshot.change() or written:
            self._changes.append(change)
            return out
        entry = _Entry(snapshot)
        self._entries[signature] = [*alike, entry]
        out = self._note_used(entry, out, (args, kwargs))
        if self._make_meter is None or not entry.tries:
            return out
        entry.trial = PassTrial(self._make_meter())
        return entry.trial.watched(out)

    def _is_decided(self, entry: _Entry) -> bool:
        """Whether it is known by now if passes are to be recorded."""
        assert entry.trial is not None
        objection = entry.trial.objection()
        if objection is None:
            return False
        entry.trial = None
        if objection:
            self._refuse(entry, CannotReplayError(objection))
        return True

    def _note_used(self, entry: _Entry, out: Any, given: Given) -> Any:
        """``out``, that tells which of its tensors get gradients, if it can be recorded at all."""
        inputs = given_tensors(given)
        try:
            check_state(entry.snapshot)
            check_output(out, self._mesh.device, [*inputs, *entry.snapshot.tensors])
        except CannotReplayError as error:
            self._refuse(entry, error)
            return out
        return note_used(out, entry.note_used)

    def _record(self, entry: _Entry, given: Given) -> None:
        try:
            self._check_parts(entry.snapshot.parts)
            entry.recorded = Recorded(
                self._run,
                self._module,
                self._mesh,
                self._recorder,
                self._memory,
                given,
                entry.used,
                averages=self._is_synced,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it runs without a graph
            if _is_out_of_memory(error):
                entry.tries, entry.pause = entry.tries - 1, PASSES_BETWEEN
                self._tell("the GPU ran out of memory when it was recorded")
            else:
                self._refuse(entry, error)

    def _refuse(self, entry: _Entry, error: Exception) -> None:
        entry.tries = 0
        self._tell(str(error).partition("\n")[0] or type(error).__name__)

    def _is_occupied(self) -> bool:
        if not self._memory.is_in_use:
            return False
        self._tell("the backward pass of an earlier one is yet to come")
        return True

    def _tell(self, why: str, since: Sequence[str] = ()) -> None:
        if why not in self._told:
            self._told.add(why)
            more = "".join(f", and since then {change}" for change in since)
            text = "a pass of %s runs without CUDA graphs: %s%s"
            _log.log(self._level, text, self._name, why, more)

    def _check_parts(self, parts: Sequence[nn.Module]) -> None:
        for part in parts:
            is_compiled = part.__dict__.get("_compiled_call_impl") or "_orig_mod" in part._modules
            if is_compiled or isinstance(part, ScriptModule | FSDPModule):
                raise CannotReplayError("a part of it is compiled, or its weights are sharded")
        for part in parts[1:]:
            if any(getattr(part, name, None) for name in HOOKS):
                raise CannotReplayError(f"its {type(part).__name__} has hooks")
        if any(chain.picked for chain in self._chains):
            raise CannotReplayError("a part of it is computed depth first")

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What passes depend on besides values and the module; None where none is recorded."""
        device = self._mesh.device
        if is_traced() or _is_observed() or _is_capturing(device):
            return None
        found = call_signature(args, kwargs, device)
        if found is None:
            self._tell(f"an argument is neither a tensor on {device} nor a number or a word")
            return None
        return found, self._is_synced

    @property
    def _is_synced(self) -> bool:
        """Whether gradients of weights are averaged in this pass, and not later."""
        return self._replica is not None and self._replica.is_synced


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what began it: a recording that cannot be ended has an error of its own."""
    while error is not None:
        if "out of memory" in str(error):
            return True
        error = error.__context__
    return False


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
