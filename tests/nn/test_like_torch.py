"""What people do around a model in plain PyTorch works around a parallel one."""

import copy
import io
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import seeded

SHAPE = (4, 2, 12, 9)


class Block(nn.Module):
    def __init__(self, before, after, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.skip = nn.Conv2d(before, after, 1, stride)

    def forward(self, x):
        return self.act(self.norm(self.conv(x))) + self.skip(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = Block(2, 4), Block(4, 6, 2), nn.Linear(6, 3)

    def forward(self, x):
        x = self.second(F.max_pool2d(self.first(x), 3, 1, 1))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def two(cls=Net, dtype=torch.float64):
    torch.manual_seed(0)
    net = cls().to(dtype)
    return net, copy.deepcopy(net)


def loss_of(out):
    return (out * seeded(*out.shape, seed=1).to(out.dtype)).sum()


def assert_same_grads(ours, plain, tolerance=1e-9):
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(
            grad,
            theirs.grad,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def step(ours, plain, mesh, x=None, tolerance=1e-9):
    x = seeded(*SHAPE) if x is None else x
    loss_of(ours(hs.shard(x, mesh))).backward()
    loss_of(plain(x)).backward()
    assert_same_grads(ours, plain, tolerance)


AXES = [{"sample": 2}, {"height": 2}]
on_both = pytest.mark.parametrize("axes", AXES, ids=str)


@pytest.mark.ranks
@on_both
def test_autocast_gives_the_dtypes_and_about_the_numbers_of_one_process(axes):
    mesh = hs.init(**axes, device="cpu")
    module, plain = two(dtype=torch.float32)
    model, x = hs.parallelize(module, mesh), seeded(*SHAPE, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(hs.shard(x, mesh)), plain(x)
        loss, expected = (
            F.mse_loss(ours, hs.shard(torch.ones(4, 3), mesh)),
            F.mse_loss(theirs, torch.ones(4, 3)),
        )
    assert (ours.dtype, loss.dtype) == (theirs.dtype, expected.dtype)
    torch.testing.assert_close(loss, expected, rtol=0.03, atol=0.03)
    loss.backward()
    expected.backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype
        close = F.cosine_similarity(mine.grad.flatten(), other.grad.flatten(), dim=0)
        assert close > 0.98 or other.grad.norm() < 1e-3, (name, close)


@pytest.mark.ranks
@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_a_short_dtype_keeps_it(axes, dtype):
    mesh = hs.init(**axes, device="cpu")
    module, plain = two(dtype=torch.float32)
    x = seeded(*SHAPE, dtype=torch.float32)
    model = hs.parallelize(module, mesh).to(dtype)
    out = model(hs.shard(x.to(dtype), mesh))
    loss_of(out).backward()
    assert out.dtype == dtype
    expected = plain(x)
    loss_of(expected).backward()
    torch.testing.assert_close(hs.gather(out).float(), expected, rtol=0.1, atol=0.1)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == dtype
        close = F.cosine_similarity(mine.grad.float().flatten(), other.grad.flatten(), dim=0)
        assert close > 0.9 or other.grad.norm() < 0.1


@pytest.mark.ranks
@on_both
def test_channels_last_stays_channels_last(axes):
    mesh = hs.init(**axes, device="cpu")
    module, plain = two()
    model = hs.parallelize(module.to(memory_format=torch.channels_last), mesh)
    x = seeded(*SHAPE).to(memory_format=torch.channels_last)
    assert model.first(hs.shard(x, mesh)).is_contiguous(memory_format=torch.channels_last)
    step(model, plain, mesh, x)


class Checkpointed(Net):
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(lambda x: self.second(F.dropout(x, 0.0)), x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


class Plain(Net):
    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))


@pytest.mark.ranks
@on_both
def test_activation_checkpointing_runs_layers_again(axes):
    mesh = hs.init(**axes, device="cpu")
    torch.manual_seed(0)
    module, plain = Checkpointed().double(), Plain().double()
    plain.load_state_dict(module.state_dict())
    step(hs.parallelize(module, mesh), plain, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_no_graph(mode):
    mesh = hs.init(height=2, device="cpu")
    module, plain = two()
    model, x = hs.parallelize(module, mesh).eval(), seeded(*SHAPE)
    with mode():
        out = model(hs.shard(x, mesh))
        assert not out.requires_grad
        torch.testing.assert_close(hs.gather(out), plain.eval()(x))


@dataclass(frozen=True)
class Features:
    deep: object
    pair: tuple
    named: dict = field(default_factory=dict)
    label: str = "features"


class Rich(Net):
    def forward(self, x, y=None):
        first = self.first(x if y is None else x + y)
        deep = self.second(first)
        return Features(deep, (first, deep.mean()), {"head": self.head(deep.mean((2, 3)))})


def loss_of_rich(out):
    parts = [out.deep, out.pair[0], out.named["head"]]
    return sum(loss_of(part) for part in parts) * out.pair[1]


@pytest.mark.every(4)
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("axes", "compiled"),
    [({"sample": 2}, False), ({"height": 2}, False), ({"height": 2}, True)],
    ids=["sample", "height", "height, compiled"],
)
def test_several_inputs_and_a_dataclass_of_outputs(axes, compiled):
    mesh = hs.init(**axes, device="cpu")
    module, plain = two(Rich)
    model = hs.parallelize(module, mesh)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for seed in range(2):
        x, y = seeded(*SHAPE, seed=seed), seeded(*SHAPE, seed=seed + 5)
        out = run(hs.shard(x, mesh), y=hs.shard(y, mesh))
        assert out.label == "features"
        loss_of_rich(out).backward()
        loss_of_rich(plain(x, y)).backward()
        assert_same_grads(model, plain)


@pytest.mark.ranks(2)
def test_hooks_of_modules_see_and_change_slabs():
    mesh = hs.init(height=2, device="cpu")
    module, plain = two()
    seen = []

    def watch(layer, args, out):
        seen.append((type(args[0]).__name__, tuple(out.shape)))
        return out * 2

    for net in (module, plain):
        net.first.conv.register_forward_hook(watch)
        net.second.register_forward_pre_hook(lambda layer, args: (args[0] - 1,))
    step(hs.parallelize(module, mesh), plain, mesh)
    assert seen == [("Slab", (4, 4, 12, 9)), ("Tensor", (4, 4, 12, 9))]


@pytest.mark.ranks(2)
def test_full_backward_hooks_are_told_not_to_fire_on_several_ranks():
    module, _ = two()
    mesh = hs.init(height=2, device="cpu")
    module.second.register_full_backward_hook(lambda *_: None)
    if mesh.rank:
        hs.parallelize(module, mesh)
        return
    with pytest.warns(UserWarning, match=r"do not fire on Slabs: those of second will not"):
        hs.parallelize(module, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.LBFGS, torch.optim.RMSprop])
def test_optimizers_clipping_and_schedules_are_torchs_own(optimizer):
    mesh = hs.init(height=2, device="cpu")
    module, plain = two()
    x, losses = seeded(*SHAPE), []
    for net, given in ((hs.parallelize(module, mesh), hs.shard(x, mesh)), (plain, x)):
        chosen = optimizer(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 4)

        def closure(net=net, given=given, chosen=chosen):
            chosen.zero_grad()
            loss = loss_of(net(given)) ** 2
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            return loss

        losses.append([])
        for _ in range(3):
            losses[-1].append(chosen.step(closure).item())
            schedule.step()
    torch.testing.assert_close(*losses, rtol=1e-8, atol=0)


@pytest.mark.ranks(2)
def test_states_of_model_and_optimizer_are_pickled_and_loaded_by_a_plain_model():
    mesh = hs.init(height=2, device="cpu")
    module, plain = two()
    model = hs.parallelize(module, mesh)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, plain, mesh)
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    plain.load_state_dict(saved["model"])
    other = torch.optim.Adam(plain.parameters())
    other.load_state_dict(saved["optimizer"])
    model.zero_grad(), plain.zero_grad()
    step(model, plain, mesh)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "axes", [{"height": 2}, {"sample": 2, "height": 2}, {"height": 4}], ids=str
)
def test_weights_sharded_layer_by_layer_by_fsdp2_and_hsdp(axes):
    mesh = hs.init(**axes, device="cpu")
    module, plain = two()
    sizes, names = ((2, 2), ("dp", "shard")) if mesh.num_ranks == 4 else ((2,), ("shard",))
    over = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in (module.first, module.second, module):
        fully_shard(layer, mesh=over)
    model = hs.parallelize(module, mesh)
    for _ in range(2):
        step(model, plain, mesh)


@pytest.mark.ranks(2)
def test_mixed_precision_of_fsdp2_computes_in_bfloat16():
    mesh = hs.init(height=2, device="cpu")
    module, plain = two(dtype=torch.float32)
    over = init_device_mesh("cpu", (2,))
    for layer in (module.first, module.second):
        fully_shard(layer, mesh=over, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    outer = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    fully_shard(module, mesh=over, mp_policy=outer)
    out = hs.parallelize(module, mesh)(hs.shard(seeded(*SHAPE, dtype=torch.float32), mesh))
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        hs.gather(out), plain(seeded(*SHAPE, dtype=torch.float32)), rtol=0.1, atol=0.1
    )


@pytest.mark.ranks(2)
def test_weights_sharded_in_part_are_refused():
    mesh = hs.init(height=2, device="cpu")
    module, _ = two()
    fully_shard(module.first, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(hs.ConfigError, match=r"second\.conv\.weight is whole on every rank, while"):
        hs.parallelize(module, mesh)


@pytest.mark.ranks(2)
def test_a_slab_prints_its_global_shape_its_split_and_what_the_rank_holds():
    mesh = hs.init(height=2, device="cpu")
    assert f"{hs.shard(seeded(*SHAPE), mesh)}" == (
        f"Slab(4x2x12x9, dim 2 split over height=2; rank {mesh.rank} holds 4x2x6x9, "
        "torch.float64, cpu)"
    )
