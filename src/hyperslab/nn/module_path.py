"""In which part of a module an error was raised."""

from __future__ import annotations

from torch import nn

from hyperslab.errors import HyperslabError


def add_module_path(error: Exception, module: nn.Module) -> None:
    """Adds to ``error``, which came out of ``module``, the name of the innermost part it came from.

    It is found in the error's traceback, so that modules need no hooks.
    """
    names = {id(part): name for name, part in module.named_modules()}
    innermost, trace = module, error.__traceback__
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module) and id(part) in names:
            innermost = part
        trace = trace.tb_next
    name = names[id(innermost)] or "the outermost module"
    where = f"in {name}, a {type(innermost).__name__.removeprefix('Parallel')}"
    if isinstance(error, HyperslabError) and error.args:
        error.args = (f"{error.args[0]} ({where})", *error.args[1:])
    else:
        error.add_note(where)
