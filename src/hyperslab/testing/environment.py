"""What ranks find around them: the variables of torchrun, modules already loaded."""

import os
import sys

WARM = ("hyperslab", "hypothesis", "numpy", "pytest", "torch._dynamo", "torch.distributed")
"""Packages that are loaded before the fork if the caller uses them (any optimizer does use
torch._dynamo). Importing them starts no thread and leaves CUDA alone, which cannot be said of all
of torch, nor of a test file."""


def torchrun_environment(num_ranks: int, port: int) -> dict[str, str]:
    """The caller's variables, and those of torchrun apart from the ranks' own numbers."""
    # A caller that itself runs under torchrun must not send the ranks to its own store.
    ours = {key: each for key, each in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    return ours | {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }


def warm_modules() -> list[str]:
    """The modules of ``WARM`` that this process has loaded."""
    return [name for name in list(sys.modules) if any(f"{name}.".startswith(f"{w}.") for w in WARM)]
