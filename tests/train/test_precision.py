import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.train.precision import float32_products, forward_context


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp64", "tf32"])
def test_on_cpus_forward_passes_run_as_they_are(precision):
    with forward_context(precision, torch.device("cpu")):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_bf16_is_for_gpus():
    with pytest.raises(ConfigError, match="is for GPUs"):
        forward_context("bf16", torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", False), ("bf16", False), ("tf32", True)]
)
def test_short_products_are_those_asked_for_and_only_for_the_run(precision, allowed):
    flags = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [flag.allow_tf32 for flag in flags]
    with float32_products(precision):
        assert [flag.allow_tf32 for flag in flags] == [allowed, allowed]
    assert [flag.allow_tf32 for flag in flags] == before
