"""Communication as an operator of a graph, and who traces."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hyperslab as hs
from hyperslab.comm import graph
from hyperslab.comm.agree import agree
from hyperslab.comm.graph import TensorSpec, as_operator, cached_constants
from hyperslab.testing import seeded

SHAPE = (2, 2, 9, 6)


def flop_counter():
    from torch.utils.flop_counter import FlopCounterMode  # loads Triton, too early for others

    return FlopCounterMode(display=False)


def test_counting_is_not_tracing():
    from torch.fx.experimental.proxy_tensor import make_fx  # as above

    assert not graph.is_traced()
    with flop_counter():
        assert not graph.is_traced()
        with FakeTensorMode():
            assert graph.is_traced()
    found = []
    make_fx(lambda x: found.append(graph.is_traced()) or x + 1)(torch.ones(2))
    assert found == [True]


def step(model, x):
    out = model(x)
    (out * seeded(*out.shape, seed=1)).sum().backward()


@pytest.mark.ranks(2)
def test_a_step_that_is_counted_is_a_step_as_ever():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
    model, plain = hs.parallelize(net.double(), mesh), nn.Sequential(*net)
    x = hs.shard(seeded(*SHAPE), mesh)
    step(model, x)
    expected = [p.grad for p in plain.parameters()]
    num_calls = len(graph._calls)
    for _ in range(2):
        model.zero_grad()
        with flop_counter() as counter:
            step(model, x)
        assert counter.get_total_flops() > 0
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert len(graph._calls) == num_calls
    told = (ValueError, hs.CommError)
    with flop_counter(), pytest.raises(told, match="no good"):
        agree(ValueError("no good") if mesh.rank else None, mesh)


@pytest.mark.ranks(2)
def test_selective_checkpoints_keep_what_they_like():
    mesh = hs.init(height=2, device="cpu", timeout_seconds=30)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3)).double()
    kept = [torch.ops.aten.convolution.default]
    grads = []
    model = hs.parallelize(net, mesh)
    for run in (
        model,
        lambda x: checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(kept),
        ),
    ):
        model.zero_grad()
        step(run, hs.shard(seeded(*SHAPE), mesh))
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_an_operator_takes_and_gives_contiguous_tensors_as_it_promises_a_compiler():
    given = []

    def run(inputs):
        given.extend(inputs)
        return [inputs[0].t().clone().t()]

    x = torch.arange(6.0).view(2, 3).t()
    (out,) = as_operator(run, [x], [TensorSpec(x.shape, x.dtype, x.device)])
    assert given[0].is_contiguous()
    assert out.is_contiguous()
    assert torch.equal(out, x)


@cached_constants
def conjugates():
    """What, as a tensor on a GPU, is copied before it is read."""
    return torch.tensor([1 + 2j, 3 - 1j]).conj()


def test_constants_that_are_copied_to_be_read_keep_their_values_in_a_graph():
    from torch.fx.experimental.proxy_tensor import make_fx  # as above

    zeros = torch.zeros(2, dtype=torch.complex64)
    traced = make_fx(lambda x: x + conjugates(), tracing_mode="fake")(zeros)
    torch.testing.assert_close(traced(zeros), conjugates().resolve_conj())
