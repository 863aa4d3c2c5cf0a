"""Passes have one signature if they do the same but for values."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hyperslab as hs
from hyperslab.nn.call_signature import call_signature

CPU = torch.device("cpu")


def signature(*args, **kwargs):
    return call_signature(args, kwargs, CPU)


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "default dtype": default_dtype,
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, fp32_precision="none"),
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_kernels_depend_on_make_another_signature(what):
    x = torch.ones(1, 3)
    before = signature(x)
    with SETTINGS[what]():
        assert signature(x) != before
    assert signature(x) == before


def test_values_do_not_count_and_all_else_does():
    x = torch.ones(2, 3)
    assert signature(x, 2) == signature(torch.zeros(2, 3), 2)
    others = [
        signature(x, 2.0),
        signature(x, True),
        signature(x, number=2),
        signature(x.t().contiguous().t(), 2),
        signature(x.double(), 2),
        signature(x[:1], 2),
        signature(torch.ones(2, 3, requires_grad=True), 2),
        signature([x], 2),
    ]
    assert len({signature(x, 2), *others}) == 1 + len(others)


def test_a_slab_is_known_by_its_layout():
    x = hs.shard(torch.ones(2, 3), hs.init(device="cpu"))
    assert signature(x) == signature(x.with_local(torch.zeros(2, 3)))
    assert signature(x) != signature(x.local)


@pytest.mark.parametrize("odd", [object(), torch.ones(2).to_sparse(), torch.ones(2, device="meta")])
def test_there_is_none_where_a_pass_may_depend_on_more(odd):
    assert signature(torch.ones(2), odd) is None


def test_there_is_none_without_a_tensor():
    assert signature(2, name="x") is None
