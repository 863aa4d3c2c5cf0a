"""What ranks find around them: the variables of torchrun, a free port, modules already loaded."""

import os
import socket
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


def reserve_port() -> socket.socket:
    """A socket bound to a port that only those who ask for it by number will get.

    It never listens, and both it and torch's store set SO_REUSEADDR, so the store may listen
    there, while the system gives the port to nobody who asks for any free one.
    """
    if sys.platform == "linux" and socket.has_dualstack_ipv6():
        # As torch's store: all addresses, so that none of them is in use.
        reserved = socket.socket(socket.AF_INET6)
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        reserved = socket.socket(socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("" if sys.platform == "linux" else "127.0.0.1", 0))
    return reserved


def warm_modules() -> list[str]:
    """The modules of ``WARM`` that this process has loaded."""
    return [name for name in list(sys.modules) if any(f"{name}.".startswith(f"{w}.") for w in WARM)]
