"""Gradients of weights in compiled models: those of one process, whoever looks at them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import seeded

pytestmark = [  # The compiler itself does what torch warns of.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
SHAPE = (2, 2, 6, 5)


class Scaled(nn.Module):
    """A loss with a scale that is learned."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0).double())

    def forward(self, x):
        return (x * self.scale).square().mean()


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(2, 3, 1).double()

    def forward(self, x):
        return self.head(x).square().mean()


class Listed(nn.Module):
    """Parameters in a plain list, which no module knows of."""

    def __init__(self):
        super().__init__()
        self.weights = [nn.Parameter(seeded(2, 1, 1, seed=n)) for n in range(2)]

    def forward(self, x):
        return (x * self.weights[0] + self.weights[1]).square().mean()


def compiled(function, **kwargs):
    torch._dynamo.reset()
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **kwargs})


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def conv():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 2, 1)).double()
    return plain, copy.deepcopy(plain)


def same_grads(ours, plain):
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        close(mine.grad, theirs.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Scaled, Headed, Listed], ids=["scale", "head", "list"])
def test_parameters_of_no_parallel_module_get_the_gradients_of_one_process(kind):
    mesh = hs.init(height=2, device="cpu")
    torch.manual_seed(1)
    plain = kind()
    ours = copy.deepcopy(plain)
    plain(seeded(*SHAPE)).backward()
    compiled(ours)(hs.shard(seeded(*SHAPE), mesh)).backward()
    weights = [getattr(net, "weights", [*net.parameters()]) for net in (ours, plain)]
    for mine, theirs in zip(*weights, strict=True):
        close(mine.grad, theirs.grad)


@pytest.mark.ranks(2)
def test_autograd_grad_through_a_compiled_model_is_that_of_one_process():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    model = compiled(hs.parallelize(ours, mesh))
    loss = model(hs.shard(seeded(*SHAPE), mesh)).square().mean()
    expected = torch.autograd.grad(plain(seeded(*SHAPE)).square().mean(), [*plain.parameters()])
    close(torch.autograd.grad(loss, [*ours.parameters()]), expected)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_hooks_of_weights_in_a_compiled_model_see_and_change_the_gradients_of_one_process():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    model, seen = compiled(hs.parallelize(ours, mesh)), []
    for net in (plain, ours):
        net[0].weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    plain(seeded(*SHAPE)).square().mean().backward()
    model(hs.shard(seeded(*SHAPE), mesh)).square().mean().backward()
    close(seen[1], seen[0])
    same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_a_view_of_a_weight_in_a_compiled_function_gets_the_gradient_of_one_process():
    mesh = hs.init(height=2, device="cpu")
    views = []
    for run, x in (
        (F.conv2d, seeded(*SHAPE)),
        (compiled(F.conv2d), hs.shard(seeded(*SHAPE), mesh)),
    ):
        weight = nn.Parameter(seeded(3 * 2, seed=4))
        view = weight.view(3, 2, 1, 1)
        view.retain_grad()
        run(x, view).square().mean().backward()
        views.append((view.grad, weight.grad))
    close(views[1], views[0])


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_weights_that_are_frozen_and_thawed_between_compiled_passes():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    model = compiled(hs.parallelize(ours, mesh))
    for frozen in (False, True, False):
        for net in (plain, ours):
            net[0].requires_grad_(not frozen)
        plain(seeded(*SHAPE)).square().mean().backward()
        model(hs.shard(seeded(*SHAPE), mesh)).square().mean().backward()
        same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_compiled_passes_within_no_sync_are_averaged_by_the_next_one():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    parallel = hs.parallelize(ours, mesh)
    model = compiled(parallel)
    plain(seeded(*SHAPE)).square().mean().mul(2).backward()
    with parallel.no_sync():
        model(hs.shard(seeded(*SHAPE), mesh)).square().mean().backward()
    model(hs.shard(seeded(*SHAPE), mesh)).square().mean().backward()
    same_grads(ours, plain)


@pytest.mark.ranks(2)
def test_a_compiled_model_of_sharded_weights_trains_as_one_process():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    model = compiled(hs.parallelize(ours, mesh, shard_weights=True), fullgraph=False)
    plain(seeded(*SHAPE)).square().mean().backward()
    model(hs.shard(seeded(*SHAPE), mesh)).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        close(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_backward_pass_within_a_compiled_step_is_that_of_one_process():
    mesh = hs.init(height=2, device="cpu")
    plain, ours = conv()
    ours = hs.parallelize(ours, mesh)

    def step(x):
        loss = ours(x).square().mean()
        loss.backward()

    plain(seeded(*SHAPE)).square().mean().backward()
    compiled(step, fullgraph=False)(hs.shard(seeded(*SHAPE), mesh))
    same_grads(ours, plain)
