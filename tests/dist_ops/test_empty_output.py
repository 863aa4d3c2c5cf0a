import torch

from hyperslab.dist_ops.empty_output import empty_output


def test_inputs_get_zero_gradients_twice_over():
    x, weight = (torch.ones(n, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    out = empty_output((2, 0), x, None, weight)
    assert out.shape == (2, 0)
    assert out.dtype == torch.float64
    grads = torch.autograd.grad(out.sum(), [x, weight], create_graph=True)
    assert [grad.tolist() for grad in grads] == [[0, 0, 0], [0, 0]]
    again = torch.autograd.grad(sum(grad.sum() for grad in grads), [x, weight])
    assert [grad.tolist() for grad in again] == [[0, 0, 0], [0, 0]]


def test_inputs_that_want_none_get_none():
    x, weight = torch.ones(3), torch.ones(2, requires_grad=True)
    empty_output((0,), x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad.tolist() == [0, 0]
