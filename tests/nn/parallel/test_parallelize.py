import copy
import functools
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import seeded

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
MESHES = [{"sample": 2}, {"height": 2}, {"height": 3}, {"sample": 2, "height": 2}]
SHAPE = (3, 2, 9, 6)


class Net(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


class TwoHeads(nn.Module):
    """Takes and gives tuples and dicts."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, pair, *, scale):
        a, b = pair
        return {"left": self.left(a + b), "both": (self.right(b) * scale["by"], a.mean())}


def make(kind=Net, **kwargs):
    """The same module on every rank, in double precision, and a copy that stays plain."""
    torch.manual_seed(3)
    module = kind(**kwargs).double()
    return module, copy.deepcopy(module)


def mesh_of(axes):
    torch.manual_seed(3)
    return hs.init(**axes, device="cpu", timeout_seconds=100)


def loss_of(out, seed=11):
    """Every output counts, each with a weight of its own."""
    return (out * seeded(*out.shape, seed=seed)).sum()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_grads(ours, plain):
    pairs = zip(ours.named_parameters(), plain.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            close(whole(mine.grad), theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_on_all_ranks(tensors, mesh):
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(mesh.num_ranks)]
        dist.all_gather(everyone, tensor.contiguous())
        assert all(torch.equal(each, tensor) for each in everyone)


sharded = pytest.mark.parametrize("shard_weights", [False, True], ids=["ddp", "fsdp"])
on_meshes = pytest.mark.parametrize(
    "axes", MESHES, ids=lambda axes: "-".join(f"{axis}{num}" for axis, num in axes.items())
)


# Gradients


@pytest.mark.ranks
@sharded
@on_meshes
def test_gradients_are_those_of_one_process(axes, shard_weights):
    mesh = mesh_of(axes)
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    assert model is module
    for step in range(3):
        x = seeded(*SHAPE, seed=step)
        ours, theirs = loss_of(model(hs.shard(x, mesh))), loss_of(plain(x))
        close(ours, theirs)
        ours.backward()
        theirs.backward()
        assert_same_grads(model, plain)  # added up over the steps


@pytest.mark.ranks
@sharded
@on_meshes
def test_a_leaf_given_to_shard_gets_the_gradient_of_one_process(axes, shard_weights):
    mesh = mesh_of(axes)
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    ours, theirs = (seeded(*SHAPE).requires_grad_() for _ in range(2))
    loss_of(model(hs.shard(ours, mesh))).backward()
    loss_of(plain(theirs)).backward()
    close(ours.grad, theirs.grad)
    assert_same_grads(model, plain)


@pytest.mark.ranks
@sharded
@on_meshes
def test_a_leaf_given_to_from_local_gets_its_piece_of_that_gradient(axes, shard_weights):
    mesh = mesh_of(axes)
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    x = seeded(*SHAPE).requires_grad_()
    loss_of(plain(x)).backward()
    box = hs.shard(x.detach(), mesh).box
    where = tuple(slice(span.start, span.stop) for span in box.spans)
    piece = x.detach()[where].clone().requires_grad_()
    loss_of(model(hs.from_local(piece, mesh, SHAPE))).backward()
    close(piece.grad, x.grad[where])


@pytest.mark.ranks(2)
@sharded
def test_a_module_called_twice_before_one_backward_pass(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
        once = run(enter(seeded(*SHAPE)))
        (loss_of(once) + loss_of(run(once), seed=12)).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_a_module_called_twice_before_two_backward_passes(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for _ in range(3):
        for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
            first, second = run(enter(seeded(*SHAPE))), run(enter(seeded(*SHAPE, seed=1)))
            loss_of(first).backward()
            loss_of(second).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_two_backward_passes_through_one_graph(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for _ in range(3):
        for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
            loss = loss_of(run(enter(seeded(*SHAPE))))
            loss.backward(retain_graph=True)
            loss.backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", ["before", "between", "after", "together"])
@sharded
def test_a_penalty_on_the_weights_counts_once_whenever_it_is_differentiated(order, shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)

    def penalty(module):
        return sum(whole(p).square().sum() for p in module.parameters())

    for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
        if order == "before":
            penalty(run).backward()
        loss = loss_of(run(enter(seeded(*SHAPE))))
        if order == "between":
            penalty(run).backward()
        (loss + penalty(run) if order == "together" else loss).backward()
        if order == "after":
            penalty(run).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_the_gradient_of_inputs_alone_leaves_training_as_it_is(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for _ in range(2):
        ours, theirs = (seeded(*SHAPE).requires_grad_() for _ in range(2))
        loss, plain_loss = loss_of(model(hs.shard(ours, mesh))), loss_of(plain(theirs))
        [mine] = torch.autograd.grad(loss, ours, retain_graph=True)
        close(mine, torch.autograd.grad(plain_loss, theirs, retain_graph=True)[0])
        loss.backward()
        plain_loss.backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_no_sync_adds_up_what_one_large_batch_gives(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(norm=False)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    batch = seeded(6, *SHAPE[1:])
    for _ in range(2):
        loss_of(plain(batch)).backward()
        weights = seeded(6, *SHAPE[1:], seed=11).split(2)
        *early, late = zip(batch.split(2), weights, strict=True)
        for x, weight in early:
            with model.no_sync():
                (model(hs.shard(x, mesh)) * weight).sum().backward()
        (model(hs.shard(late[0], mesh)) * late[1]).sum().backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_within_no_sync_each_rank_has_its_own_gradient():
    mesh = mesh_of({"height": 2})
    model = hs.parallelize(make(norm=False)[0], mesh)
    with model.no_sync():
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    grad = model.first.weight.grad
    everyone = [torch.empty_like(grad) for _ in range(2)]
    dist.all_gather(everyone, grad)
    assert not torch.allclose(*everyone)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:a backward pass gave no gradient")
def test_a_head_left_out_of_the_synced_pass_is_averaged_in_it():
    mesh = mesh_of({"height": 2})
    module, plain = make(TwoHeads)
    model, x = hs.parallelize(module, mesh), seeded(*SHAPE)
    for _ in range(2):
        for net, given in ((model, hs.shard(x, mesh)), (plain, x)):
            with net.no_sync() if net is model else nullcontext():
                loss_of(net((given, given), scale={"by": 2.0})["left"]).backward()
            loss_of(net((given, given), scale={"by": 2.0})["both"][0]).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_an_error_within_no_sync_does_not_end_averaging_for_good(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_clipping_sees_the_norm_of_one_process(shard_weights):
    mesh = mesh_of({"sample": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    ours = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    close(whole(ours), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same_grads(model, plain)


class Checkpointed(Net):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.ranks(2)
@sharded
def test_activation_checkpointing(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(Checkpointed, norm=False)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


# Which parameters


@pytest.mark.ranks(2)
@sharded
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    for net in (module, plain):
        net.first.requires_grad_(False)
        net.last.bias.requires_grad_(False)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert model.first.weight.grad is None
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_parameters_frozen_and_thawed_during_training(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    for net in (module, plain):
        net.first.requires_grad_(False)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for first, last in ((False, True), (True, True), (True, False), (False, False), (True, True)):
        for net in (model, plain):
            net.first.requires_grad_(first)
            net.last.requires_grad_(last)
            net.zero_grad()
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_a_layer_replaced_after_parallelize_is_trained_too():
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh)
    for _ in range(2):
        torch.manual_seed(8)
        model.last, plain.last = nn.Conv2d(4, 5, 1).double(), nn.Conv2d(4, 5, 1).double()
        plain.last.load_state_dict(model.last.state_dict())
        for _ in range(2):
            loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
            loss_of(plain(seeded(*SHAPE))).backward()
            assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_a_module_without_parameters(shard_weights):
    mesh = mesh_of({"height": 2})
    model = hs.parallelize(nn.AvgPool2d(3, 2, 1), mesh, shard_weights=shard_weights)
    ours, theirs = (seeded(*SHAPE).requires_grad_() for _ in range(2))
    out, plain_out = model(hs.shard(ours, mesh)), F.avg_pool2d(theirs, 3, 2, 1)
    close(hs.gather(out), plain_out)
    loss_of(out).backward()
    loss_of(plain_out).backward()
    close(ours.grad, theirs.grad)
    with model.no_sync():
        model(hs.shard(ours, mesh))


@pytest.mark.ranks(2)
def test_a_module_that_is_frozen_as_a_whole_passes_gradients_to_its_input():
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module.requires_grad_(False), mesh)
    ours, theirs = (seeded(*SHAPE).requires_grad_() for _ in range(2))
    loss_of(model(hs.shard(ours, mesh))).backward()
    loss_of(plain(theirs)).backward()
    close(ours.grad, theirs.grad)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


@pytest.mark.ranks(2)
def test_unused_parameters_get_no_gradient_and_the_others_the_right_one():
    mesh = mesh_of({"height": 2})
    module, plain = make(Unused)
    model = hs.parallelize(module, mesh)
    for _ in range(3):
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)
        assert model.spare.weight.grad is None


@pytest.mark.ranks(2)
def test_unused_parameters_may_be_frozen():
    mesh = mesh_of({"height": 2})
    module, plain = make(Unused)
    module.spare.requires_grad_(False)
    model = hs.parallelize(module, mesh)
    for _ in range(2):
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_sharded_weights_may_be_unused():
    mesh = mesh_of({"height": 2})
    module, plain = make(Unused)
    model = hs.parallelize(module, mesh, shard_weights=True)
    for _ in range(2):
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:a backward pass gave no gradient")
def test_backward_passes_from_one_output_after_the_other_add_up():
    mesh = mesh_of({"height": 2})
    module, plain = make(TwoHeads)
    model, x = hs.parallelize(module, mesh), seeded(*SHAPE)
    for _ in range(2):
        for net, given in ((model, hs.shard(x, mesh)), (plain, x)):
            out = net((given, given), scale={"by": 2.0})
            loss_of(out["left"]).backward(retain_graph=True)
            loss_of(out["both"][0]).backward()
        assert_same_grads(model, plain)


class Tied(nn.Module):
    """Two layers with one weight, and a third that uses the bias of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.third = nn.Conv2d(2, 2, 1)
        self.second.weight, self.third.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.mark.ranks(2)
@sharded
def test_shared_weights(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(Tied)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    assert model.first.weight is model.second.weight
    for _ in range(2):
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)
    assert list(model.state_dict()) == list(plain.state_dict())


class Listed(nn.Module):
    """Layers and weights in lists and dicts, one of the weights shared with a layer."""

    def __init__(self):
        super().__init__()
        kernel = nn.Conv2d(2, 2, 3)
        self.kernel = nn.ParameterList([kernel.weight, kernel.bias])
        self.layers = nn.ModuleList(
            [nn.Conv2d(2, 2, 3, padding=1), nn.ModuleDict({"last": nn.Conv2d(2, 2, 1)})]
        )
        self.layers[0].bias = self.kernel[1]

    def forward(self, x):
        x = F.conv2d(x, self.kernel[0], self.kernel[1], padding=1)
        return self.layers[1]["last"](torch.tanh(self.layers[0](x)))


@pytest.mark.ranks(2)
@sharded
def test_layers_and_weights_in_lists_and_dicts(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(Listed)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for _ in range(2):
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(model, plain)
    assert list(model.state_dict()) == list(plain.state_dict())


# What goes in and comes out


@pytest.mark.ranks(2)
@sharded
def test_tuples_and_dicts_of_slabs_go_in_and_come_out(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(TwoHeads)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    tensors = [seeded(*SHAPE, seed=seed) for seed in range(2)] + [seeded(3, 3, 9, 6, seed=5)]
    results = []
    for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
        a, b, by = [enter(x) for x in tensors]
        out = run((a, b), scale={"by": by})
        loss = loss_of(out["left"]) + loss_of(out["both"][0]) + out["both"][1]
        loss.backward()
        results.append((loss, *[hs.gather(x) for x in (out["left"], *out["both"])]))
    close(*results)
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_plain_tensors_are_whole_on_every_rank():
    mesh = mesh_of({"sample": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh)
    out = model(seeded(*SHAPE))
    assert isinstance(out, torch.Tensor)
    loss_of(out).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)
    close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch_stats", ["global", "spatial"])
def test_one_rank_may_evaluate_a_plain_tensor_by_itself(batch_stats):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, batch_stats=batch_stats)
    if mesh.rank == 1:
        for is_training in (True, False):
            with torch.no_grad():
                ours, theirs = (net.train(is_training)(seeded(*SHAPE)) for net in (model, plain))
            close(ours, theirs)


@pytest.mark.ranks(2)
@sharded
def test_evaluation_uses_the_statistics_that_training_left(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for run, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
        run(enter(seeded(*SHAPE)))
        run.eval()
    with torch.no_grad():
        close(hs.gather(model(hs.shard(seeded(*SHAPE), mesh))), plain(seeded(*SHAPE)))
    with torch.inference_mode():
        close(hs.gather(model(hs.shard(seeded(*SHAPE), mesh))), plain(seeded(*SHAPE)))
    model.train()
    plain.train()
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_a_slab_of_another_mesh_is_refused():
    rows, samples = mesh_of({"height": 2}), mesh_of({"sample": 2})
    model = hs.parallelize(make()[0], rows)
    x = hs.shard(seeded(*SHAPE), samples)
    with pytest.raises(hs.ConfigError, match="a mesh of height=2 and is given a Slab on sample=2"):
        model(x)
    model(hs.shard(seeded(*SHAPE), mesh_of({"height": 2})))  # the same mesh, made again


@pytest.mark.ranks(2)
def test_a_function_without_a_rule_stops_all_ranks_and_training_goes_on():
    mesh = mesh_of({"height": 2})
    module, plain = make(Rolling)
    model = hs.parallelize(module, mesh)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    model.roll = True
    with pytest.raises(hs.UnsupportedOp, match="height=2"):
        model(hs.shard(seeded(*SHAPE), mesh))
    model.roll = False
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    for _ in range(2):
        loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


class Rolling(Net):
    roll = False

    def forward(self, x):
        x = self.first(x)
        if self.roll:
            x = torch.linalg.svdvals(x)
        return self.last(x)


Rolling.__init__ = functools.partialmethod(Net.__init__, norm=False)


# The start


@pytest.mark.ranks(2)
@sharded
def test_weights_and_buffers_start_as_those_of_rank_0(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    module.register_buffer("odd", torch.zeros(3, dtype=torch.complex64), persistent=False)
    if mesh.rank == 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(7)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    for key, value in model.state_dict().items():
        assert torch.equal(whole(value), plain.state_dict()[key]), key
    assert not model.odd.any()


@pytest.mark.ranks(3)
def test_random_states_that_differ_become_that_of_rank_0_with_a_warning():
    mesh = mesh_of({"height": 3})
    module, _ = make()
    torch.manual_seed(10 if mesh.rank == 2 else 9)
    if mesh.rank == 0:
        with pytest.warns(UserWarning, match=r"differed on 1 of 3 ranks .*: seed all ranks alike"):
            hs.parallelize(module, mesh)
    else:
        hs.parallelize(module, mesh)  # warns not at all
    drawn = torch.rand(4)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(4))


@pytest.mark.ranks(2)
def test_parallelize_draws_no_random_number():
    mesh = mesh_of({"height": 2})
    module, _ = make()
    torch.manual_seed(9)
    model = hs.parallelize(module, mesh)
    model(hs.shard(seeded(*SHAPE), mesh))
    drawn = torch.rand(4)
    torch.manual_seed(9)
    assert torch.equal(drawn, torch.rand(4))


class Other(nn.Conv2d):
    pass


def shape(module):
    module.last = nn.Conv2d(4, 5, 3, padding=1)


def dtype(module):
    module.last.float()


def kind(module):
    module.last.__class__ = Other


def frozen(module):
    module.last.weight.requires_grad_(False)


def extra(module):
    module.more = nn.Conv2d(1, 1, 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("change", [shape, dtype, kind, frozen, extra])
def test_modules_that_differ_between_ranks_are_refused_on_all(change):
    mesh = mesh_of({"height": 3})
    module, _ = make()
    if mesh.rank == 2:
        change(module)
    words = r"ranks differ in the module given to parallelize: rank 0 has .*, rank 2 has .*"
    with pytest.raises(hs.CommError, match=words) as caught:
        hs.parallelize(module, mesh)
    assert len(str(caught.value)) < 1500


@pytest.mark.ranks(2)
@pytest.mark.parametrize("option", ["shard_weights", "batch_stats"])
def test_options_that_differ_between_ranks_are_refused_on_all(option):
    mesh = mesh_of({"height": 2})
    values = {"shard_weights": [False, True], "batch_stats": ["global", "spatial"]}[option]
    with pytest.raises(hs.CommError, match="ranks differ in the module given to parallelize"):
        hs.parallelize(make()[0], mesh, **{option: values[mesh.rank]})


# What may be asked for


def test_batch_stats_is_one_of_two_words():
    with pytest.raises(hs.ConfigError, match="must be 'global' or 'spatial', got 'local'"):
        hs.parallelize(Net(), hs.init(device="cpu"), batch_stats="local")


def test_what_is_not_a_module_is_refused():
    with pytest.raises(hs.ConfigError, match=r"takes a torch\.nn\.Module, got function"):
        hs.parallelize(F.relu, hs.init(device="cpu"))


@pytest.mark.ranks(2)
@sharded
def test_a_module_is_parallelized_once(shard_weights):
    mesh = mesh_of({"height": 2})
    model = hs.parallelize(make()[0], mesh, shard_weights=shard_weights)
    with pytest.raises(hs.ConfigError, match="the module is parallelized already"):
        hs.parallelize(model, mesh, shard_weights=shard_weights)
    with pytest.raises(hs.ConfigError, match=r"0\.inner, a part of the module, is parallelized"):
        hs.parallelize(nn.Sequential(nn.ModuleDict({"inner": model})), mesh)


# batch_stats


@pytest.mark.ranks
@sharded
@pytest.mark.parametrize(
    "axes", [{"sample": 2}, {"sample": 2, "height": 2}, {"height": 2}], ids=str
)
def test_spatial_batch_stats_are_those_of_each_sample_group(axes, shard_weights):
    mesh = mesh_of(axes)
    module, plain = make()
    module.register_buffer("calls", torch.zeros(()))
    plain.register_buffer("calls", torch.zeros(()))
    model = hs.parallelize(module, mesh, shard_weights=shard_weights, batch_stats="spatial")
    sizes = [3, 2] if "sample" in axes else [5]
    for step in range(3):
        x = seeded(5, *SHAPE[1:], seed=step)
        loss = loss_of(model(hs.shard(x, mesh)))
        first, *rest = x.split(sizes)
        outs = [plain(first)]
        buffers = {key: value.clone() for key, value in plain.named_buffers()}
        outs += [plain(part) for part in rest]
        for key, value in plain.named_buffers():
            value.data.copy_(buffers[key])  # those of the group of rank 0
        plain_loss = loss_of(torch.cat(outs))
        close(loss, plain_loss)
        loss.backward()
        plain_loss.backward()
        assert_same_grads(model, plain)
        close(dict(model.named_buffers()), buffers)
        assert_same_on_all_ranks(model.buffers(), mesh)


@pytest.mark.ranks(2)
def test_spatial_batch_stats_allow_several_forward_passes_before_a_backward_pass():
    mesh = mesh_of({"sample": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, batch_stats="spatial")
    x, y = seeded(4, *SHAPE[1:]), seeded(4, *SHAPE[1:], seed=1)
    (loss_of(model(hs.shard(x, mesh))) + loss_of(model(hs.shard(y, mesh)))).backward()
    sum(loss_of(torch.cat([plain(part) for part in z.split(2)])) for z in (x, y)).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_settings_of_one_module_do_not_reach_another():
    mesh = mesh_of({"sample": 2})
    module, plain = make()
    spatial = hs.parallelize(make()[0], mesh, batch_stats="spatial")
    model = hs.parallelize(module, mesh)
    x = hs.shard(seeded(4, *SHAPE[1:]), mesh)
    out = spatial(x)
    close(hs.gather(model(x)), plain(seeded(4, *SHAPE[1:])))
    close(hs.gather(model(out)), plain(hs.gather(out)))


# Still the module it was


@pytest.mark.ranks(2)
def test_a_parallel_module_is_still_the_module_it_was():
    mesh = mesh_of({"height": 2})
    module, plain = make()
    parameters = dict(module.named_parameters())
    model = hs.parallelize(module, mesh)
    assert isinstance(model, Net)
    assert type(model).__name__ == "ParallelNet"
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]


@pytest.mark.ranks(2)
@sharded
def test_keys_of_the_state_dict_stay(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    assert list(model.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(model.state_dict())
    fresh = Net().double()
    fresh.load_state_dict({key: whole(value) for key, value in copied.items()})
    close(hs.gather(model(hs.shard(seeded(*SHAPE), mesh))), fresh(seeded(*SHAPE)))


@pytest.mark.ranks(2)
def test_a_state_dict_is_loaded_into_a_parallelized_module():
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(1.5)
    assert not model.load_state_dict(plain.state_dict()).missing_keys
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_a_parallel_module_may_be_a_part_of_a_larger_one():
    mesh = mesh_of({"height": 2})
    module, plain = make()
    outer = nn.Sequential(hs.parallelize(module, mesh), nn.Tanh())
    plain_outer = nn.Sequential(plain, nn.Tanh())
    assert list(outer.state_dict()) == list(plain_outer.state_dict())
    plain_outer.load_state_dict(outer.state_dict())
    outer.load_state_dict(plain_outer.state_dict())
    loss_of(outer(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain_outer(seeded(*SHAPE))).backward()
    assert_same_grads(outer, plain_outer)


@pytest.mark.ranks(2)
def test_hooks_still_fire():
    mesh = mesh_of({"height": 2})
    module, _ = make()
    seen = []
    module.first.register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].shape)))
    module.last.register_forward_hook(lambda m, args, out: seen.append(("last", out.shape)))
    model = hs.parallelize(module, mesh)
    model.register_forward_hook(lambda m, args, out: seen.append(("all", out.shape)))
    model(hs.shard(seeded(*SHAPE), mesh))
    assert seen == [(name, torch.Size(SHAPE)) for name in ("pre", "last", "all")]


def _clip(weight):
    weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))


def _clip_what_is_added_up(weight):
    def clip(weight):
        weight.grad.clamp_(-0.1, 0.1)

    weight.register_post_accumulate_grad_hook(clip)


def _step(weight):
    optimizer = torch.optim.Adam([weight])

    def step(weight):
        optimizer.step()
        optimizer.zero_grad()

    weight.register_post_accumulate_grad_hook(step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", [_clip, _clip_what_is_added_up, _step])
def test_hooks_of_weights_see_and_change_the_gradients_of_one_process(hook):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    model = hs.parallelize(module, mesh)
    x = seeded(*SHAPE)
    for number in range(3):
        loss_of(model(hs.shard(x, mesh))).backward()
        loss_of(plain(x)).backward()
        if number == 0:  # before that, nobody looks on
            hook(model.first.weight)
            hook(plain.first.weight)
    assert_same_grads(model, plain)
    torch.testing.assert_close(model.first.weight, plain.first.weight, rtol=1e-10, atol=1e-10)


class Meshed(nn.Module):
    """Has attributes by names that come to mind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.register_buffer("mesh", torch.ones(()))
        self.replica = self._mesh = self._replica = 2.0

    def forward(self, x):
        return self.conv(x) * self.mesh * self.replica * self._mesh * self._replica


@pytest.mark.ranks(2)
@sharded
def test_the_modules_own_attributes_are_left_alone(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make(Meshed)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)
    model.mesh = model.mesh * 2


@pytest.mark.ranks(2)
@sharded
def test_a_forward_of_the_instance_is_run(shard_weights):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    for net in (module, plain):
        net.forward = functools.partial(forward_twice, net)
    model = hs.parallelize(module, mesh, shard_weights=shard_weights)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)


def forward_twice(net, x):
    return Net.forward(net, x) * 2


@pytest.mark.ranks(2)
def test_an_optimizer_made_before_goes_on_with_its_state():
    mesh = mesh_of({"height": 2})
    module, plain = make(norm=False)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (module, plain)]
    for net in (module, plain):
        loss_of(net(seeded(*SHAPE))).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    model = hs.parallelize(module, mesh)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    for optimizer in optimizers:
        optimizer.step()
    close(model.state_dict(), plain.state_dict())
    close(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("patched", [False, True])
def test_a_deep_copy_is_parallel_too_and_has_weights_of_its_own(patched):
    mesh = mesh_of({"height": 2})
    module, plain = make()
    if patched:
        module.forward = module.forward
    model = hs.parallelize(module, mesh)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    twin = AveragedModel(model).module
    assert type(twin).__name__ == "ParallelNet"
    twin.zero_grad()
    model.zero_grad()
    twin.load_state_dict(plain.state_dict())
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    if not patched:  # a bound method is copied with the module that it is bound to
        loss_of(twin(hs.shard(seeded(*SHAPE), mesh))).backward()
        loss_of(plain(seeded(*SHAPE))).backward()
        assert_same_grads(twin, plain)
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@sharded
def test_a_copy_of_sharded_weights_and_a_pickle_are_refused_with_advice(shard_weights):
    mesh = mesh_of({"height": 2})
    model = hs.parallelize(make()[0], mesh, shard_weights=shard_weights)
    with pytest.raises(hs.ConfigError, match=r"cannot be pickled: save its state_dict\(\)"):
        pickle.dumps(model)
    if shard_weights:
        with pytest.raises(hs.ConfigError, match="cannot be copied: make a second module"):
            copy.deepcopy(model)


@pytest.mark.ranks(2)
def test_a_module_that_nobody_needs_is_freed():
    mesh = mesh_of({"height": 2})
    model = hs.parallelize(make()[0], mesh)
    loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    weight = weakref.ref(model.first.weight)
    del model
    gc.collect()
    assert weight() is None


@sharded
@pytest.mark.parametrize("batch_stats", ["global", "spatial"])
def test_one_rank_needs_no_process_group(shard_weights, batch_stats):
    with torch.random.fork_rng(devices=[]):
        mesh = mesh_of({})
        module, plain = make()
    model = hs.parallelize(module, mesh, shard_weights=shard_weights, batch_stats=batch_stats)
    assert not dist.is_initialized()
    with model.no_sync():
        loss_of(model(hs.shard(seeded(*SHAPE), mesh))).backward()
    loss_of(plain(seeded(*SHAPE))).backward()
    assert_same_grads(model, plain)
    close(copy.deepcopy(model).state_dict(), model.state_dict())


# Passes that the module's own forward pass does not begin


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def decode(self, x):
        return self.decoder(x)

    def forward(self, x):
        return self.decode(self.encode(x))


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:a backward pass gave no gradient")
def test_gradients_of_what_other_methods_and_parts_return_are_averaged_too():
    mesh = mesh_of({"height": 2})
    module, plain = make(Coder)
    model, x = hs.parallelize(module, mesh), seeded(*SHAPE)
    ways = [
        lambda net, x: net.decode(net.encode(x)),
        lambda net, x: net(x),
        lambda net, x: net.encode(x),
        lambda net, x: net.decoder(torch.tanh(net.encoder(x))),
        lambda net, x: net(x) + net.decode(net.encode(x)),
        lambda net, x: net(x),
    ]
    for way in ways:
        loss_of(way(model, hs.shard(x, mesh))).backward()
        loss_of(way(plain, x)).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:a backward pass gave no gradient")
def test_a_gradient_penalty_is_averaged_though_a_bias_gets_no_gradient():
    mesh = mesh_of({"height": 2})
    module, plain = make(Coder)
    model = hs.parallelize(module, mesh)
    for _ in range(2):
        for net, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
            leaf = seeded(*SHAPE).requires_grad_()
            out = net(enter(leaf))
            (grad,) = torch.autograd.grad(loss_of(out), leaf, create_graph=True)
            ((grad.norm() - 1) ** 2).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
def test_autograd_grad_of_weights_gives_those_of_one_process():
    mesh = mesh_of({"height": 2})
    module, plain = make(Coder)
    model, found = hs.parallelize(module, mesh), []
    for net, enter in ((model, functools.partial(hs.shard, mesh=mesh)), (plain, nn.Identity())):
        loss = loss_of(net(enter(seeded(*SHAPE))))
        (grad,) = torch.autograd.grad(loss, net.encoder.weight, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), [net.decoder.weight])
        found.append((grad.detach(), second))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(2)
def test_two_threads_that_run_modules_at_once_are_told():
    mesh = mesh_of({"height": 2})
    first, second = (hs.parallelize(make()[0], mesh) for _ in range(2))
    x, told = hs.shard(seeded(*SHAPE), mesh), []

    def run_second(*_):
        with pytest.raises(hs.ConfigError, match=r"two threads of rank \d run .* at once") as info:
            second(x)
        told.append(info)

    def in_a_thread(*args):
        thread = threading.Thread(target=run_second)
        thread.start()
        thread.join()

    handle = first.first.register_forward_hook(in_a_thread)
    first(x)
    handle.remove()
    assert told
    assert second(x).shape == first(x).shape


def test_threads_of_one_rank_run_modules_at_once():
    mesh = hs.init(device="cpu")
    nets = [make() for _ in range(2)]
    x = seeded(2, 2, 8, 8)
    turns = threading.Barrier(2, timeout=60)
    found = {}

    def meet(*_):
        turns.wait()

    def run(number):
        module, _ = nets[number]
        model = hs.parallelize(module, mesh)
        model.first.register_forward_hook(meet)
        found[number] = [hs.gather(model(hs.shard(x * number, mesh))) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (_, plain) in enumerate(nets):
        for out in found[number]:
            torch.testing.assert_close(out, plain(x * number), rtol=1e-10, atol=1e-10)
