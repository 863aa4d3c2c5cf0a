"""Batch norm by the kernels of SyncBatchNorm: on ranks that share one GPU, and their passes."""

import copy
from contextlib import ExitStack, contextmanager
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.kernels import norm
from hyperslab.testing import Team, assert_same_as_serial, averaged, seeded

pytestmark = pytest.mark.gpu

FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(3, 5, 7, 9), (2, 64, 33, 20), (2, 3, 5, 7, 6), (1, 17, 1, 40, 40), (37, 6), (4, 5, 30)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 5e-3}
PASSES = (
    "batch_norm_update_stats",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)


def close(ours, exact, dtype):
    rounding = ROUNDING[dtype]
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rounding, atol=rounding)


def passes_of(x, grad, weight, bias):
    """What the four functions make of a piece that is the whole."""
    mean, var = norm.mean_and_variance(x)
    scale = torch.rsqrt(var + 1e-5)
    out = norm.normalize(x, mean, scale, weight, bias)
    grad = norm.in_memory_of(x, grad)
    sums = norm.gradient_sums(grad, x, mean, scale)
    count = torch.tensor([x.numel() // x.shape[1]], dtype=torch.int32, device=x.device)
    home = norm.input_gradient(grad, x, mean, scale, weight, torch.stack(sums), count)
    return mean, var, out, *sums, home


@pytest.mark.parametrize("offset", [0, 30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pass_rounds_as_its_dtype_does(shape, last, dtype, offset):
    kind = FORMATS.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
    x = (seeded(*shape) + offset).to("cuda", dtype).contiguous(memory_format=kind)
    grad = seeded(*shape, seed=1).to("cuda", dtype)
    weight, bias = seeded(2, shape[1], seed=2).cuda()
    exact = passes_of(x.double().cpu(), grad.double().cpu(), weight.cpu(), bias.cpu())
    made = passes_of(x, grad, weight, bias)
    for number, (ours, theirs) in enumerate(zip(made, exact, strict=True)):
        loose = {3: 1 / 30, 4: 1 / 30}.get(number, 1)  # sums of thousands
        close(ours.cpu() * loose, theirs * loose, dtype)
    assert made[2].stride() == x.stride()
    assert made[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.fixture(scope="module")
def team():
    with Team(2, timeout_seconds=120) as team:
        yield team


@contextmanager
def noted_passes():
    """Kernels of SyncBatchNorm that say how often they were called."""
    with ExitStack() as stack:
        noted = [Mock(wraps=getattr(torch, name)) for name in PASSES]
        for name, function in zip(PASSES, noted, strict=True):
            stack.enter_context(patch.object(torch, name, function))
        yield noted


def compare(axes, cuts, kind):
    mesh = hs.init(**axes, device="cuda", timeout_seconds=60)
    ends = [seeded(4, seed=1), seeded(4, seed=2)]

    def norm(x, w, b):
        x = x.contiguous(memory_format=kind)
        return F.batch_norm(x, None, None, w, b, training=True).relu_()

    assert_same_as_serial(norm, [seeded(3, 4, 11, 9, 10) + 3], ends, mesh=mesh, cuts=cuts)


MESHES = {
    "uneven": ({"depth": 2}, {"depth": [0, 1, 11]}),
    "one without elements": ({"width": 2}, {"width": [0, 10, 10]}),
    "samples": ({"sample": 2}, None),
}


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
@pytest.mark.parametrize("name", MESHES)
def test_split_tensors_have_the_numbers_of_one_process(team, name, last):
    team.run(compare, *MESHES[name], FORMATS[5] if last else torch.contiguous_format)


def train(dtype):
    """Two steps of a module; returns how often each pass ran."""
    mesh = hs.init(depth=2, device="cuda", timeout_seconds=60)
    serial = nn.BatchNorm3d(16).double().cuda()
    ours = copy.deepcopy(serial).float()
    with noted_passes() as noted:
        for step in range(2):
            check_step(ours, serial, mesh, dtype, step)
    for mine, theirs in zip(ours.buffers(), serial.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        close(averaged(mine, mesh) / 100, theirs.grad / 100, dtype)
    return [each.call_count for each in noted]


def check_step(ours, serial, mesh, dtype, step):
    shape = (2, 16, 24, 20, 18)
    x = ((seeded(*shape, seed=step).cuda() + step) * (step + 1)).to(dtype)
    coefficients = seeded(*shape, seed=5 + step).to(x)
    taken, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = ours(hs.shard(taken, mesh).contiguous(memory_format=FORMATS[5]))
    (out * coefficients).sum().backward()
    expected = serial(exact)
    (expected * coefficients).sum().backward()
    close(hs.gather(out), expected, dtype)
    close(taken.grad, exact.grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_module_trains_by_one_pass_for_each_part(team, dtype):
    assert team.run(train, dtype) == [[2, 2, 2, 2]] * 2


def check_penalty():
    mesh, grads = hs.init(depth=2, device="cuda", timeout_seconds=60), []
    for parallel in (False, True):
        leaf, weight = seeded(2, 3, 6, 5, 4).cuda().requires_grad_(), seeded(3).cuda()
        weight.requires_grad_()
        x = hs.shard(leaf, mesh) if parallel else leaf
        out = F.batch_norm(x.contiguous(memory_format=FORMATS[5]), None, None, weight, None, True)
        loss = (out**3 * seeded(*leaf.shape, seed=3).cuda()).sum()
        (grad,) = torch.autograd.grad(loss, x.local if parallel else x, create_graph=True)
        ((x.with_local(grad / 2) if parallel else grad) ** 2).sum().backward()
        grads.append((leaf.grad, averaged(weight, mesh) if parallel else weight.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


def test_a_gradient_penalty_has_the_gradients_of_one_process(team):
    team.run(check_penalty)
