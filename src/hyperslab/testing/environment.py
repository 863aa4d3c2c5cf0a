"""What ranks find around them: the variables of torchrun, modules already loaded."""

import sys

WARM = ("hyperslab", "hypothesis", "numpy", "pytest", "torch._dynamo", "torch.distributed")
"""Packages that are loaded before the fork if the caller uses them (any optimizer does use
torch._dynamo). Importing them starts no thread and leaves CUDA alone, which cannot be said of all
of torch, nor of a test file."""


def warm_modules() -> list[str]:
    """The modules of ``WARM`` that this process has loaded."""
    return [name for name in list(sys.modules) if any(f"{name}.".startswith(f"{w}.") for w in WARM)]
