"""Passes that are recorded and replayed: with CUDA graphs, and with what does the same on CPUs."""

import copy
import gc
import itertools
import logging
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.nn.cuda_graphs import graphed
from hyperslab.nn.cuda_graphs.graphed import Graphed
from hyperslab.nn.cuda_graphs.recorder import CudaRecorder
from hyperslab.testing import seeded

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
both = pytest.mark.parametrize("device", ["cpu", GPU])


class Calls(TorchDispatchMode):
    """Torch's functions as they are called, with the tensors that they were called with."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.made.append((func, args, kwargs or {}, out))
        return out

    def again(self):
        for func, args, kwargs, before in self.made:
            pairs = zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True)
            for own, new in pairs:
                if isinstance(own, torch.Tensor) and own.data_ptr() != new.data_ptr():
                    own.detach().copy_(new)


class Tape:
    """Like a graph it calls the same functions on the same memory, and no Python code."""

    def __init__(self, device):
        self.num_recorded = 0

    practice = staticmethod(nullcontext)
    watch_for_waits = staticmethod(lambda: nullcontext([]))
    follow = staticmethod(lambda: None)

    def record(self, run):
        calls = Calls()
        with calls:
            made = run()
        self.num_recorded += 1
        return made, torch.no_grad()(calls.again)


class Counting(CudaRecorder):
    num_recorded = 0

    def record(self, run):
        out = super().record(run)
        self.num_recorded += 1
        return out


def with_graphs(module, device):
    """``module`` parallelized, and what records its passes."""
    module = hs.parallelize(module, hs.init(device=device))
    state = module.__dict__["_hyperslab"]
    recorder = (Tape if device == "cpu" else Counting)(state.mesh.device)
    run = Graphed(module, state.run, state.mesh, [], recorder)
    module.__dict__["_hyperslab"] = replace(state, run=run)
    return module, recorder


def make_net(dropout=0.5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Dropout2d(dropout), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Dropout(dropout),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    ).double()  # fmt: skip


def steps(model, device, sizes=(6, 6, 6, 6), momentum=0.9):
    """Losses, and all values of the model, of a few steps."""
    mesh = hs.init(device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for number, samples in enumerate(sizes):
        x = seeded(samples, 3, 9, 8, seed=number).double().to(device)
        weights = seeded(samples, 5, seed=number + 50).double().to(device)
        loss = (model(hs.shard(x, mesh)) * hs.shard(weights, mesh)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same_steps(make, device, *args, **kwargs):
    """Returns how many recordings there were."""
    model, recorder = with_graphs(make(), device)
    found = steps(model, device, *args, **kwargs)
    expected = steps(hs.parallelize(make(), hs.init(device=device)), device, *args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    return recorder.num_recorded


@both
def test_steps_are_those_without_graphs_dropout_and_batch_norm_included(device):
    assert assert_same_steps(make_net, device) == 2  # forward and backward


@both
def test_a_last_batch_of_another_size_is_recorded_apart(device):
    assert assert_same_steps(make_net, device, [6, 6, 2, 6, 2, 2, 6]) == 4


def eager(model):
    """The same model, at the same point, without graphs."""
    return copy.deepcopy(model)


def backward(model, x, mesh):
    """The output of a pass whose gradients are those of weights that depend on the place."""
    out = model(hs.shard(x, mesh))
    weights = torch.arange(out.numel(), device=x.device, dtype=x.dtype).view(out.shape) / 7
    (out * hs.shard(weights, mesh)).sum().backward()
    return out


def warm(model, x, mesh, passes=3):
    """Passes that have the model recorded, and leave no gradients."""
    for _ in range(passes):
        backward(model, x, mesh)
    model.zero_grad()


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_grads(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@both
def test_gradients_add_up_over_passes_and_are_nobody_elses_memory(device):
    model, recorder = with_graphs(small_net(), device)
    mesh, xs = hs.init(device=device), [seeded(5, 3, seed=n).double().to(device) for n in range(4)]
    plain = hs.parallelize(small_net(), mesh)
    warm(model, xs[0], mesh)
    kept = []
    for number, x in enumerate(xs):
        for each in (model, plain):
            backward(each, x, mesh)
        if number == 1:  # as for every other step
            kept = [p.grad for p in model.parameters()], grads_of(model)
            assert_same_grads(grads_of(model), grads_of(plain))
            model.zero_grad()
            plain.zero_grad()
    assert_same_grads(grads_of(model), grads_of(plain))
    assert_same_grads(*kept)
    assert recorder.num_recorded == 2


@both
def test_inputs_get_gradients_and_frozen_weights_none(device):
    model, recorder = with_graphs(small_net(), device)
    mesh = hs.init(device=device)
    plain = hs.parallelize(small_net(), mesh)
    for each in (model, plain):
        each[0].weight.requires_grad_(False)
    for number in range(3):
        found = []
        for each in (model, plain):
            leaf = seeded(5, 3, seed=number).double().to(device).requires_grad_()
            each.zero_grad()
            backward(each, leaf * 2, mesh)
            found.append([leaf.grad, *grads_of(each)])
        assert_same_grads(*found)
    assert recorder.num_recorded == 2
    model[0].weight.requires_grad_()  # another signature
    plain[0].weight.requires_grad_()
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            backward(each, seeded(5, 3).double().to(device), mesh)
        assert_same_grads(grads_of(model), grads_of(plain))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b, self.unused = (nn.Linear(3, 3).double() for _ in range(4))

    def forward(self, x, *, scale=2.0):
        y = self.trunk(x).relu()
        return {"a": self.a(y) * scale, "b": (self.b(y), y.argmax(1), None, "words")}


@both
def test_outputs_without_a_gradient_leave_their_weights_without_one(device):
    model, recorder = with_graphs(TwoHeads(), device)
    mesh = hs.init(device=device)
    plain = hs.parallelize(TwoHeads(), mesh)
    for number in range(4):
        found = []
        for each in (model, plain):
            each.zero_grad()
            out = each(hs.shard(seeded(5, 3, seed=number).double().to(device), mesh))
            assert out["b"][2:] == (None, "words")
            assert not out["b"][1].requires_grad
            losses = out["a"].square().sum(), out["b"][0].square().sum()
            (losses[0] if number == 2 else losses[1] if number == 3 else sum(losses)).backward()
            found.append([*grads_of(each), out["a"].local.detach(), out["b"][1].local.double()])
        assert_same_grads(*found)
    assert recorder.num_recorded == 2
    assert model.b.weight.grad is not None
    assert model.a.weight.grad is None


class Singular(nn.Module):
    """With an output whose derivative is infinite, and one whose is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        y = self.linear(x)
        return y, (y * 0).sqrt().sum(), y.sin()


@both
def test_an_output_without_a_gradient_may_have_an_infinite_derivative(device):
    model, recorder = with_graphs(Singular(), device)
    mesh = hs.init(device=device)
    plain = hs.parallelize(Singular(), mesh)
    for number in range(5):
        for each in (model, plain):
            each.zero_grad()
            y, _, z = each(hs.shard(seeded(5, 3, seed=number).double().to(device), mesh))
            (y * z).sum().backward()
        assert_same_grads(grads_of(model), grads_of(plain))
    assert recorder.num_recorded == 3  # a backward pass of all outputs too
    y, *_ = model(hs.shard(seeded(5, 3).double().to(device), mesh))
    with pytest.raises(ConfigError, match=r"outputs \[0\] alone .* of \[0, 2\] or \[0, 1, 2\]"):
        y.sum().backward()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@both
def test_outputs_may_get_no_gradients_at_all(device):
    model, _ = with_graphs(TwoHeads(), device)
    mesh = hs.init(device=device)
    for _ in range(4):
        out = model(hs.shard(seeded(5, 3).double().to(device), mesh))
        NoGradient.apply(out["a"].local).sum().backward()
        assert grads_of(model) == [None] * 8


class Normed(nn.Module):
    """With a buffer in which many elements are one in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.ones(1).double().expand(3))
        self.norm = nn.BatchNorm2d(3).double()

    def forward(self, x):
        return (self.norm(x) * self.ones.view(3, 1, 1)).mean((2, 3)) @ x.new_ones(3, 5)


@both
def test_buffers_are_put_back_whatever_their_strides(device):
    assert assert_same_steps(Normed, device) == 2


@both
def test_outputs_are_not_overwritten_by_the_next_pass(device):
    model, recorder = with_graphs(make_net().eval(), device)
    mesh = hs.init(device=device)
    with torch.no_grad():
        xs = [seeded(2, 3, 8, 8, seed=n).double().to(device) for n in range(4)]
        outs = [model(hs.shard(x, mesh)) for x in xs]
        expected = [hs.parallelize(make_net().eval(), mesh)(hs.shard(x, mesh)) for x in xs]
    assert recorder.num_recorded == 1  # no backward pass
    for out, other in zip(outs, expected, strict=True):
        torch.testing.assert_close(out.local, other.local)


@both
def test_a_forward_pass_before_the_backward_pass_of_another_runs_without_graphs(device, caplog):
    model, _ = with_graphs(small_net(), device)
    mesh = hs.init(device=device)
    plain = hs.parallelize(small_net(), mesh)
    xs = [hs.shard(seeded(5, 3, seed=n).double().to(device), mesh) for n in range(2)]
    warm(model, xs[0].local, mesh)
    for each in (model, plain):
        first, second = each(xs[0]), each(xs[1])
        with torch.no_grad():
            each(xs[1])
        (first.square().sum() * second.sum()).backward()
    assert_same_grads(grads_of(model), grads_of(plain))
    assert "the backward pass of an earlier one is yet to come" in caplog.text
    caplog.clear()
    model(xs[0])  # and its output is forgotten, so that nobody can ask for its gradient
    gc.collect()
    assert not model.__dict__["_hyperslab"].run._memory.is_in_use


@both
def test_what_graphs_cannot_do_is_an_error(device):
    model, _ = with_graphs(small_net(), device)
    mesh = hs.init(device=device)
    x = seeded(5, 3).double().to(device)
    warm(model, x, mesh)
    loss = model(hs.shard(x, mesh)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward pass"):
        loss.backward()
    loss = model(hs.shard(x, mesh)).sum()
    with torch.no_grad():
        model[2].weight += 1
    with pytest.raises(ConfigError, match="weights or buffers were written into"):
        loss.backward()
    warm(model, x.requires_grad_(), mesh)
    out = model(hs.shard(x, mesh))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Odd(nn.Module):
    """Does what replays do not."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.what, self.linear, self.count = what, nn.Linear(3, 3).double(), 0
        self.drop, self.kept = nn.Dropout(0.5), {}
        self.register_buffer("memory", torch.zeros(3).double())

    def forward(self, x):
        y = self.linear(x)
        return getattr(self, self.what)(y, x)

    def draws_in_python(self, y, x):
        return y * random.random()

    def draws_in_numpy(self, y, x):
        return y * float(np.random.rand())  # noqa: NPY002

    def draws_on_the_cpu(self, y, x):
        return y * float(torch.rand(()))

    def counts(self, y, x):
        self.count += 1
        return y * self.count

    def writes_into_its_weight(self, y, x):
        with torch.no_grad():
            self.linear.bias += 1
        return y

    def makes_its_input_want_gradients(self, y, x):
        return y + x.requires_grad_()

    def writes_into_its_input(self, y, x):
        x += 1
        return x * self.linear.weight.sum()

    def checkpoints_dropout(self, y, x):
        return checkpoint(self.drop, y, use_reentrant=False)

    def waits(self, y, x):
        return y * float((y.sum() > 0).item())

    def synchronizes(self, y, x):
        if y.is_cuda:
            torch.cuda.synchronize()
        return y * 2

    def makes_a_tensor(self, y, x):
        return y * torch.tensor([2.0], device=y.device)

    def returns_an_object(self, y, x):
        return y, object()

    def returns_its_input(self, y, x):
        return y, x

    def returns_its_buffer(self, y, x):
        return y, self.memory.add_(1)

    def returns_a_count(self, y, x):
        return y, next(COUNT)

    def keeps_a_result(self, y, x):
        self.kept["mean"] = y.detach().mean()
        return y


COUNT = itertools.count()

ODD = {
    "draws_in_python": "random numbers from Python or numpy",
    "draws_in_numpy": "random numbers from Python or numpy",
    "draws_on_the_cpu": "torch's CPU generator",
    "counts": "and since then count of ParallelOdd has changed",
    "writes_into_its_input": "writes into its arguments",
    "writes_into_its_weight": "a weight has been written into",
    "makes_its_input_want_gradients": "an argument gets gradients",
    "checkpoints_dropout": "in its backward pass",
    "returns_an_object": "returns a object",
    "returns_its_input": "in memory of an argument or of the module",
    "returns_its_buffer": "in memory of an argument or of the module",
    "returns_a_count": "numbers that differ between passes",
    "keeps_a_result": "and since then mean of kept of ParallelOdd has changed",
}
WAITING = {"waits": "the host waits", "synchronizes": "", "makes_a_tensor": "the host waits"}


def odd_steps(model, device):
    mesh = hs.init(device=device)
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    found = []
    for number in range(12):
        out = model(hs.shard(seeded(4, 3, seed=number).double().to(device), mesh))
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        found.append(out.local.detach().clone())
    return [*found, *grads_of(model)]


@both
@pytest.mark.parametrize("what", ODD)
def test_passes_that_replays_would_change_run_without_graphs_and_say_why(device, what, caplog):
    model, recorder = with_graphs(Odd(what), device)
    found = odd_steps(model, device)
    assert_same_grads(found, odd_steps(hs.parallelize(Odd(what), hs.init(device=device)), device))
    assert recorder.num_recorded == 0
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert ODD[what] in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("what", WAITING)
def test_passes_that_wait_for_the_gpu_run_without_graphs_and_what_follows_is_well(what, caplog):
    model, recorder = with_graphs(Odd(what), "cuda")
    found = odd_steps(model, "cuda")
    assert_same_grads(found, odd_steps(hs.parallelize(Odd(what), hs.init(device="cuda")), "cuda"))
    assert recorder.num_recorded == 0
    assert WAITING[what] in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(1000, device="cuda").std() > 0.1  # the generator draws
    test_steps_are_those_without_graphs_dropout_and_batch_norm_included("cuda")


@both
def test_weights_that_are_moved_or_replaced_are_seen(device):
    model, recorder = with_graphs(small_net(), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    plain = hs.parallelize(small_net(), mesh)
    warm(model, x, mesh)
    found = []
    for each in (model, plain):
        each[0].weight.data = each[0].weight.data * 2
        each[2].bias = nn.Parameter(each[2].bias.detach() + 1)
        for _ in range(3):
            each.zero_grad()
            out = backward(each, x, mesh)
        found.append([out.local.detach(), *grads_of(each)])
    assert_same_grads(*found)
    assert recorder.num_recorded == 4
    for each in (model, plain):
        each.load_state_dict({k: v * 3 for k, v in each.state_dict().items()})  # in place
        each.zero_grad()
        backward(each, x, mesh)
    assert_same_grads(grads_of(model), grads_of(plain))
    assert recorder.num_recorded == 4


@both
def test_modes_and_settings_belong_to_the_signature(device, caplog):
    model, recorder = with_graphs(make_net(), device)
    mesh = hs.init(device=device)
    plain = hs.parallelize(make_net(), mesh)
    x = hs.shard(seeded(2, 3, 8, 8).double().to(device), mesh)

    def passes(each):
        torch.manual_seed(3)
        found = []
        for number in range(6):
            each.train()
            each[4].p = 0.25 if number % 2 else 0.5
            found.append(each(x).local.detach())
            each.eval()
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    found.append(each(x).local.clone())
        return found

    torch.testing.assert_close(passes(model), passes(plain))
    assert recorder.num_recorded == 2 * 2 + 4 * 1
    assert not caplog.records


@both
def test_only_a_few_signatures_are_recorded(device, caplog, monkeypatch):
    monkeypatch.setattr(graphed, "MAX_SIGNATURES", 2)
    model, recorder = with_graphs(small_net(), device)
    mesh = hs.init(device=device)
    for _ in range(3):
        for samples in (2, 3, 4):
            backward(model, seeded(samples, 3).double().to(device), mesh)
    assert recorder.num_recorded == 4
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith("runs without CUDA graphs: there were 2 signatures of passes before")


@both
def test_layers_with_hooks_run_without_graphs_and_those_of_the_module_itself_are_called(
    device, caplog
):
    model, recorder = with_graphs(small_net(), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    warm(model, x, mesh)
    assert (len(calls), recorder.num_recorded) == (3, 2)
    model[1].register_forward_hook(lambda *_: calls.append(2))
    warm(model, x, mesh)
    assert calls[3:] == [2, 1] * 3
    assert "its Tanh has hooks" in caplog.text


@both
@pytest.mark.parametrize("passes", [0, 3])
def test_hooks_of_weights_run_once(device, passes):
    model, _ = with_graphs(small_net(), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    plain = hs.parallelize(small_net(), mesh)
    for each in (model, plain):
        warm(each, x, mesh, passes)
        each[0].weight.register_hook(lambda grad: grad * 3)
        for _ in range(3):
            backward(each, x, mesh)
    assert_same_grads(grads_of(model), grads_of(plain))


def test_on_cpus_and_in_copies_the_option_stays_what_it_is():
    model = hs.parallelize(small_net(), hs.init(device="cpu"), cuda_graphs=True)
    assert not isinstance(model.__dict__["_hyperslab"].run, Graphed)
    backward(copy.deepcopy(model), seeded(5, 3).double(), hs.init(device="cpu"))


def test_where_messages_cannot_be_recorded_a_line_says_so(caplog):
    one = hs.init(device="cpu")
    gpus = replace(one, backend="cpu:gloo,cuda:nccl", device=torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING, "hyperslab"):
        assert not graphed.can_record(gpus)
    assert "ranks exchange by cpu:gloo,cuda:nccl, which is not recorded" in caplog.text
    assert graphed.can_record(replace(gpus, backend=None))
    assert graphed.can_record(replace(gpus, transport=object()))
    assert not graphed.can_record(one)


@pytest.mark.gpu
def test_autocast_and_copies_of_a_module_with_graphs():
    mesh = hs.init(device="cuda")
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    models = [hs.parallelize(make_net().float(), mesh, cuda_graphs=on) for on in (True, False)]
    models.append(copy.deepcopy(models[0]))
    assert isinstance(models[2].__dict__["_hyperslab"].run, Graphed)
    found = []
    for model in models:
        torch.manual_seed(5)
        for number in range(4):
            x = hs.shard(seeded(4, 3, 16, 16, seed=number).float().cuda(), mesh)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
        found.append([loss.detach(), *grads_of(model)])
    torch.backends.cudnn.deterministic = before
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).norm() <= 0.002 * b.norm() + 1e-4  # bfloat16 has steps of 0.004


@pytest.mark.gpu
def test_recurrent_layers_which_move_their_weights_are_right():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lstm = nn.LSTM(3, 3, batch_first=True).double()

        def forward(self, x):
            return self.lstm(x)[0]

    found = []
    for on in (True, False):
        model = hs.parallelize(Recurrent(), hs.init(device="cuda"), cuda_graphs=on)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(8):
            out = model(seeded(2, 4, 3, seed=number).double().cuda())
            out.square().sum().backward()
            optimizer.step()
            found.append(out.detach())
    torch.testing.assert_close(found[:8], found[8:])


@pytest.mark.gpu
def test_a_number_on_the_cpu_that_changes_makes_another_kind_of_passes():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.tensor(2.0)

        def forward(self, x):
            return x * self.scale

    model, recorder = with_graphs(Scaled(), "cuda")
    mesh = hs.init(device="cuda")
    x = hs.shard(torch.ones(3, device="cuda"), mesh, axes=[None])
    for number in range(6):
        if number % 3 == 0:
            model.scale.fill_(1 + number // 3)
        assert model(x).local.tolist() == [1 + number // 3] * 3
    assert recorder.num_recorded == 2


@pytest.mark.gpu
def test_passes_on_several_streams_do_not_overwrite_each_others_inputs():
    mesh = hs.init(device="cuda")
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(20)])
    model = hs.parallelize(net, mesh, cuda_graphs=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = [torch.randn(4096, 512, device="cuda") for _ in range(8)]
    with torch.no_grad():
        expected = [model(hs.shard(x, mesh)).local for x in xs]
        torch.cuda.synchronize()
        found = []
        for number, x in enumerate(xs):
            with torch.cuda.stream(streams[number % 2]):
                found.append(model(hs.shard(x, mesh)).local)
        torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_numbers_drawn_on_the_gpu_are_those_of_passes_without_graphs():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand(x.shape, device=x.device, dtype=torch.float64)

    found = []
    for on in (True, False):
        model = hs.parallelize(Noise(), hs.init(device="cuda"), cuda_graphs=on)
        torch.manual_seed(4)
        x = hs.shard(torch.zeros(3, 4, device="cuda", dtype=torch.float64), hs.init(device="cuda"))
        found.append(torch.stack([model(x).local for _ in range(5)]))
    assert torch.equal(*found)
    assert len(found[0].unique()) == found[0].numel()


class Held(nn.Module):
    """Holds something, and multiplies by what it makes of it."""

    def __init__(self, held, use=lambda held: 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.held, self.use = nn.Linear(3, 3).double(), held, use

    def forward(self, x):
        return self.linear(x) * self.use(self.held)


GENERATORS = {
    "numpy": (lambda: np.random.default_rng(0), lambda held: float(held.random())),
    "its method": (lambda: np.random.default_rng(0).random, lambda held: float(held())),
    "Python, in a list": (lambda: [random.Random(0)], lambda held: held[0].random()),
    "torch, in a dict": (
        lambda: {"a": torch.Generator().manual_seed(0)},
        lambda held: float(torch.rand((), generator=held["a"])),
    ),
}


@both
@pytest.mark.parametrize("what", GENERATORS)
def test_modules_with_generators_of_their_own_run_without_graphs(device, what, caplog):
    make, use = GENERATORS[what]
    model, recorder = with_graphs(Held(make(), use), device)
    found = odd_steps(model, device)
    plain = hs.parallelize(Held(make(), use), hs.init(device=device))
    assert_same_grads(found, odd_steps(plain, device))
    assert recorder.num_recorded == 0
    assert "which may draw" in caplog.text


@both
def test_a_tensor_elsewhere_that_nobody_writes_makes_no_more_signatures(device):
    model, recorder = with_graphs(Held(torch.zeros((), device="meta")), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    warm(model, x, mesh, 5)
    assert recorder.num_recorded == 2


@both
def test_a_tensor_in_a_list_that_is_replaced_is_seen(device):
    mask = torch.ones(3, device=device).double()
    model, recorder = with_graphs(Held([mask], lambda held: held[0]), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    warm(model, x, mesh)
    model.held[0] = mask * 2
    plain = hs.parallelize(Held([mask * 2], lambda held: held[0]), mesh)
    for _ in range(3):
        for each in (model, plain):
            each.zero_grad()
            backward(each, x, mesh)
        assert_same_grads(grads_of(model), grads_of(plain))
    assert recorder.num_recorded == 4


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("scale", torch.ones(3).double())

    def forward(self, x):
        return self.linear(x) * self.scale


@both
def test_only_what_the_backward_pass_needs_must_not_be_written_before_it(device):
    model, _ = with_graphs(Scaled(), device)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    warm(model, x, mesh)
    plain = hs.parallelize(Scaled(), mesh)
    for each in (model, plain):
        out = each(hs.shard(x, mesh))
        with torch.no_grad():
            each.linear.bias.add_(1)
        out.sum().backward()
    assert_same_grads(grads_of(model), grads_of(plain))
    out = model(hs.shard(x, mesh))
    model.scale.mul_(2)
    with pytest.raises(ConfigError, match="weights or buffers were written into"):
        out.sum().backward()


@both
def test_a_recording_without_memory_is_tried_again_a_few_times(device, caplog, monkeypatch):
    monkeypatch.setattr(graphed, "PASSES_BETWEEN", 2)
    mesh, x = hs.init(device=device), seeded(5, 3).double().to(device)
    for failures, passes_until in ((1, 5), (3, None)):
        model, recorder = with_graphs(small_net(), device)
        record, tries = recorder.record, []

        def fail(run, tries=tries, record=record, failures=failures):
            tries.append(run)
            if len(tries) <= failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return record(run)

        recorder.record = fail
        found = []
        for _ in range(15):
            backward(model, x, mesh)
            found.append(recorder.num_recorded)
        assert (found.index(2) + 1 if 2 in found else None) == passes_until
    assert len(tries) == 3
    assert {r.getMessage().partition(": ")[2] for r in caplog.records} == {
        "the GPU ran out of memory when it was recorded"
    }
