import torch

from hyperslab.kernels.fused import Launch


class FakeKernel:
    """Stands for a Triton kernel: notes how it, and what it has compiled, are called."""

    def __init__(self):
        self.looked_at, self.run_again = [], []

    def __getitem__(self, grid):
        def compile_and_run(*args, **named):
            self.looked_at.append((grid, args, named))
            return FakeCompiled(self)

        return compile_and_run


class FakeCompiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.run_again.append((grid, args))


def make(kernel):
    return Launch(kernel, (7,), torch.device("cpu"), (5, 6), {"BLOCK": 64}, {"num_warps": 2})


def test_what_was_compiled_is_called_again_for_tensors_of_the_same_kind():
    kernel, a, b = FakeKernel(), torch.zeros(8), torch.zeros(8)
    launch = make(kernel)
    launch(a, None)
    launch(b, None)
    grid = (7, 1, 1)
    assert kernel.looked_at == [(grid, (a, None, 5, 6), {"BLOCK": 64, "num_warps": 2})]
    assert kernel.run_again == [(grid, (b, None, 5, 6, 64))]


def test_triton_is_asked_where_a_tensor_differs_in_dtype_or_in_where_it_begins():
    kernel, x = FakeKernel(), torch.zeros(8)
    launch = make(kernel)
    for args in ((x, None), (x.double(), None), (x[1:], None), (x, x), (x[4:], x)):
        launch(*args)
    assert len(kernel.looked_at) == 4
    assert len(kernel.run_again) == 1
