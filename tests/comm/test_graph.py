"""Communication as an operator of a graph."""

import torch

from hyperslab.comm.graph import Kind, as_operator


def test_an_operator_takes_and_gives_contiguous_tensors_as_it_promises_a_compiler():
    given = []

    def run(inputs):
        given.extend(inputs)
        return [inputs[0].t().clone().t()]

    x = torch.arange(6.0).view(2, 3).t()
    (out,) = as_operator(run, [x], [Kind(x.shape, x.dtype, x.device)])
    assert given[0].is_contiguous()
    assert out.is_contiguous()
    assert torch.equal(out, x)
