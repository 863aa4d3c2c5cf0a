"""Without a GPU, Triton kernels run in Triton's interpreter, which must be asked for early."""

import os
from dataclasses import replace
from importlib.util import find_spec

import torch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Checks of every integer would take twice the time.
    builder.options = replace(builder.options, sanitize_overflow=False)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        """Bounds of loops are arrays of one number, of which NumPy 2.4 makes no integer."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
