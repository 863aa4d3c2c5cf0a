"""Triton kernels without a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any


def use_triton_interpreter() -> None:
    """Has Triton kernels run in Triton's interpreter.

    To be called before anything of Triton is loaded: it decides then.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Checks of every integer would take twice the time.
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__name__ == "patch_index":
        return

    def patch_index(tensor: Any, scope: Any) -> None:
        """Bounds of loops are arrays of one number, of which NumPy 2.4 makes no integer."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index
