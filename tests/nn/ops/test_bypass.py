"""Functions of torch that do not ask for a rule by themselves."""

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, on_ranks, seeded

X = (2, 3, 6, 5)


class Reversed(Function):
    """Gives the gradient back with another sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Doubled(Reversed):
    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def split():
    mesh = hs.init(height=2, device="cpu")
    return hs.shard(seeded(*X).requires_grad_(), mesh)


@on_ranks(2)
def test_a_function_of_ones_own_is_refused_by_its_name():
    x = split()
    with pytest.raises(hs.UnsupportedOp, match=r"^\S+\.Reversed\.apply cannot run .* dim 2 split"):
        Reversed.apply(x)


@on_ranks(2)
def test_a_reentrant_checkpoint_is_refused_with_the_way_out():
    x = split()
    with pytest.raises(hs.UnsupportedOp, match=r"on split tensors.*use_reentrant=False"):
        checkpoint(torch.tanh, x, use_reentrant=True)


@on_ranks(2)
def test_a_function_of_ones_own_runs_by_its_rule():
    @hs.register(Doubled.apply)
    def doubled(x):
        return x.with_local(Doubled.apply(x.local))

    mesh = hs.init(height=2, device="cpu")
    assert_same_as_serial(lambda x: Doubled.apply(x) * 3, [seeded(*X)], mesh=mesh)
    with pytest.raises(hs.UnsupportedOp, match=r"Reversed\.apply"):
        Reversed.apply(split())


@on_ranks(2)
def test_a_function_of_ones_own_runs_on_a_tensor_that_is_whole():
    mesh = hs.init(height=2, device="cpu")
    assert_same_as_serial(lambda x: Reversed.apply(x.mean((2, 3))).sin(), [seeded(*X)], mesh=mesh)


@on_ranks(2)
def test_a_checkpoint_that_would_lose_gradients_is_refused():
    with pytest.raises(hs.UnsupportedOp, match=r"CheckpointFunction\.apply"):
        checkpoint(torch.relu, split(), use_reentrant=True)


@on_ranks(2)
def test_torch_takes_a_slab_for_a_tensor_where_it_is_asked():
    x = split()
    assert torch.jit.isinstance(x, Tensor)
    assert torch.jit.isinstance([x, x], list[Tensor])
    assert torch.jit.isinstance({"x": x}, dict[str, Tensor])
    assert not torch.jit.isinstance(x, (int, list[int]))
    assert torch.jit.isinstance(torch.zeros(1), Tensor)


def refine(x: Tensor | None) -> Tensor:
    if torch.jit.isinstance(x, Tensor):
        return x + 1
    return torch.zeros(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_functions_are_still_scripted():
    assert hs.Slab  # loads what changes torch
    assert torch.jit.script(refine)(torch.ones(1)).item() == 2


@on_ranks(2)
@pytest.mark.parametrize("function", [torch.tensor, torch.asarray])
def test_a_slab_is_not_copied_into_a_plain_tensor(function):
    x = split()
    with pytest.raises(hs.UnsupportedOp, match=r"^torch\.tensor, .* cannot run .*as_tensor\(x\)"):
        function(x)


@on_ranks(2)
def test_a_slab_is_a_tensor_already():
    x = split()
    assert torch.as_tensor(x) is x
    assert torch.as_tensor(x, dtype=x.dtype, device="cpu") is x
    short = torch.as_tensor(data=x, dtype=torch.float32)
    assert short.dtype == torch.float32
    assert short.local.equal(x.local.float())
    assert short.requires_grad
    mesh = hs.init(height=2, device="cpu")
    assert_same_as_serial(lambda x: torch.as_tensor(x * x).sin(), [seeded(*X)], mesh=mesh)


def halves(x: Tensor) -> Tensor:
    return x / torch.as_tensor(2.0, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_data_becomes_a_tensor_as_ever():
    assert hs.Slab  # loads what changes torch
    x = seeded(3)
    assert torch.as_tensor(x) is x
    assert torch.as_tensor([1, 2], dtype=torch.float32).tolist() == [1.0, 2.0]
    assert torch.jit.script(halves)(x).equal(x / 2)
    assert torch.compile(halves, backend="eager", fullgraph=True)(x).equal(x / 2)


@on_ranks(2)
def test_a_slab_is_a_tensor_in_a_graph_too():
    x = split().detach()
    step = torch.compile(lambda x: torch.as_tensor(x) * 2, backend="eager", fullgraph=True)
    assert hs.gather(step(x)).equal(hs.gather(x) * 2)


@on_ranks(2)
def test_data_is_outside_the_graph():
    x = split()
    assert isinstance(x.data, hs.Slab)
    assert not x.data.requires_grad
    assert x.data.local.data_ptr() == x.local.data_ptr()
