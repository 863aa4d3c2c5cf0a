"""The operators on CUDA: alone, and on ranks that share one GPU and talk through the host."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fuzzing.networks import stress
from torch import nn

import hyperslab as hs
from hyperslab.dist_ops import choices
from hyperslab.testing import Team, assert_same_as_serial, seeded

pytestmark = pytest.mark.gpu

MESHES = {
    "alone": {},
    "sample=2": {"sample": 2},
    "depth=2": {"depth": 2},
    "depth=2 x height=2": {"depth": 2, "height": 2},
    "sample=2 x width=2": {"sample": 2, "width": 2},
    "channel=2": {"channel": 2},
    "channel=2 x depth=2": {"channel": 2, "depth": 2},
}
UNEVEN = {"depth": [0, 3, 11], "height": [0, 8, 9], "width": [0, 4, 10]}


def pad_and_conv(x, w):
    return x + F.conv3d(F.pad(x, (1,) * 6, mode="circular"), w)


def gate(x, w):
    return x * torch.sigmoid(F.linear(x.mean((2, 3, 4)), w)).view(3, 4, 1, 1, 1)


def classes(x):
    labels = (seeded(3, 11, 9, 10, seed=3) * 7).long().remainder(4).to(x.device)
    return F.cross_entropy(x, labels, label_smoothing=0.1)


def written(x, w):
    y = x * w
    y[:, 1, 2:9:3] = x[:, 0, :3] * 2
    y[:, :, 5:8] += 1
    return y


CASES = {
    "slices": (lambda x: torch.cat([x[:, :, 1:9:2], x.flip(2)[:, :, :3]], 2).roll(2, 2), []),
    "writing": (written, [(4, 1, 1, 1)]),
    "linear resize": (lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"), []),
    "nearest resize": (lambda x: F.interpolate(x, size=(7, 20, 11)), []),
    "adaptive max pool": (lambda x: F.adaptive_max_pool3d(x, (4, 3, 7)), []),
    "max pool and back": (
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, 2, return_indices=True), 2, 2, 0, x.shape),
        [],
    ),
    "softmax": (lambda x: x.softmax(2) * F.log_softmax(x, 4), []),
    "spread": (lambda x: (x - x.amax((2, 4), keepdim=True)) / x.std((2, 3), keepdim=True), []),
    "norms": (lambda x: F.normalize(x, dim=2) + F.local_response_norm(x, 2), []),
    "running sums": (lambda x: x.cumsum(2), []),
    "products": (lambda x, w: torch.einsum("ncdhw,kw->nkdh", x, w), [(5, 10)]),
    "other losses": (
        lambda x, w: F.smooth_l1_loss(x, w) + F.binary_cross_entropy_with_logits(x, w.sigmoid()),
        [(3, 4, 11, 9, 10)],
    ),
    "conv": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [(6, 4, 3, 3, 3), (6,)]),
    "strided conv": (
        lambda x, w: F.conv3d(x, w, stride=(3, 2, 1), padding=(1, 2, 0)),
        [(6, 4, 4, 2, 4)],
    ),
    "dilated conv": (lambda x, w: F.conv3d(x, w, dilation=2, groups=2), [(6, 2, 3, 3, 3)]),
    "circular conv": (pad_and_conv, [(4, 4, 3, 3, 3)]),
    "transposed conv": (
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=1),
        [(4, 5, 3, 3, 3), (5,)],
    ),
    "max pool": (lambda x: F.max_pool3d(x, 3, 2, 1, ceil_mode=True), []),
    "avg pool": (lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False), []),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(4,), (4,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(4,), (4,)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (11, 9, 10), w), [(11, 9, 10)]),
    "pointwise": (lambda x, w: torch.sin(x * w).add_(1) - (1 - x) / (x * x + 1), [(4, 1, 1, 1)]),
    "cat": (lambda x: torch.cat([x, 2 * x], 2), []),
    "dense head": (lambda x, w: F.linear(x.flatten(1), w), [(5, 4 * 11 * 9 * 10)]),
    "gate": (gate, [(4, 4)]),
    "cross entropy": (classes, []),
}  # fmt: skip


def compare(case, axes, uneven, overlap):
    torch.backends.cudnn.allow_tf32 = False
    choices.hides_exchange = lambda *args, **options: overlap
    mesh = hs.init(**axes, device="cuda", timeout_seconds=60)
    assert mesh.device.type == "cuda"
    function, shapes = CASES[case]
    weights = [seeded(*shape, seed=1) for shape in shapes]
    cuts = {axis: UNEVEN[axis] for axis in axes if axis in UNEVEN} if uneven else None
    assert_same_as_serial(function, [seeded(3, 4, 11, 9, 10)], weights, mesh=mesh, cuts=cuts)


@pytest.fixture(scope="module", params=MESHES)
def team_and_axes(request):
    axes = MESHES[request.param]
    num_ranks = torch.Size(axes.values()).numel()
    with Team(num_ranks, timeout_seconds=120) as team:
        yield team, axes


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("case", CASES)
def test_an_operator_on_cuda_gives_the_numbers_of_one_process(team_and_axes, case, uneven):
    team, axes = team_and_axes
    for overlap in (False, True) if "conv" in case else (False,):
        team.run(compare, case, axes, uneven, overlap)


def train(axes, shard_weights, transport):
    torch.manual_seed(0)
    mesh = hs.init(**axes, device="cuda", timeout_seconds=60, transport=transport)
    net = nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.MaxPool3d(2), nn.Conv3d(8, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8 * 4 * 4 * 4, 3),
    ).double()  # fmt: skip
    model = hs.parallelize(net, mesh, shard_weights=shard_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x, y = seeded(4, 2, 16, 16, 16, seed=step), seeded(4, 3, seed=step)
        loss = F.mse_loss(model(hs.shard(x, mesh)), hs.shard(y, mesh))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("transport", ["auto", "host"])
@pytest.mark.parametrize("shard_weights", [False, True], ids=["ddp", "fsdp"])
def test_training_on_ranks_that_share_the_gpu_gives_the_losses_of_one(
    team_and_axes, shard_weights, transport
):
    team, axes = team_and_axes
    losses = team.run(train, axes, shard_weights, transport)
    with Team(1, timeout_seconds=120) as alone:
        (serial,) = alone.run(train, {}, False, "auto")
    for theirs in losses:
        torch.testing.assert_close(theirs, serial, rtol=1e-9, atol=1e-9)


def train_compiled(axes, backend):
    mesh = hs.init(**axes, device="cuda", timeout_seconds=120)
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv3d(4, 6, 3, padding=1), nn.BatchNorm3d(6), nn.GELU(), nn.Conv3d(6, 2, 3, 2)
    ).to("cuda", torch.float64)
    ours = hs.parallelize(copy.deepcopy(plain), mesh)
    model, x = torch.compile(ours, fullgraph=True, backend=backend), seeded(3, 4, 11, 9, 10).cuda()
    for _ in range(2):
        out = model(hs.shard(x, mesh))
        coefficients = seeded(*out.shape).cuda()
        (out * coefficients).sum().backward()
        (plain(x) * coefficients).sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_as_the_plain_one_does(backend):
    with Team(2, timeout_seconds=300) as team:
        team.run(train_compiled, {"depth": 2}, backend)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
def test_random_networks_give_the_numbers_of_one_process():
    outcomes = list(stress(range(5000, 5060), device="cuda"))
    assert [one for one in outcomes if one.verdict != "right"] == []
