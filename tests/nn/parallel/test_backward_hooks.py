import warnings
from contextlib import nullcontext

import pytest
from torch import nn

import hyperslab as hs
from hyperslab.testing import seeded


def small(**axes):
    mesh = hs.init(device="cpu", **axes)
    return hs.parallelize(nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU()).double(), mesh), mesh


def ignore(*_):
    pass


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # torch's own, as vague
@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_that_come_after_parallelize_are_told_of_once(name):
    model, mesh = small(height=2)
    x = hs.shard(seeded(1, 2, 4, 4), mesh)
    model(x)
    getattr(model[0], name)(ignore)
    told = pytest.warns(UserWarning, match=r"do not fire on Slabs: those of 0 will not")
    with told if mesh.rank == 0 else nullcontext():
        model(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "full backward hooks")
        model(x)


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
def test_on_one_rank_those_of_the_module_itself_are_told_of():
    model, mesh = small()
    model.register_full_backward_hook(ignore)
    with pytest.warns(UserWarning, match=r"do not fire on Slabs: those of the module itself"):
        model(hs.shard(seeded(1, 2, 4, 4), mesh))


def test_hooks_that_fire_are_not_told_of():
    model, _ = small()
    fired = []
    model[0].register_full_backward_hook(lambda *_: fired.append(True))
    model(seeded(1, 2, 4, 4).requires_grad_()).sum().backward()
    assert fired
