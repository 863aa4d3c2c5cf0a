"""``torch.compile`` of parallel models: no graph break, and the numbers of the plain model."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.testing import Team, seeded

pytestmark = [  # The compiler itself does what torch warns of.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

MESHES = [{"depth": 2}, {}, {"sample": 2}]
SHAPE = (4, 2, 7, 6, 5)


class Residual(nn.Module):
    """Two blocks with a skip connection, a strided convolution and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.second, self.norm2 = nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.skip, self.down = nn.Conv3d(2, 4, 1), nn.Conv3d(4, 3, 3, stride=2)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        y = F.relu(self.norm1(self.first(x)))
        y = F.relu(self.norm2(self.second(y)) + self.skip(x))
        y = F.leaky_relu(self.down(F.avg_pool3d(y, 3, 1, 1)))
        y = y * torch.sigmoid(y.mean(dim=(2, 3, 4), keepdim=True))
        return self.head(y.mean(dim=(2, 3, 4)))


class Plain(nn.Module):
    """One layer of each kind: a graph that is soon made."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(3, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(x.mean(dim=(2, 3, 4))))


def nets(num, kind=Plain, **kwargs):
    torch.manual_seed(0)
    net = kind(**kwargs).double()
    return [copy.deepcopy(net) for _ in range(num)]


def train(model, x, y, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(ours, theirs):
    for (name, mine), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11, msg=name)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.ranks
@pytest.mark.every(3)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_compiled_parallel_model_trains_as_the_plain_one_does(axes):
    mesh = hs.init(**axes, device="cpu")
    plain, ours = nets(2, Residual)
    x, y = seeded(*SHAPE), seeded(4, 2)
    model = compiled(hs.parallelize(ours, mesh))
    losses = train(model, hs.shard(x, mesh), hs.shard(y, mesh))
    torch.testing.assert_close(losses, train(plain, x, y), rtol=1e-10, atol=0)
    assert_same_state(ours, plain)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_model_compiled_in_place_and_one_compiled_before_it_is_parallel_train_too():
    mesh = hs.init(depth=2, device="cpu")
    plain, first, second = nets(3)
    x, y = seeded(*SHAPE), seeded(4, 2)
    expected = train(plain, x, y)
    torch._dynamo.reset()
    first = hs.parallelize(first, mesh)
    first.compile(fullgraph=True, backend="aot_eager")
    second = hs.parallelize(compiled(second), mesh)
    for model in (first, second):
        losses = train(model, hs.shard(x, mesh), hs.shard(y, mesh))
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
        assert_same_state(model, plain)


@pytest.mark.ranks(2)
def test_a_convolution_that_would_hide_its_messages_is_right_in_a_graph():
    mesh = hs.init(depth=2, device="cpu")
    plain, ours = nets(2)
    x, y = seeded(4, 2, 13, 6, 5), seeded(4, 2)
    model = compiled(hs.parallelize(ours, mesh))
    with patch.object(choices, "MIN_INTERIOR_NUMEL", 1):
        losses = train(model, hs.shard(x, mesh), hs.shard(y, mesh))
    torch.testing.assert_close(losses, train(plain, x, y), rtol=1e-10, atol=0)


@pytest.mark.slow
def test_inductor_makes_code_that_gives_the_numbers_of_the_plain_model():
    with Team(2, timeout_seconds=300) as team:
        team.run(train_with_inductor)


def train_with_inductor():
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3), nn.GELU()).double()
    ours = copy.deepcopy(plain)
    mesh = hs.init(width=2, device="cpu")
    x, y = seeded(2, 2, 9), seeded(2, 3, 9)
    with torch._inductor.config.patch(compile_threads=1):
        model = torch.compile(hs.parallelize(ours, mesh), fullgraph=True)
        losses = train(model, hs.shard(x, mesh), hs.shard(y, mesh), steps=2)
    torch.testing.assert_close(losses, train(plain, x, y, steps=2), rtol=1e-10, atol=0)


@pytest.mark.ranks(2)
def test_a_compiled_step_holds_model_and_loss():
    mesh = hs.init(depth=2, device="cpu")
    plain, ours = nets(2)
    x, y = seeded(*SHAPE), seeded(4, 2)
    ours = hs.parallelize(ours, mesh)

    @compiled
    def step(x, y):
        return F.mse_loss(ours(x), y)

    step(hs.shard(x, mesh), hs.shard(y, mesh)).backward()
    F.mse_loss(plain(x), y).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_compiled_model_follows_eval_no_grad_and_another_shape():
    mesh = hs.init(depth=2, device="cpu")
    plain, ours = nets(2)
    ours = hs.parallelize(ours, mesh)
    model = compiled(ours)
    for extent in (7, 9):
        x, y = seeded(4, 2, extent, 6, 5), seeded(4, 2)
        losses = train(model, hs.shard(x, mesh), hs.shard(y, mesh), steps=1)
        torch.testing.assert_close(losses, train(plain, x, y, steps=1), rtol=1e-10, atol=0)
    plain.eval(), model.eval()
    with torch.no_grad():
        out = hs.gather(model(hs.shard(x, mesh)))
        torch.testing.assert_close(out, plain(x), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_compiled_dropout_draws_a_new_mask_every_step_and_the_same_on_every_rank():
    mesh = hs.init(sample=2, device="cpu")
    eager, ours = nets(2, dropout=0.5)
    x, y = hs.shard(seeded(*SHAPE), mesh), hs.shard(seeded(4, 2), mesh)
    eager, model = hs.parallelize(eager, mesh), compiled(hs.parallelize(ours, mesh))
    losses = []
    for net in (eager, model):
        torch.manual_seed(5)
        with torch.no_grad():
            losses.append([F.mse_loss(net(x), y).item() for _ in range(3)])
    assert len(set(losses[0])) == 3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_gradients_accumulate_over_compiled_passes_without_sync():
    mesh = hs.init(depth=2, device="cpu")
    plain, ours = nets(2)
    parallel = hs.parallelize(ours, mesh)
    model = compiled(parallel)
    halves = [(seeded(*SHAPE, seed=s), seeded(4, 2, seed=s)) for s in range(2)]
    for number, (x, y) in enumerate(halves):
        F.mse_loss(plain(x), y).backward()
        if number == 0:
            with parallel.no_sync():
                F.mse_loss(model(hs.shard(x, mesh)), hs.shard(y, mesh)).backward()
        else:
            F.mse_loss(model(hs.shard(x, mesh)), hs.shard(y, mesh)).backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)


RULES = {
    "slices and joins": lambda x: torch.cat([x[:, :, 1:-1:2], x.flip(2)[:, :, :3]], 2).roll(1, 2),
    "resizes": lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
    "adaptive pools": lambda x: F.adaptive_max_pool3d(x, 3) + F.adaptive_avg_pool3d(x, (3, 1, 1)),
    "softmax": lambda x: F.softmax(x, 2) * torch.log_softmax(x, 1),
    "moments": lambda x: (x - x.mean()) / x.std((2, 3), keepdim=True) + x.amax(2, keepdim=True),
    "norms": lambda x: F.normalize(x, dim=2) + F.local_response_norm(x, 2) + F.layer_norm(x, (5,)),
    "dense": lambda x: F.linear(x.movedim(1, -1), torch.ones(3, 2, dtype=x.dtype)).cumsum(2),
    "losses": lambda x: F.cross_entropy(x, torch.zeros(4, 7, 6, 5, dtype=torch.long)) + F.l1_loss(
        x, x.detach() * 2
    ),
    "wholes": lambda x: torch.linalg.svdvals(x.mean((2, 3))),
    "transposed": lambda x: F.conv_transpose3d(x, torch.ones(2, 1, 3, 3, 3, dtype=x.dtype)),
    "less its mean": lambda x: x - x.mean(2, keepdim=True) + x.sum(2, keepdim=True),
    "not dispatched by Dynamo itself": lambda x: torch.relu_(F.sigmoid(x) * F.tanh(x)),
    "pads": lambda x: F.pad(x, (1, 1, 1, 1, 2, 1), "reflect").reshape(8, -1),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.every(6)
@pytest.mark.parametrize("name", RULES)
def test_rules_are_the_same_in_a_graph(name):
    mesh, x = hs.init(depth=2, device="cpu"), seeded(*SHAPE)
    grads = []
    for function in (RULES[name], compiled(RULES[name])):
        leaf = x.clone().requires_grad_()
        out = function(hs.shard(leaf, mesh))
        (out * seeded(*out.shape, seed=1)).sum().backward()
        grads.append((hs.gather(out).detach(), leaf.grad))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_function_that_dynamo_does_not_dispatch_is_right_in_a_graph():
    mesh, x = hs.init(depth=2, device="cpu"), seeded(*SHAPE)
    out = compiled(lambda x: F.sigmoid(x))(hs.shard(x, mesh))
    torch.testing.assert_close(hs.gather(out), F.sigmoid(x))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_numbers_and_slices_are_fixed_where_shapes_are_dynamic():
    mesh = hs.init(depth=2, device="cpu")
    slope = 0.25

    def step(x, first):
        return F.leaky_relu(x, slope)[:, :, first:-1] * slope

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for extent in (7, 9):
        x = seeded(2, 2, extent, 3, 3)
        torch.testing.assert_close(hs.gather(run(hs.shard(x, mesh), 1)), step(x, 1))


@pytest.mark.ranks(2)
def test_writing_into_a_copied_part_is_refused_in_a_graph_too():
    mesh = hs.init(depth=2, device="cpu")

    @compiled
    def step(x):
        x = x * 2
        x[:, :, 3].mul_(5)
        return x.sum()

    with pytest.raises(Exception, match=r"UnsupportedOp: .*mul_ .*it writes into a copy"):
        step(hs.shard(seeded(*SHAPE), mesh))


@pytest.mark.ranks(2)
def test_a_refused_operator_is_named_in_the_error_of_the_compiler():
    mesh = hs.init(depth=2, device="cpu")

    @compiled
    def step(x):
        return torch.fft.fftn(x)

    with pytest.raises(Exception, match=r"UnsupportedOp: torch\.fft\.fftn cannot run"):
        step(hs.shard(seeded(*SHAPE), mesh))
