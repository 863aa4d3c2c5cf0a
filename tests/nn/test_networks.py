"""Whole networks, trained on every mesh: the losses and weights of one process in plain PyTorch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.testing import seeded

NUM_STEPS = 3
NUM_CLASSES = 3

MESHES = [
    {"sample": 1},
    {"sample": 2},
    {"depth": 2},
    {"depth": 3},
    {"sample": 2, "depth": 2},
    {"channel": 2},
    {"channel": 3},
    {"channel": 4},
    {"channel": 2, "depth": 2},
    {"sample": 2, "channel": 2},
    {"depth": 2, "height": 2, "width": 2},
    {"channel": 2, "height": 2, "width": 2},
]
FLAT_MESHES = [
    {"sample": 1},
    {"sample": 2},
    {"height": 3},
    {"sample": 2, "height": 2},
    {"height": 2, "width": 2},
    {"depth": 2},  # cuts no dim of an image: both ranks hold all of it
    {"channel": 2},
    {"channel": 3},
    {"sample": 2, "channel": 2},
    {"channel": 2, "height": 2},
    {"sample": 2, "height": 2, "width": 2},
    {"sample": 2, "channel": 2, "width": 2},
]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


class Block(nn.Module):
    def __init__(self, conv, norm, num_in, num_out, stride):
        super().__init__()
        self.conv1 = conv(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = norm(num_out)
        self.conv2 = conv(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = norm(num_out)
        self.skip = nn.Sequential(conv(num_in, num_out, 1, stride, bias=False), norm(num_out))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.skip(x)
        return self.act(out)


class ResNet(nn.Module):
    """A classifier: a wide strided stem, an overlapping pool, residual blocks, a global pool."""

    def __init__(self, conv, norm, pool, average, dropout=0.0):
        super().__init__()
        self.stem = nn.Sequential(conv(2, 4, 5, 2, 2), norm(4), nn.ReLU(), pool(3, 2, 1))
        self.blocks = nn.Sequential(Block(conv, norm, 4, 4, 1), Block(conv, norm, 4, 6, 2))
        self.pool = average(1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, x):
        x = self.pool(self.blocks(self.dropout(self.stem(x))))
        return self.head(self.dropout(torch.flatten(x, 1)))


class UNet(nn.Module):
    """A segmenter: skips, pools, transposed convolutions that restore odd sizes."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = self.conv(2, 4), self.conv(4, 5), self.conv(5, 6)
        self.pool = nn.MaxPool3d(3, 2, 1)
        self.up2 = nn.ConvTranspose3d(6, 5, 3, 2, 1)
        self.up1 = nn.ConvTranspose3d(5, 4, 5, 2, 2)
        self.fuse2, self.fuse1 = self.conv(10, 5), self.conv(8, 4)
        self.head = nn.Conv3d(4, NUM_CLASSES, 1)

    @staticmethod
    def conv(num_in, num_out):
        return nn.Sequential(
            nn.Conv3d(num_in, num_out, 3, padding="same"),
            nn.InstanceNorm3d(num_out, affine=True),
            nn.LeakyReLU(0.1),
        )

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(self.pool(first))
        bottom = self.bottom(self.pool(second))
        up = self.up2(bottom, output_size=second.shape[2:])
        up = self.fuse2(torch.cat([up, second], dim=1))
        up = self.up1(up, output_size=first.shape[2:])
        return self.head(self.fuse1(torch.cat([first, up], dim=1)))


class Gated(nn.Module):
    """Squeeze and excite: a gate made of global means scales the tensor it was made from."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(2, 6, 3, 1, 1), nn.Conv3d(6, 2, 3, 1, 1)
        self.squeeze, self.excite = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3, 4))))))
        return self.conv2(x * gate.view(*gate.shape, 1, 1, 1))


class Normed(nn.Module):
    """One norm of each kind, with all their weights and running statistics."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(2, 4, 3, 1, 1), nn.Conv3d(4, 4, 3, 2, 1)
        self.batch = nn.BatchNorm3d(4, momentum=0.3)
        self.cumulative = nn.BatchNorm3d(4, momentum=None, affine=False)
        self.instance = nn.InstanceNorm3d(4, affine=True, track_running_stats=True)
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm((4, 6, 5, 4))
        self.head = nn.Conv3d(4, 2, 1)

    def forward(self, x):
        x = torch.tanh(self.instance(self.batch(self.conv1(x))))
        return self.head(self.layer(self.group(self.cumulative(self.conv2(x)))))


def resnet3d():
    return ResNet(nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d)


def resnet2d(dropout=0.0):
    return ResNet(nn.Conv2d, nn.BatchNorm2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, dropout)


def labels(*shape):
    return (seeded(*shape, seed=7) * 100).long() % NUM_CLASSES


VOLUME, IMAGE = (3, 2, 11, 9, 8), (3, 2, 15, 13)
SPATIAL = ("depth", "height", "width")

NETWORKS = {
    "resnet3d": (resnet3d, VOLUME, (3,)),
    "unet": (UNet, VOLUME, (3, *VOLUME[2:])),
    "gated": (Gated, VOLUME, VOLUME),
    "normed": (Normed, VOLUME, (3, 2, 6, 5, 4)),
    "resnet2d": (resnet2d, IMAGE, (3,)),
    "dropout": (functools.partial(resnet2d, 0.4), IMAGE, (3,)),
}


def train(name, optimizer_name, mesh=None, *, overlap=False, shard_weights=False):
    """The loss of every step, then weights and buffers; on Slabs if there is a mesh."""
    make, shape, target_shape = NETWORKS[name]
    torch.manual_seed(5)
    model = make().double()
    if mesh is not None:
        model = hs.parallelize(model, mesh, shard_weights=shard_weights)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    least, choices.MIN_INTERIOR_NUMEL = choices.MIN_INTERIOR_NUMEL, 0 if overlap else 1 << 16
    losses = []
    for step in range(NUM_STEPS):
        x, target = seeded(*shape, seed=step), make_target(target_shape, step)
        if mesh is not None:
            x, target = hs.shard(x, mesh), shard_target(target, mesh)
        out = model(x)
        loss = F.mse_loss(out, target) if target.dtype == x.dtype else F.cross_entropy(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    choices.MIN_INTERIOR_NUMEL = least
    whole = {key: getattr(x, "full_tensor", x.clone)() for key, x in model.state_dict().items()}
    return torch.stack(losses), whole


def make_target(shape, step):
    if len(shape) == 5:
        return seeded(*shape, seed=100 + step)
    return labels(*shape) if step % 2 else labels(*shape).flip(0)


def shard_target(target, mesh):
    """Labels of samples are given to the loss as they are, label maps and images as Slabs."""
    if target.ndim == 1:
        return target
    return hs.shard(target, mesh, axes=("sample", *SPATIAL) if target.ndim == 4 else None)


def train_on(axes, name, optimizer_name, **kwargs):
    torch.manual_seed(5)
    return train(name, optimizer_name, hs.init(**axes, device="cpu"), **kwargs)


@functools.cache
def serial(name, optimizer_name):
    """Plain PyTorch; for dropout a mesh of one rank, because the masks are hyperslab's own."""
    with threads(1):
        mesh = hs.init(device="cpu") if name == "dropout" else None
        return train(name, optimizer_name, mesh)


@pytest.fixture(autouse=True)
def _keep_random_state():
    with torch.random.fork_rng(devices=[]):
        yield


class threads:  # noqa: N801 - a context manager, read as a word
    """Within it torch uses ``num`` threads, as ranks do."""

    def __init__(self, num):
        self.num = num

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.num)

    def __exit__(self, *error):
        torch.set_num_threads(self.before)


def run(team_of, axes, *args, **kwargs):
    num_ranks = torch.tensor(list(axes.values())).prod().item()
    if num_ranks == 1:
        with threads(1):
            return [train_on(axes, *args, **kwargs)]
    return team_of(num_ranks).run(train_on, axes, *args, **kwargs)


def assert_same(results, expected):
    """Equal to the last bit on all ranks, and to 1e-9 what one process gets."""
    losses, state = results[0]
    for rank, (their_losses, their_state) in enumerate(results):
        assert torch.equal(their_losses, losses), f"rank {rank} has other losses"
        different = [key for key in state if not torch.equal(their_state[key], state[key])]
        assert not different, f"rank {rank} has other {different}"
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(losses, expected[0])
    assert list(state) == list(expected[1])
    for key, value in state.items():
        close(value, expected[1][key], msg=lambda text, key=key: f"{key}: {text}")


def cases():
    """Every network on every mesh; on eight ranks, which are slow on two cores, only some."""
    for name in NETWORKS:
        for axes in FLAT_MESHES if NETWORKS[name][1] is IMAGE else MESHES:
            if len(axes) < 3 or name in ("unet", "normed", "dropout"):
                yield pytest.param(name, axes, id=f"{name}-{describe(axes)}")


def describe(axes):
    return "-".join(f"{axis}{num}" for axis, num in axes.items())


@pytest.mark.every(5)
@pytest.mark.parametrize(("name", "axes"), [*cases()])
def test_training_gives_the_losses_and_weights_of_one_process(team_of, name, axes):
    assert_same(run(team_of, axes, name, "adam"), serial(name, "adam"))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("resnet3d", {"depth": 3}),
        ("unet", {"depth": 2, "height": 2, "width": 2}),
        ("unet", {"channel": 2, "depth": 2}),
    ],
    ids=["resnet3d", "unet", "unet, channels"],
)
def test_halos_that_travel_behind_the_interior_train_as_one_process(team_of, name, axes):
    assert_same(run(team_of, axes, name, "sgd", overlap=True), serial(name, "sgd"))


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["gated", "resnet3d", "unet", "normed"])
@pytest.mark.parametrize(
    "axes",
    [
        {"sample": 2, "depth": 2},
        {"sample": 2, "channel": 2},
        {"channel": 2},
        {"channel": 2, "depth": 2, "height": 2},
    ],
    ids=str,
)
def test_training_sharded_weights_gives_those_of_one_process(team_of, name, axes):
    assert_same(run(team_of, axes, name, "adam", shard_weights=True), serial(name, "adam"))


def test_the_networks_learn():
    for name in NETWORKS:
        losses, state = serial(name, "adam")
        assert losses.isfinite().all()
        torch.manual_seed(5)
        fresh = NETWORKS[name][0]().double().state_dict()
        moved = [
            key for key in fresh if not torch.allclose(state[key].double(), fresh[key].double())
        ]
        assert len(moved) > len(fresh) // 2, name
