import pytest

TORCH = """
import sys

class distributed:
    is_initialized = staticmethod(lambda: False)

class testing:
    assert_close = staticmethod(lambda one, other: None)

def ones(*shape): ...

def set_num_threads(num): ...

def manual_seed(seed): ...

sys.modules |= {"torch.distributed": distributed, "torch.testing": testing}
"""


@pytest.fixture
def torch_free(tmp_path):
    """A folder whose programs find all that a server asks of torch, which takes seconds to load."""
    (tmp_path / "torch.py").write_text(TORCH)
    return tmp_path
