import warnings

import pytest
from torch import nn

import hyperslab as hs
from hyperslab.testing import seeded


def small():
    mesh = hs.init(device="cpu")
    return hs.parallelize(nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU()).double(), mesh), mesh


def ignore(*_):
    pass


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # torch's own, as vague
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_that_come_after_parallelize_are_told_of_once(kind):
    model, mesh = small()
    x = hs.shard(seeded(1, 2, 4, 4), mesh)
    model(x)
    getattr(model[0], kind)(ignore)
    with pytest.warns(UserWarning, match=r"do not fire on Slabs: those of 0 will not"):
        model(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "full backward hooks")
        model(x)


def test_hooks_that_fire_are_not_told_of():
    model, _ = small()
    fired = []
    model[0].register_full_backward_hook(lambda *_: fired.append(True))
    model(seeded(1, 2, 4, 4).requires_grad_()).sum().backward()
    assert fired
