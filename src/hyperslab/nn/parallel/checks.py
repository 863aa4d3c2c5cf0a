"""What is checked of a module and its passes, so that mistakes are told early and by name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.parameter import is_lazy

from hyperslab.comm.agree import Comparison, post_comparison
from hyperslab.comm.journal import journal
from hyperslab.comm.mesh import Mesh, with_first_mesh
from hyperslab.errors import ConfigError, HyperslabError, UnsupportedOp
from hyperslab.nn.plain_random import note_draws, random_state
from hyperslab.nn.slab import Slab, is_slab
from hyperslab.torch_private import tree_leaves


def check_tensors(module: nn.Module) -> None:
    """Raises unless weights and buffers have shapes."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of a lazy module has no shape yet: run the module once on a small plain "
                "tensor, on every rank alike, before parallelize"
            )


def check_layers(module: nn.Module, mesh: Mesh) -> None:
    """Raises where a layer would talk to other ranks by itself."""
    if mesh.num_ranks == 1:
        return
    for name, layer in module.named_modules():
        if layer.training and isinstance(layer, nn.SyncBatchNorm):
            raise ConfigError(
                f"{name or 'the module'} is a SyncBatchNorm, which cannot run on split tensors: "
                "use BatchNorm, whose statistics are those of the global batch on any mesh"
            )


class BackwardHooks:
    """Those of ``module`` and its parts, registered now or at any time before a pass.

    On one rank only the module itself is given Slabs.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._hooks = [
            (name, part.__dict__[table])
            for name, part in module.named_modules()
            if mesh.num_ranks > 1 or not name
            for table in ("_backward_hooks", "_backward_pre_hooks")
            if mesh.rank == 0 and part.__dict__.get(table) is not None
        ]
        self.tables = [table for _, table in self._hooks]
        """Where they are registered."""

    def warn(self, given: object = None) -> None:
        """Warns, once and on rank 0, if there are any and there is a Slab in what a pass is given.

        Without ``given``, of passes to come.
        """
        if not any(self.tables):
            return
        if given is not None and not any(map(is_slab, tree_leaves(given, is_leaf=is_slab))):
            return
        hooked = dict.fromkeys(name or "the module itself" for name, table in self._hooks if table)
        self._hooks, self.tables = [], []
        warnings.warn(
            f"full backward hooks do not fire on Slabs: those of {', '.join(hooked)} will not; "
            "hook the tensors themselves, x.local.register_hook, in a forward hook",
            stacklevel=3,
        )


@dataclass
class Comparisons:
    """The comparisons of a module's forward passes.

    They travel while the backward pass runs and are waited for at its end, or by the next forward
    pass; at once where there will be no backward pass.
    """

    mesh: Mesh
    _pending: list[Comparison] = field(default_factory=list)
    _begun: int = 0
    """How many operators had been run when a forward pass began."""
    _compared: int | None = None
    """How many have been compared."""
    _random_state: bytes = b""
    """When the forward pass began."""

    def begin(self) -> None:
        """Says that a forward pass begins."""
        self._begun = journal.count
        if self.mesh.num_ranks > 1:
            self._random_state = random_state(self.mesh)

    @property
    def is_on_slabs(self) -> bool:
        """Whether the forward pass that began last has run operators on Slabs."""
        return journal.count != self._begun

    def post(self) -> None:
        """Begins to compare what was run since the last comparison, losses included.

        Collective over all ranks. One rank may run a module by itself on a plain tensor: nothing
        is compared then.
        """
        if self.mesh.num_ranks == 1 or not self.is_on_slabs:
            return
        note_draws(self._random_state, self.mesh)
        entries = journal.since(self._begun if self._compared is None else self._compared)
        self._compared = journal.count
        self.wait()
        self._pending.append(post_comparison(entries, self.mesh))
        if not torch.is_grad_enabled():
            self.wait()

    def wait(self) -> None:
        """Raises if ranks ran different operators. Collective over all ranks."""
        while self._pending:
            self._pending.pop().wait()


def add_module_path(error: Exception, module: nn.Module) -> None:
    """Adds to ``error``, which came out of ``module``, the name of the innermost part it came from.

    It is found in the error's traceback, so that modules need no hooks.
    """
    names = {id(part): name for name, part in module.named_modules()}
    innermost, trace = module, error.__traceback__
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module) and id(part) in names:
            innermost = part
        trace = trace.tb_next
    name = names[id(innermost)] or "the outermost module"
    where = f"in {name}, a {type(innermost).__name__.removeprefix('Parallel')}"
    if isinstance(error, HyperslabError) and error.args:
        error.args = (f"{error.args[0]} ({where})", *error.args[1:])
    else:
        error.add_note(where)


def plain_buffer(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """The whole tensor in place of a Slab that becomes the buffer ``name``.

    So that a ``state_dict`` has plain tensors. Raises where the Slab is split.
    """
    if not isinstance(value, Slab):
        return None
    if value.layout.split_dims:
        raise UnsupportedOp(
            f"the buffer {name} of {type(module).__name__} cannot hold a tensor of "
            f"{value.layout.describe()}, of which every rank has another piece: give it "
            "hyperslab.gather(x), the whole on every rank"
        )
    return value.local


with_first_mesh(partial(register_module_buffer_registration_hook, plain_buffer))  # type: ignore[arg-type]
