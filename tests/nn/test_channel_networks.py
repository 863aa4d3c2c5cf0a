"""Networks of every family, trained on meshes that cut channels: the weights of one process."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.testing import seeded, whole
from hyperslab.testing.strategies import Place

NUM_STEPS = 5
X, NUM_CLASSES = (4, 2, 8, 8, 8), 3
MESHES = [
    {"channel": 2},
    {"channel": 4},
    {"channel": 3},  # 8 channels are 3, 3 and 2
    {"channel": 2, "depth": 2},
    {"sample": 2, "channel": 2},
    {"channel": 2, "height": 2, "width": 2},
]


def conv(num_in, num_out, size=3, stride=1, groups=1, norm=nn.BatchNorm3d, act=nn.ReLU):
    layer = nn.Conv3d(num_in, num_out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, norm(num_out), act())


def head(num_in):
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(num_in, NUM_CLASSES))


def plain():
    return nn.Sequential(conv(2, 8), nn.MaxPool3d(2), conv(8, 8, act=nn.GELU), head(8))


class Residual(nn.Module):
    def __init__(self, num_in, num_out, stride):
        super().__init__()
        last = conv(num_out, num_out, act=nn.Identity)
        self.body = nn.Sequential(conv(num_in, num_out, 3, stride), last)
        self.skip = conv(num_in, num_out, 1, stride, act=nn.Identity)

    def forward(self, x):
        out = self.body(x)
        out += self.skip(x)
        return F.relu(out, inplace=True)


def resnet():
    return nn.Sequential(conv(2, 4), Residual(4, 8, 1), Residual(8, 12, 2), head(12))


class Dense(nn.Module):
    def __init__(self, num_in, growth, depth):
        super().__init__()
        widths = [num_in + n * growth for n in range(depth)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm3d(n), nn.ReLU(), nn.Conv3d(n, growth, 3, padding=1))
            for n in widths
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet():
    narrow = nn.Sequential(conv(17, 8, 1), nn.AvgPool3d(2))
    return nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), Dense(8, 3, 3), narrow, head(8))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        norm = functools.partial(nn.InstanceNorm3d, affine=True)
        self.down, self.deep = conv(2, 8, norm=norm), conv(8, 12, norm=norm, act=nn.LeakyReLU)
        self.up = nn.ConvTranspose3d(12, 8, 2, 2)
        self.fuse, self.out = conv(16, 8, norm=norm), nn.Conv3d(8, NUM_CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        up = self.up(self.deep(F.max_pool3d(skip, 2)))
        return self.out(self.fuse(torch.cat([skip, up], 1)))


class Inverted(nn.Module):
    """Depthwise convolutions, and a gate made of global means."""

    def __init__(self, channels, hidden):
        super().__init__()
        self.expand = conv(channels, hidden, 1, act=nn.Hardswish)
        self.deep = conv(hidden, hidden, 3, groups=hidden, act=nn.SiLU)
        self.squeeze, self.excite = nn.Conv3d(hidden, 4, 1), nn.Conv3d(4, hidden, 1)
        self.project = conv(hidden, channels, 1, act=nn.Identity)

    def forward(self, x):
        y = self.deep(self.expand(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool3d(y, 1)))))
        return x + self.project(y * gate)


def mobilenet():
    return nn.Sequential(conv(2, 8, 3, 2), Inverted(8, 16), Inverted(8, 12), head(8))


class Shuffled(nn.Module):
    """Half of the channels go through, and halves are interleaved."""

    def __init__(self, channels):
        super().__init__()
        half = channels // 2
        deep = conv(half, half, 3, groups=half, act=nn.Identity)
        self.branch = nn.Sequential(conv(half, half, 1), deep, conv(half, half, 1))

    def forward(self, x):
        kept, changed = x.chunk(2, 1)
        x = torch.cat([kept, self.branch(changed)], 1)
        n, c, *space = x.shape
        return x.view(n, 2, c // 2, *space).transpose(1, 2).reshape(n, c, *space)


def shufflenet():
    return nn.Sequential(conv(2, 8), Shuffled(8), nn.MaxPool3d(2), Shuffled(8), head(8))


class Attention(nn.Module):
    """As timm writes it, with one dense layer for queries, keys and values, or as most others."""

    def __init__(self, width, num_heads, joint):
        super().__init__()
        self.num_heads, self.joint = num_heads, joint
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        sizes = [3 * width] if joint else [width] * 3
        self.qkv = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, x):
        n, num, width = x.shape
        y, parts = self.norm(x), (self.num_heads, width // self.num_heads)
        if self.joint:
            q, k, v = self.qkv[0](y).reshape(n, num, 3, *parts).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (layer(y).view(n, num, *parts).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(n, num, width))


class Transformer(nn.Module):
    """Keys are those of a whole sample: a plan re-cuts space to samples where it begins."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv3d(2, 8, 4, 4)
        layers = [Attention(8, 4, joint=True), Attention(8, 4, joint=False)]
        layers += [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)]
        self.tokens = nn.Sequential(Tokens(8), *layers)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x):
        return self.head(self.tokens(self.patch(x))[:, 0])


class Tokens(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 9, width))

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(conv(2, 8, 3, 2), nn.Flatten(), nn.Linear(512, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Unflatten(1, (8, 2, 2, 2)))
        last = nn.ConvTranspose3d(4, 2, 2, 2)
        self.grow = nn.Sequential(nn.Upsample(scale_factor=2), conv(8, 4), last)

    def forward(self, x):
        return self.grow(self.decoder(torch.tanh(self.encoder(x))))


def normed():
    """Norms over groups, samples and layers, whose groups do not end where ranks do."""
    groups = functools.partial(nn.GroupNorm, 2)
    layers = [conv(2, 8, norm=groups, act=nn.Mish), conv(8, 6, norm=nn.InstanceNorm3d)]
    layers += [nn.LayerNorm((6, 8, 8, 8)), nn.PReLU(6), conv(6, 8, norm=groups)]
    return nn.Sequential(*layers, head(8))


FAMILIES = {
    "plain": plain,
    "resnet": resnet,
    "densenet": densenet,
    "unet": UNet,
    "mobilenet": mobilenet,
    "shufflenet": shufflenet,
    "transformer": Transformer,
    "autoencoder": Autoencoder,
    "normed": normed,
}


def dice(scores, labels):
    truth = torch.zeros_like(scores).scatter_(1, labels.unsqueeze(1), 1)
    guess = scores.softmax(1)
    shared, both = (guess * truth).sum((0, 2, 3, 4)), (guess + truth).sum((0, 2, 3, 4))
    return 1 - (2 * shared / both).mean()


def loss_of(name, out, x, step):
    if name == "autoencoder":
        return F.mse_loss(out, x)
    shape = X[:1] + (X[2:] if name == "unet" else ())
    labels = (seeded(*shape, seed=50 + step) * 10).long() % NUM_CLASSES
    if name == "unet" and isinstance(x, hs.Slab):
        labels = hs.shard(labels, x.mesh, axes=("sample", "depth", "height", "width"))
    return dice(out, labels) if name == "unet" else F.cross_entropy(out, labels)


def trained(place, name):
    """The loss of every step, then weights and buffers; on Slabs if there is a place."""
    torch.manual_seed(5)
    model = FAMILIES[name]().double()
    if place is not None:
        mesh = place.mesh()
        plan = {"tokens": {"channel": place.axes["channel"]}} if name == "transformer" else None
        model = hs.parallelize(model, mesh, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for step in range(NUM_STEPS):
        x = seeded(*X, seed=step)
        x = x if place is None else hs.shard(x, mesh)
        optimizer.zero_grad()
        loss = loss_of(name, model(x), x, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = {key: whole(each).clone() for key, each in model.state_dict().items()}
    return torch.stack(losses), state


@functools.cache
def serial(name):
    with torch.random.fork_rng(devices=[]):
        return trained(None, name)


@pytest.mark.every(6)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_five_steps_give_the_weights_of_one_process(run, name, axes):
    due = serial(name)
    assert due[0][0] != due[0][-1]
    for ours in run(Place(axes), trained, name):
        torch.testing.assert_close(ours, due, rtol=1e-10, atol=1e-10)
