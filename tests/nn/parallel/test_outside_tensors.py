"""Learnable tensors that meet Slabs: weights of a parallelized module, and others."""

import copy
import functools
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function, forward_ad, grad
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.comm.local_sockets import LocalSockets
from hyperslab.nn.parallel import gradient_averaging
from hyperslab.testing import seeded

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
SHAPE = (3, 2, 7, 5)
MESHES = [
    ({"height": 2}, {"height": [0, 2, 7]}),
    ({"sample": 2}, {"sample": [0, 0, 3]}),
    ({"sample": 2, "width": 2}, {"width": [0, 1, 5]}),
]
on_meshes = pytest.mark.parametrize(("axes", "cuts"), MESHES, ids=lambda value: "")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.last = nn.Conv2d(3, 2, 3, padding=1)
        self.listed = [nn.Parameter(seeded(2, 1, 1, seed=5))]

    def forward(self, x, *scales):
        out = self.last(torch.tanh(self.norm(self.first(x)))) * self.listed[0]
        for scale in scales:
            out = out * scale
        return out


def entered(axes, cuts):
    """Parallel and plain modules, and what makes Slabs for the one and nothing for the other."""
    mesh = hs.init(**axes, device="cpu", timeout_seconds=100)
    torch.manual_seed(3)
    plain = Net().double()
    model = hs.parallelize(copy.deepcopy(plain), mesh)
    return (model, functools.partial(hs.shard, mesh=mesh, cuts=cuts)), (plain, lambda x: x)


def leaves(*shapes):
    return [seeded(*shape, seed=7 + n).requires_grad_() for n, shape in enumerate(shapes)]


def weighed(out, seed=11):
    return (out * seeded(*out.shape, seed=seed)).sum()


def scaled(run, x, t):
    return run(x) * t


def given(run, x, t):
    return run(x, t)


def of_positions(run, x, t):
    return torch.sin(run(x) + t) * t[0, 0]


def in_convolution(run, x, w, b):
    return F.conv2d(run(x), w, b, stride=2, padding=1)


def joined(run, x, t, w):
    return torch.cat([torch.einsum("nchw,ce->nehw", run(x), w), t], 1)


def named(run, x, t):
    return torch.lerp(run(x), run(x).sin(), weight=t)


def in_place(run, x, t, row):
    out = run(x)
    out.mul_(t)
    out += t
    out[:, 0] = row
    return out


def on_both_ways(run, x, t):
    return run(x) * t * t.sum() + (t - run(x)) * run(x).square().mean()


def computed(run, x, t, u):
    return run(x) * (t * u.sum()).exp() * run.last.bias[:, None, None]


def gathered(run, x, t):
    return run(x) * (hs.gather(run(x)).sin() * t)


def checkpointed(run, x, t):
    return checkpoint(lambda y: run(y) * t, x, use_reentrant=False)


USES = {
    scaled: [(2, 1, 1)],
    given: [(2, 1, 1)],
    of_positions: [(1, 2, 7, 5)],
    in_convolution: [(3, 2, 3, 3), (3,)],
    joined: [(3, 1, 7, 5), (2, 4)],
    named: [()],
    in_place: [(2, 1, 1), (7, 5)],
    on_both_ways: [(2, 1, 1)],
    computed: [(2, 1, 1), (4,)],
    gathered: [(2, 1, 1)],
    checkpointed: [(2, 1, 1)],
}


@pytest.mark.ranks
@on_meshes
def test_learnable_tensors_outside_of_a_module_get_the_gradients_of_one_process(axes, cuts):
    for use, shapes in USES.items():
        grads = []
        for run, enter in entered(axes, cuts):
            x, *others = leaves(SHAPE, *shapes)
            for _ in range(2):  # gradients add up
                weighed(use(run, enter(x), *others)).backward()
            tensors = [x, *others, *run.listed, *run.parameters()]
            grads.append([tensor.grad for tensor in tensors])
        for number, (ours, theirs) in enumerate(zip(*grads, strict=True)):
            close(ours, theirs, msg=lambda text, n=number, use=use: f"{use.__name__} {n}: {text}")


@pytest.mark.ranks(2)
def test_tensors_that_stand_in_for_weights_get_the_gradients_of_one_process():
    found = []
    for run, enter in entered({"height": 2}, {}):
        x = enter(seeded(*SHAPE))
        weights = {name: (1.1 * p.detach()).requires_grad_() for name, p in run.named_parameters()}
        some = {"last.weight": seeded(2, 3, 3, 3, seed=2).requires_grad_()}
        module = nn.ParameterDict({"w": seeded(2, 3, 3, 3, seed=3)})
        for others in (weights, some, {"last.weight": module["w"]}, weights):
            weighed(functional_call(run, others, (x,))).backward()
        weighed(run(x), seed=12).backward()
        tensors = *weights.values(), *some.values(), *module.values(), *run.parameters()
        found.append([tensor.grad for tensor in tensors])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("second_order", [False, True])
def test_weights_that_are_adapted_step_by_step_are_those_of_one_process(second_order):
    found = []
    for run, enter in entered({"height": 2}, {}):
        x, weights = enter(seeded(*SHAPE)), dict(run.named_parameters())
        for _ in range(2):
            loss = weighed(functional_call(run, weights, (x,)))
            grads = torch.autograd.grad(loss, [*weights.values()], create_graph=second_order)
            weights = {
                name: weight - 1e-3 * grad
                for (name, weight), grad in zip(weights.items(), grads, strict=True)
            }
        weighed(functional_call(run, weights, (x,)), seed=12).backward()
        found.append([*weights.values(), *(p.grad for p in run.parameters())])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.ranks(2)
def test_gradients_of_gradients_reach_tensors_outside_of_a_module():
    found = []
    for run, enter in entered({"height": 2}, {"height": [0, 2, 7]}):
        (t,) = leaves((2, 1, 1))
        bias = run.last.bias[:, None, None]
        loss = weighed(run(enter(seeded(*SHAPE))) * t.exp() * bias)
        grads = torch.autograd.grad(loss, [t, bias, run.first.weight], create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
        found.append([*grads, t.grad, *(p.grad for p in run.parameters())])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Conv2d(2, 2, 3, padding=1))
        self.scale = nn.Parameter(seeded(2, seed=6))

    def forward(self, x, t):
        return self.normed(x) * self.scale[:, None, None] * t


@pytest.mark.ranks(2)
def test_tensors_beside_weights_that_are_spread_over_ranks_get_exact_gradients():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    torch.manual_seed(3)
    plain = Spread().double()
    model = hs.parallelize(copy.deepcopy(plain), mesh, shard_weights=True)
    ours, theirs = leaves((2, 1, 1)), leaves((2, 1, 1))
    for run in (model, plain):  # FSDP2 does not know of it
        run.late = nn.Parameter(seeded(2, 1, 1, seed=4))
    for seed in range(2):
        x = seeded(*SHAPE, seed=seed)
        weighed(model(hs.shard(x, mesh), *ours) * model.late).backward()
        weighed(plain(x, *theirs) * plain.late).backward()
    close(ours[0].grad, theirs[0].grad)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = parameter.grad
        close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, other.grad)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_an_argument_of_a_compiled_module_gets_the_gradient_of_one_process():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=100)
    torch.manual_seed(3)
    plain = Spread().double()
    model = hs.parallelize(copy.deepcopy(plain), mesh)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours, theirs = leaves((2, 1, 1)), leaves((2, 1, 1))
    weighed(compiled(hs.shard(seeded(*SHAPE), mesh), *ours)).backward()
    weighed(plain(seeded(*SHAPE), *theirs)).backward()
    close(ours[0].grad, theirs[0].grad)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        close(parameter.grad, other.grad)


def counted(patch):
    """The sizes of what is summed over all ranks from now on, single numbers aside."""
    sizes = []
    all_reduce, share = dist.all_reduce, LocalSockets.share

    def count(x):
        sizes.extend([x.numel()] if x.numel() > 1 else [])
        return x

    patch.setattr(dist, "all_reduce", lambda x, *args, **kw: all_reduce(count(x), *args, **kw))
    patch.setattr(LocalSockets, "share", lambda self, x, *args: share(self, count(x), *args))
    return sizes


@pytest.mark.ranks(2)
def test_the_gradients_of_one_backward_pass_share_a_message():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    plain = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 1)).double()
    num_weights = 2 * 2 * 9 + 2 + 2 * 3 + 3
    for parallelize in (lambda net: net, functools.partial(hs.parallelize, mesh=mesh)):
        with pytest.MonkeyPatch.context() as patch:
            found = []
            for run, x in (
                (parallelize(copy.deepcopy(plain)), hs.shard(seeded(*SHAPE), mesh)),
                (copy.deepcopy(plain), seeded(*SHAPE)),
            ):
                losses = [weighed(run(run[0](x))) for _ in range(2)]
                sizes = counted(patch)
                for loss in losses:
                    loss.backward()
                found.append([p.grad for p in run.parameters()])
                if run is not plain and isinstance(x, hs.Slab):
                    assert sizes == [num_weights] * 2
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)


@pytest.mark.ranks(2)
def test_large_gradients_are_sent_before_the_pass_ends():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    plain = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))).double()
    model = hs.parallelize(copy.deepcopy(plain), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_averaging, "BUCKET_NBYTES", 2 * 2 * 9 * 8 + 1)
        model[0].weight = nn.Parameter(model[0].weight.detach())  # makes it think again
        loss = weighed(model(hs.shard(seeded(*SHAPE), mesh)))
        sizes, at_first = counted(patch), []
        model[0].weight.register_hook(lambda grad: at_first.append(len(sizes)))
        loss.backward()
    weighed(plain(seeded(*SHAPE))).backward()
    assert at_first == [4]  # the mean of what the hook sees is the fourth
    assert sizes == [2 * 2 * 9 + 2] * 3 + [2 * 2 * 9] + [2 * 2 * 9 + 2]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad)


@pytest.mark.ranks(2)
def test_hooks_see_the_gradient_of_one_process():
    found = []
    for run, enter in entered({"height": 2}, {"height": [0, 2, 7]}):
        seen, (t, u, v) = [], leaves((2, 1, 1), (2, 1, 1), ())
        t.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(max=0.1))  # noqa: B023
        u.register_post_accumulate_grad_hook(lambda u: seen.append(u.grad.clone()))  # noqa: B023
        loss = weighed(run(enter(seeded(*SHAPE))) * t * u * v)
        loss.backward(retain_graph=True)
        seen += torch.autograd.grad(loss, [v, t], retain_graph=True)
        loss.backward(inputs=[v])
        found.append([*seen, t.grad, u.grad, v.grad])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_changed_while_it_is_averaged_is_told():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    plain = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))).double()
    x = hs.shard(seeded(*SHAPE), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_averaging, "BUCKET_NBYTES", 2 * 2 * 9 * 8 + 1)
        model = hs.parallelize(plain, mesh)
        between, other = model[0](x), weighed(model[1](x))

        def go_back(grad):
            other.backward()

        between.local.register_hook(go_back)
        with pytest.raises(hs.UnsupportedOp, match=r"shape \(2.*\) was changed .* averaged"):
            weighed(model[1](between)).backward()


class Clipped(Function):
    """Gives what it gets; its gradient is cut."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


def by_a_bound_name(loss, w, seen):
    seen += grad(loss, [w])


def by_inputs(loss, w, seen):
    loss.backward(inputs=[w])
    seen.append(w.grad)


def by_hook(loss, w, seen):
    w.register_hook(lambda g: seen.append(g.clone()) or g.clamp(max=0.1))
    loss.backward()


def by_retain_grad(loss, w, seen):
    w.retain_grad()
    loss.backward()
    seen.append(w.grad)


def by_prehook(loss, w, seen):
    node = get_gradient_edge(w).node
    node.register_prehook(lambda grads: seen.extend(g.clone() for g in grads))
    loss.backward()


def by_node_hook(loss, w, seen):
    node = get_gradient_edge(w).node
    node.register_hook(lambda _, grads: seen.extend(g.clone() for g in grads))
    loss.backward()


def by_a_step_in_the_pass(loss, w, seen):
    def step(w):
        seen.append(w.grad.sin())
        w.grad.zero_()

    if w.is_leaf:
        w.register_post_accumulate_grad_hook(step)
    loss.backward()


VIEWS = {
    "leaf": lambda w: w,
    "view": lambda w: w.view_as(w),
    "expand": lambda w: w.expand(2, *w.shape)[1],
    "unbind": lambda w: torch.stack(w.unbind(0)),
    "function": Clipped.apply,
    "double": lambda w: w * 1.5,
}
SEERS = [
    by_a_bound_name,
    by_inputs,
    by_hook,
    by_retain_grad,
    by_prehook,
    by_node_hook,
    by_a_step_in_the_pass,
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seer", SEERS)
def test_whoever_sees_the_gradient_of_a_weight_sees_that_of_one_process(seer):
    for name, view in VIEWS.items():
        for is_hooked_early in (False, True):
            found = []
            for run, enter in entered({"height": 2}, {"height": [0, 2, 7]}):
                x, seen = run.first(enter(seeded(*SHAPE))), []
                (bias,) = leaves((3, 1, 1))
                weight, w = run.last.weight, view(run.last.weight)
                if is_hooked_early:
                    w.register_hook(lambda grad: grad * 2)
                loss = weighed(F.conv2d(x * bias, w, padding=1) + run.last(x))
                seer(loss, w, seen)
                found.append([*seen, bias.grad, weight.grad, run.last.bias.grad])
            for ours, theirs in zip(*found, strict=True):
                close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2)
def test_a_pass_that_fails_leaves_nothing_to_the_next():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    (t,) = leaves((2, 1, 1))
    x = seeded(3, 2, 8, 5).requires_grad_()
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        weighed(hs.shard(x, mesh) * t).backward()
    gc.collect()
    assert not gradient_averaging._passes


@pytest.mark.ranks(2)
def test_a_part_of_a_module_that_is_gone_is_no_longer_left_to_it():
    (run, enter), (plain, _) = entered({"height": 2}, {})
    part = run.last
    del run
    gc.collect()
    weighed(part(enter(seeded(3, 3, 7, 5)))).backward()
    weighed(plain.last(seeded(3, 3, 7, 5))).backward()
    close(part.weight.grad, plain.last.weight.grad)


@pytest.mark.ranks(2)
def test_forward_mode_derivatives_are_refused():
    (run, enter), _ = entered({"height": 2}, {})
    x = enter(seeded(*SHAPE))
    refused = pytest.raises(hs.UnsupportedOp, match=r"on height=2 cannot .*forward_ad")
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        dual = forward_ad.make_dual(seeded(*SHAPE), seeded(*SHAPE, seed=1))
        with refused:
            enter(dual)
        local = forward_ad.make_dual(x.local, torch.ones_like(x.local))
        for grad_mode in (True, False):
            with refused, torch.set_grad_enabled(grad_mode):
                x.with_local(local).sum()
    run(x).sum().backward()


@pytest.mark.ranks(2)
def test_transforms_of_functions_are_refused():
    (run, enter), _ = entered({"height": 2}, {})
    x = enter(seeded(*SHAPE))
    refused = pytest.raises(
        hs.UnsupportedOp, match=r"on height=2 cannot .* torch\.func\.grad, vmap"
    )
    with refused:
        torch.func.grad(lambda t: (run(x) * t).sum())(seeded(2, 1, 1))
    with refused:
        torch.func.grad(lambda t: (enter(seeded(*SHAPE)) * t).sum())(seeded(2, 1, 1))
