"""NVIDIA's MPS, under which kernels of several processes run on one GPU at the same time."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def mps(wanted: bool = True) -> Iterator[None]:
    """Within it, processes that are started share the GPU; before it, none may have been."""
    if not wanted:
        yield
        return
    before = {name: os.environ.get(name) for name in FOLDERS}
    with tempfile.TemporaryDirectory() as pipes, tempfile.TemporaryDirectory() as logs:
        os.environ |= dict(zip(FOLDERS, (pipes, logs), strict=True))
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
