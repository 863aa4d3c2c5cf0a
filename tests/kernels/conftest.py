"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for early."""

from importlib.util import find_spec

import torch
from triton_interpreter import use_triton_interpreter

if not torch.cuda.is_available() and find_spec("triton"):
    use_triton_interpreter()
