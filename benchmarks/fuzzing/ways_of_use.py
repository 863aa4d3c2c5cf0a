"""Random networks, used in random ways, on random meshes against one process.

A way is how a user's program goes about a network: by which names it takes gradients, who looks at
them on their way, in which order passes run, in which thread, and from which class.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from fuzzing.networks import close, draw_network, loss_of
from fuzzing.random_net import RandomNet, random_place
from torch import Tensor, nn
from torch._functorch import config
from torch.autograd import Function, grad
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import hyperslab as hs


class User(NamedTuple):
    """What one program has: the same on ranks and in one process but for ``enter``."""

    rng: random.Random
    model: Any
    enter: Callable[[Tensor], Any]
    input: Tensor
    seen: dict[str, list[Tensor | None]]
    """By who saw it: which of two weights comes first is up to chance."""

    def see(self, who: str, grad: Tensor | None) -> None:
        self.seen.setdefault(who, []).append(None if grad is None else grad.clone())

    def name_of(self, weight: Tensor) -> str:
        names: dict[int, str] = {id(each): name for name, each in self.model.named_parameters()}
        return names[id(weight)]

    @property
    def weights(self) -> list[Tensor]:
        return [*self.model.parameters()]

    def some_weights(self) -> list[Tensor]:
        weights = [weight for weight in self.weights if weight.requires_grad]
        return self.rng.sample(weights, self.rng.randint(1, len(weights)))

    def loss(self, scale: float = 1.0) -> Any:
        runs = [*[self.model] * 6, *[self._checkpointed] * 3, self._compiled]
        run = self.rng.choice(runs)
        outputs = run(self.enter(self.input * scale))
        if self.rng.random() < 0.4:
            factor = self.rng.choice(_VIEWS)(self, self.rng.choice(self.some_weights()))
            outputs = (outputs[0] * factor.sum().tanh(), *outputs[1:])
        return loss_of(outputs)

    def _checkpointed(self, x: Any) -> Any:
        return checkpoint(self.model, x, use_reentrant=False)

    def _compiled(self, x: Any) -> Any:
        """By ``torch.compile``; one process, with which it is compared, does as it always does."""
        if not self.is_parallel:
            return self.model(x)
        compiled: Any = torch.compile(self.model, backend="aot_eager")
        return compiled(x)

    @property
    def is_parallel(self) -> bool:
        return not isinstance(self.enter, nn.Module)


def use(
    seed: int, model: Any, enter: Callable[[Tensor], Any], input: Tensor
) -> dict[str, list[Tensor | None]]:
    """All gradients that a program sees that uses ``model`` in the way of ``seed``, by who sees."""
    user = User(random.Random(f"way {seed}"), model, enter, input.requires_grad_(), {})
    for weight in user.weights[1:]:
        if user.rng.random() < 0.3:
            user.rng.choice(_LOOKERS)(user, weight)
    for _ in range(user.rng.randint(1, 3)):
        act = user.rng.choice(_ACTS)
        if user.rng.random() < 0.2:
            _in_a_thread(act, user)
        else:
            _run(act, user)
    user.see("the input", user.input.grad)
    for name, weight in user.model.named_parameters():
        user.see(f"grad of {name}", weight.grad)
    return user.seen


def _run(act: Callable[[User], None], user: User) -> None:
    # As torch wants it where a compiled graph is passed back twice; a setting of each thread.
    with config.patch(donated_buffer=False):
        act(user)


def _in_a_thread(act: Callable[[User], None], user: User) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _run(act, user)
        except BaseException as error:  # noqa: BLE001 - told by who waits
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def _freeze(user: User, weight: Tensor) -> None:
    weight.requires_grad_(False)


def _look(user: User, weight: Tensor) -> None:
    name = user.name_of(weight)
    weight.register_hook(lambda grad: user.see(f"hook of {name}", grad))


def _clip(user: User, weight: Tensor) -> None:
    weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


def _look_when_added(user: User, weight: Tensor) -> None:
    name = user.name_of(weight)

    def look(weight: Tensor) -> None:
        user.see(f"hook behind {name}", weight.grad)

    weight.register_post_accumulate_grad_hook(look)


def _use_up(user: User, weight: Tensor) -> None:
    name = user.name_of(weight)

    def step(weight: Tensor) -> None:
        user.see(f"step of {name}", weight.grad)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(step)


def _look_at_node(user: User, weight: Tensor) -> None:
    node: Any = get_gradient_edge(weight).node
    name = user.name_of(weight)

    def look(grads: tuple[Tensor | None, ...]) -> None:
        for each in grads:
            user.see(f"node of {name}", each)

    node.register_prehook(look)
    weight._kept_node = node  # type: ignore[attr-defined]  # a hook lives as long as its node


_LOOKERS = [_freeze, _look, _clip, _look_when_added, _use_up, _look_at_node]


class _Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


def _retained(user: User, weight: Tensor) -> Tensor:
    view, name = weight.view(-1), user.name_of(weight)
    view.register_hook(lambda grad: user.see(f"view of {name}", grad))
    return view


def _expanded(user: User, weight: Tensor) -> Tensor:
    return weight.expand(2, *weight.shape)


def _unbound(user: User, weight: Tensor) -> Tensor:
    return torch.stack(weight.unbind(0)[::-1]) * 0.5


def _by_function(user: User, weight: Tensor) -> Tensor:
    clipped: Tensor = _Clipped.apply(weight)  # type: ignore[no-untyped-call]
    return clipped


_VIEWS = [_retained, _expanded, _unbound, _by_function]


def _backward(user: User) -> None:
    user.loss().backward()


def _backward_twice(user: User) -> None:
    loss = user.loss()
    loss.backward(retain_graph=True)
    loss.backward()


def _backward_to_some(user: User) -> None:
    user.loss().backward(inputs=[user.input, *user.some_weights()])


def _take_grad(user: User) -> None:
    wanted = [user.input, *user.some_weights()]
    for found in grad(user.loss(), wanted, allow_unused=True):
        user.see("torch.autograd.grad", found)


def _two_passes(user: User) -> None:
    first, second = user.loss(), user.loss(0.5)
    for loss in user.rng.sample([first, second], 2):
        loss.backward()


def _add_up(user: User) -> None:
    with user.model.no_sync() if user.is_parallel else nullcontext():
        loss = loss_of(user.model(user.enter(user.input)))
        loss.backward(inputs=[w for w in user.weights if w.requires_grad and not _is_hooked(w)])
    user.loss().backward()


def _is_hooked(weight: Tensor) -> bool:
    """By the program, which within ``no_sync`` sees its rank's part."""
    after: Any = weight._post_accumulate_grad_hooks or {}
    is_looked_at = any(hook.__module__ == __name__ for hook in after.values())
    return bool(weight._backward_hooks) or is_looked_at or hasattr(weight, "_kept_node")


def _start_over(user: User) -> None:
    user.model.zero_grad()
    with torch.no_grad():
        user.model(user.enter(user.input))


_ACTS = [
    _backward,
    _backward,
    _backward_twice,
    _backward_to_some,
    _take_grad,
    _two_passes,
    _add_up,
    _start_over,
]


def _subclassed(net: RandomNet) -> RandomNet:
    """``net`` as one of a class that calls the ``forward`` it inherits."""

    def forward(self: Any, x: Any) -> Any:
        return tuple(RandomNet.forward(self, x))

    net.__class__ = type("OwnNet", (RandomNet,), {"forward": forward})
    return net


def check_way(seed: int, device: str) -> str:
    """Raises unless a program sees the numbers of one process; the words if it is refused."""
    net = draw_network(seed)
    if not any(p.requires_grad for p in net.parameters()):
        return "it has no weights"
    if seed % 3 == 0:
        net = _subclassed(net)
    place = random_place(seed, net.sample.shape)
    mesh = place.mesh(device)
    plain = copy.deepcopy(net).to(mesh.device)
    torch.compiler.reset()
    ours = hs.parallelize(net, mesh)
    inputs = [net.sample.to(mesh.device, copy=True) for _ in range(2)]
    try:
        found = use(seed, ours, lambda x: hs.shard(x, mesh, cuts=place.cuts), inputs[0])
    except hs.UnsupportedOp as refusal:
        return str(refusal)
    expected = use(seed, plain, nn.Identity(), inputs[1])
    assert found.keys() == expected.keys(), f"seed {seed}: {found.keys()}, {expected.keys()}"
    for who, theirs in expected.items():
        assert len(found[who]) == len(theirs), (
            f"seed {seed}: {who} sees {len(found[who])} gradients"
        )
        for mine, other in zip(found[who], theirs, strict=True):
            close(mine, other, f"what the {who} sees", seed, net)
    return ""
