"""One call on Slabs against the same call in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isnan
from traceback import walk_tb
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import hyperslab as hs
from hyperslab.comm.failure_report import contact
from hyperslab.errors import CommError, HyperslabError, UnsupportedOp
from hyperslab.layout import Box, Cuts, Layout, Split
from hyperslab.nn.adopt import Adopted
from hyperslab.nn.slab import is_slab
from hyperslab.testing.sweep.arguments import AXIS, Cut, Placement, Sample
from hyperslab.testing.sweep.findings import REFUSED, RIGHT, WRONG
from hyperslab.torch_private import tree_flatten, tree_leaves

_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_COARSE = 0.02
_ADVICE = "hyperslab.gather(x)"
"""What a Slab says wherever it is not a tensor: asked for its truth, or for an attribute."""


@dataclass(frozen=True)
class Verdict:
    """What became of one call."""

    kind: str
    why: str = ""


@dataclass
class Run:
    """One call, made: what it returned or raised, and what it left in its arguments."""

    leaves: list[Tensor]
    """The tensors that the arguments were made of, all of them whole; gradients arrive here."""
    given: list[Any]
    """The arguments' tensors themselves, or the Slabs in their place."""
    out: Any = None
    error: Exception | None = None
    drew: bool = False
    """Whether it drew random numbers."""

    @property
    def outputs(self) -> list[Any]:
        return tree_leaves(self.out, is_leaf=is_slab)


@dataclass
class Serial:
    """The call in one process, by which all calls on Slabs are judged."""

    sample: Sample
    function: Callable[..., Any]
    with_grads: bool
    compared: bool
    wants: list[bool] = field(init=False)
    """Which tensors require gradients."""
    run: Run = field(init=False)
    coefficients: list[Tensor | None] = field(init=False)
    grads: list[Tensor | None] | None = field(init=False, default=None)
    """None where it cannot be differentiated."""

    def __post_init__(self) -> None:
        self.wants = [
            self.with_grads and (t.is_floating_point() or t.is_complex())
            for t in self.sample.tensors
        ]
        self.run = self._run_wanting(self.wants)
        if self.run.error is not None and any(self.wants):
            self._want_less()
        self.compared &= not self.run.drew
        self.coefficients = [_coefficient(out) for out in self.run.outputs]
        if self.compared and any(self.wants) and any(c is not None for c in self.coefficients):
            # Some operators give outputs whose gradients do not exist.
            with suppress(RuntimeError, IndexError, NotImplementedError):
                _loss(self.run.outputs, self.coefficients).backward()
                self.grads = [leaf.grad for leaf in self.run.leaves]

    def _run_wanting(self, wants: list[bool]) -> Run:
        return _run(self.function, self.sample, lambda tensors: tensors, wants)

    def _want_less(self) -> None:
        """Leaves out those gradients that the operator refuses, as those of running means."""
        alone = [[i == j for j in range(len(self.wants))] for i in range(len(self.wants))]
        fine = [
            want and self._run_wanting(only).error is None
            for want, only in zip(self.wants, alone, strict=True)
        ]
        run = self._run_wanting(fine)
        if run.error is None:
            self.run, self.wants = run, fine


def judge(serial: Serial, placement: Placement, mesh: hs.Mesh) -> Verdict:
    """Whether the call with its tensors placed so gives what it gives in one process.

    Collective over the mesh: every rank makes the same trials in the same order.
    """

    def place(tensors: list[Tensor]) -> list[Any]:
        pairs = zip(tensors, placement.cuts, strict=True)
        return [t if cut is None else _slab(t, cut, mesh) for t, cut in pairs]

    ours = _run(serial.function, serial.sample, place, serial.wants)
    verdict = _judge_ending(ours, serial.run) or _judge_values(ours, serial)
    verdict = _together(verdict, mesh, _drawn(ours) if serial.run.drew else None)
    if verdict is None and serial.grads is not None:
        verdict = _judge_grads(ours, serial, mesh)
    return verdict or Verdict(RIGHT)


def _run(
    function: Callable[..., Any],
    sample: Sample,
    place: Callable[[list[Tensor]], list[Any]],
    wants: Sequence[bool],
) -> Run:
    pairs = zip(sample.tensors, wants, strict=True)
    leaves = [tensor.detach().clone().requires_grad_(want) for tensor, want in pairs]
    # An operator may write into its arguments, which leaves do not allow.
    given = place([leaf.clone() for leaf in leaves])
    args, kwargs = sample.with_tensors(given)
    run = Run(leaves, given)
    torch.default_generator.manual_seed(0)
    before = torch.get_rng_state()
    try:
        run.out = function(*args, **kwargs)
    except Exception as error:
        if _is_lost(error):
            raise
        run.error = error
    run.drew = not torch.equal(before, torch.get_rng_state())
    return run


def _is_lost(error: Exception) -> bool:
    """Whether the ranks are no longer in step, and nothing they do together can be trusted."""
    return isinstance(error, CommError) and "lost contact" in str(error)


def _slab(tensor: Tensor, cut: Cut, mesh: hs.Mesh) -> hs.Slab:
    """The Slab of ``tensor``; its gradient arrives at the whole tensor, rank by rank."""
    layout = Layout.unsplit(tensor.shape)
    if cut.dim is not None:
        layout = layout.with_dim(cut.dim, tensor.shape[cut.dim], Split(AXIS, Cuts(cut.bounds)))
    return hs.Slab(_part(tensor, layout, mesh).clone(), layout, mesh)


def _part(tensor: Tensor, layout: Layout, mesh: hs.Mesh) -> Tensor:
    """What this rank holds of ``tensor`` under ``layout``."""
    return tensor[layout.box(mesh.coords).slices_in(Box.whole(layout.shape))]


def _judge_ending(ours: Run, serial: Run) -> Verdict | None:
    """The verdict, if a call raised."""
    mine, theirs = ours.error, serial.error
    if isinstance(mine, UnsupportedOp) or (mine is not None and _ADVICE in str(mine)):
        return Verdict(REFUSED, _reason(mine))
    if mine is not None and not _is_ours(mine):
        return Verdict(REFUSED, "torch or Python itself refuses what is no tensor")
    if mine is None and theirs is None:
        return None
    if mine is not None and theirs is not None and _is_like(mine, theirs):
        return Verdict(RIGHT)
    return Verdict(WRONG, f"{_shown(mine)}, but one process {_shown(theirs)}")


def _is_like(mine: Exception, theirs: Exception) -> bool:
    return isinstance(mine, HyperslabError | type(theirs)) or isinstance(theirs, type(mine))


def _is_ours(error: Exception) -> bool:
    """Whether it came up in a rule, or in what a rule called, and not before."""
    names = {frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)}
    return any(n.startswith("hyperslab.") and not n.startswith(__package__) for n in names)


def _shown(error: Exception | None) -> str:
    if error is None:
        return "returns"
    return f"raises {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


def _reason(error: Exception) -> str:
    """Why it was refused, without the function, the shape and what to do."""
    told = re.split(r"[.:] (?:Call )?hyperslab\.gather", str(error))[0]
    _, _, why = told.partition(": ")
    return why or told


def _judge_values(ours: Run, serial: Serial) -> Verdict | None:
    """Whether what it returned and what it wrote are as they should be, on this rank."""
    mine, my_form = tree_flatten(ours.out, is_leaf=is_slab)
    theirs, their_form = tree_flatten(serial.run.out)
    if my_form != their_form:
        return Verdict(WRONG, f"returns {_kind(ours.out)}, but one process {_kind(serial.run.out)}")
    values = serial.compared
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if why := _unlike_form(a, b, values) or _unlike_part(a, b, values):
            return Verdict(WRONG, f"output {number}: {why}")
    for number, (a, b) in enumerate(zip(ours.given, serial.run.given, strict=True)):
        # A plain argument that has become the result refuses to be looked at.
        if not isinstance(a, Adopted) and (why := _unlike_part(a, b, values)):
            return Verdict(WRONG, f"argument {number} after the call: {why}")
    return None


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _unlike_form(mine: Any, theirs: Any, compared: bool) -> str:
    """How the types, shapes and dtypes of two outputs differ, or the outputs if not tensors."""
    if not isinstance(mine, hs.Slab) and type(mine) is not type(theirs):
        return f"{mine!r:.60} instead of {theirs!r:.60}"
    if isinstance(theirs, Tensor):
        for what in ("shape", "dtype", "requires_grad"):
            if getattr(mine, what) != getattr(theirs, what):
                return f"{what} {getattr(mine, what)} instead of {getattr(theirs, what)}"
        return ""
    if isinstance(mine, hs.Slab) or (compared and not _same_object(mine, theirs)):
        return f"{mine!r:.60} instead of {theirs!r:.60}"
    return ""


def _same_object(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, float) and isnan(theirs):
        return isnan(mine)
    if isinstance(theirs, float | complex):
        return abs(mine - theirs) < 1e-9 or bool(mine == theirs)
    comparable = "__eq__" in vars(type(theirs))
    return not comparable or bool(np.all(mine == theirs))


def _unlike_part(mine: Any, theirs: Any, compared: bool) -> str:
    """How a tensor's part on this rank differs from that of one process."""
    if not isinstance(theirs, Tensor):
        return ""
    if isinstance(mine, hs.Slab):
        if tuple(mine.local.shape) != mine.box.shape:
            return f"a piece of shape {tuple(mine.local.shape)} for a box of {mine.box.shape}"
        if mine.layout.shape != theirs.shape:
            return f"shape {mine.layout.shape} instead of {tuple(theirs.shape)}"
        if mine.layout.split_dims:
            theirs = _part(theirs.detach(), mine.layout, mine.mesh)
        mine = mine.local
    return _unlike(mine.detach(), theirs.detach()) if compared else ""


def _unlike(mine: Tensor, theirs: Tensor) -> str:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
    mine, theirs = _dense(mine), _dense(theirs)
    if not (mine.is_floating_point() or mine.is_complex()):
        same = torch.equal(mine, theirs)
        return "" if same else f"{mine.tolist()!s:.80} for {theirs.tolist()!s:.80}"
    tolerance = _TOLERANCES.get(theirs.dtype, _COARSE)
    wide = torch.complex128 if mine.is_complex() else torch.float64
    mine, theirs = mine.to(wide), theirs.to(wide)
    if torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{mine.flatten()[:4].tolist()} for {theirs.flatten()[:4].tolist()}"


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _drawn(ours: Run) -> Any:
    """What must be equal on all ranks after random numbers were drawn."""
    whole = [
        out.local if is_slab(out) else out
        for out in ours.outputs
        if isinstance(out, Tensor) or (is_slab(out) and not out.layout.split_dims)
    ]
    return [t.tolist() for t in whole], torch.get_rng_state().sum().item()


def _judge_grads(ours: Run, serial: Serial, mesh: hs.Mesh) -> Verdict | None:
    """Runs the backward pass and compares the gradients of all inputs. Collective."""
    why = ""
    try:
        _loss(ours.outputs, serial.coefficients).backward()
    except Exception as error:
        if _is_lost(error):
            raise
        why = f"the backward pass {_shown(error)}"
    assert serial.grads is not None
    due = [
        (number, ours.leaves[number].grad, grad)
        for number, grad in enumerate(serial.grads)
        if grad is not None and grad.layout is torch.strided
    ]
    for number, mine, theirs in due:
        if not why and mine is None and theirs.numel():
            why = f"no gradient of input {number}"
    grads = [torch.zeros_like(theirs) if mine is None else mine for _, mine, theirs in due]
    averaged = _averaged(grads, mesh)
    for (number, _, theirs), mine in zip(due, averaged, strict=True):
        if not why and (unlike := _unlike(mine, theirs)):
            why = f"gradient of input {number}: {unlike}"
    return Verdict(WRONG, why) if why else None


def _averaged(grads: list[Tensor], mesh: hs.Mesh) -> list[Tensor]:
    """Each rank has the gradient of its own loss: those of pieces add up, those of weights too."""
    flat = [torch.view_as_real(g).flatten() if g.is_complex() else g.flatten() for g in grads]
    total = torch.cat([torch.zeros(0), *flat]).double()
    with contact("comparing gradients", mesh):
        dist.all_reduce(total, group=mesh.group)
    parts = total.div_(mesh.num_ranks).split([f.numel() for f in flat])
    return [
        (torch.view_as_complex(p.view(*g.shape, 2)) if g.is_complex() else p.view(g.shape)).to(g)
        for p, g in zip(parts, grads, strict=True)
    ]


def _coefficient(out: Any) -> Tensor | None:
    """The random weights of an output in the loss, if it has a gradient."""
    if not isinstance(out, Tensor) or not out.requires_grad or out.layout is not torch.strided:
        return None
    generator = torch.Generator().manual_seed(out.numel())
    return torch.rand(out.shape, generator=generator, dtype=torch.float64).sub(0.3).to(out.dtype)


def _loss(outputs: Sequence[Any], coefficients: Sequence[Tensor | None]) -> Tensor:
    """A rank's part of the loss, times the number of ranks that share it.

    So the sum over ranks is that of equal losses, as the gradients of Slabs are meant.
    """
    terms = []
    for out, coefficient in zip(outputs, coefficients, strict=True):
        if coefficient is None:
            continue
        if isinstance(out, hs.Slab):
            share = out.mesh.num_ranks if out.layout.split_dims else 1
            term = (out.local * _part(coefficient, out.layout, out.mesh)).sum() * share
        else:
            term = (out * coefficient).sum()
        terms.append((term.real if term.is_complex() else term).double())
    return torch.stack(terms).sum()


def _together(verdict: Verdict | None, mesh: hs.Mesh, value: object) -> Verdict | None:
    """``verdict``, if all ranks come to the same one with the same ``value``; else it is wrong."""
    mine = crc32(repr((verdict and verdict.kind, value)).encode())
    ends = torch.tensor([mine, -mine])
    with contact("comparing outcomes", mesh):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.group)
    if ends[0] == -ends[1] or (verdict and verdict.kind == WRONG):
        return verdict
    outcome = f"{verdict.kind}: {verdict.why}" if verdict else "returns"
    return Verdict(WRONG, f"ranks differ; one {outcome} {'' if value is None else value!r:.80}")
