"""Random networks on random meshes against one process."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from fuzzing.random_net import (
    RandomNet,
    random_channel_axes,
    random_place,
    random_plan,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

import hyperslab as hs
from hyperslab.testing import RankError, Team, seeded
from hyperslab.testing.strategies import Place

TOLERANCE = 1e-8
ATTEMPT_STEP = 10_000_019
"""From the seed of a network that was drawn and not taken to that of the next."""


class Outcome(NamedTuple):
    """What came of one network: ``right``, ``refused`` or ``wrong``, and why."""

    seed: int
    verdict: str
    reason: str = ""


def stress(
    seeds: range,
    *,
    check: Callable[[int, str], str] | None = None,
    device: str = "cpu",
    timeout_seconds: float = 300.0,
) -> Iterator[Outcome]:
    """Runs ``check`` on the ranks that the network of each seed wants, by default a step of it.

    ``check`` takes the seed and the device, compares with one process, and raises unless all is
    right; it returns words if the network is refused.
    """
    with ExitStack() as stack:

        @functools.cache
        def team_of(num_ranks: int) -> Team:
            return stack.enter_context(Team(num_ranks, timeout_seconds=timeout_seconds))

        for seed in seeds:
            yield try_seed(seed, team_of, check or check_network, device)


def try_seed(
    seed: int,
    team_of: Callable[[int], Team],
    check: Callable[[int, str], str],
    device: str = "cpu",
) -> Outcome:
    """What came of ``check`` on ranks of ``team_of(their number)``."""
    num_ranks = random_place(seed, draw_network(seed).sample.shape).num_ranks
    try:
        refusals = team_of(num_ranks).run(check, seed, device)
    except RankError as error:
        return Outcome(seed, "wrong", str(error))
    refused = next(filter(None, refusals), "")
    return Outcome(seed, "refused" if refused else "right", refused)


def draw_network(seed: int) -> RandomNet:
    """A network that rounding does not upset.

    In some, a maximum is taken over rounding errors, such as the mean of a normalized tensor: what
    its gradient is then, is up to chance in one process too. Those are drawn again.
    """
    nets = (RandomNet(seed + attempt * ATTEMPT_STEP) for attempt in itertools.count())
    return next(net for net in nets if _is_stable(net))


def _is_stable(net: RandomNet) -> bool:
    """Whether a change of input and weights in the last digits changes all gradients as little."""
    grads = []
    for change in (-1e-13, 1e-13):
        twin = copy.deepcopy(net)
        leaves = [net.sample.clone().requires_grad_(), *twin.parameters()]
        with torch.no_grad():
            for leaf in leaves:
                leaf.add_(seeded(*leaf.shape), alpha=change)
        loss_of(twin(leaves[0])).backward()
        grads.append([leaf.grad for leaf in leaves])
    pairs = [(a, b) for a, b in zip(*grads, strict=True) if a is not None and b is not None]
    return all(torch.allclose(a, b, rtol=TOLERANCE / 10, atol=TOLERANCE / 10) for a, b in pairs)


def check_network(
    seed: int, device: str, compiled: bool = False, cuts_channels: bool = False
) -> str:
    """Raises unless the network gives the numbers of one process; the words if it is refused.

    Where it ``cuts_channels``, on a mesh that does, with another cut for some of its parts.
    """
    net = draw_network(seed)
    place, plan = random_place(seed, net.sample.shape), None
    if cuts_channels:
        num, shape = place.num_ranks, net.sample.shape
        place = Place(random_channel_axes(seed, num, shape))
        plan = random_plan(seed, net, num, shape)
    mesh = place.mesh(device)
    plain, ours = net.to(mesh.device), copy.deepcopy(net)
    x, given = (net.sample.to(mesh.device, copy=True).requires_grad_() for _ in range(2))
    loss = loss_of(plain(x))
    loss.backward()
    if any(p.requires_grad for p in ours.parameters()):
        ours = hs.parallelize(ours, mesh, plan=plan)
    model: Any = ours
    if compiled:
        torch.compiler.reset()
        model = torch.compile(ours, fullgraph=True, backend="aot_eager")
    try:
        our_loss = loss_of(model(hs.shard(given, mesh, cuts=place.cuts)))
    except hs.UnsupportedOp as refusal:
        return str(refusal)
    except hs.LayoutError as error:  # of a plan with more ranks than indices
        if plan and "cannot split" in str(error):
            return str(error)
        raise
    our_loss.backward()
    close(our_loss, loss, "loss", seed, net)
    close(given.grad, x.grad, "gradient of the input", seed, net)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        close(_whole(mine.grad), theirs.grad, f"gradient of {name}", seed, net)
    for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        close(_whole(buffer), other, name, seed, net)
    return ""


def _whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_compiled(seed: int, device: str) -> str:
    """``check_network`` as one graph without breaks."""
    return check_network(seed, device, compiled=True)


def check_channels(seed: int, device: str) -> str:
    """``check_network`` on a mesh that cuts channels, with a plan."""
    return check_network(seed, device, cuts_channels=True)


def loss_of(outputs: tuple[Any, ...]) -> Any:
    parts = [
        (out * seeded(*out.shape, seed=n).to(out.device)).sum() for n, out in enumerate(outputs)
    ]
    return torch.stack([part / 10 for part in parts]).sum()


def close(ours: Tensor | None, theirs: Tensor | None, what: str, seed: int, net: RandomNet) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, f"seed {seed}: {what} is {ours}, not {theirs}\n{net.describe()}"
        return
    size = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(
        ours.detach() / size,
        theirs.detach() / size,
        rtol=0,
        atol=TOLERANCE,
        check_dtype=False,
        equal_nan=True,
        msg=lambda text: f"seed {seed}: {what}: {text}\n{net.describe()}",
    )
