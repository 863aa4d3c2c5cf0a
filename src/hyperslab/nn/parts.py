"""What passes of a module depend on besides their arguments, asked before every one of them."""

from __future__ import annotations

from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.module import _has_any_global_hook

_SETTINGS = (bool, int, float, str)


class Parts:
    """The modules inside of a module, as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [*module.modules()]
        self._are_compiled = any(
            isinstance(part, ScriptModule) or "_orig_mod" in part._modules for part in self.modules
        )
        self._ask_for_types = any(map(_asks_for_types, {type(part) for part in self.modules}))
        self._tables = [] if self._are_compiled else [part.__dict__ for part in self.modules]
        self._children = [[*table["_modules"].values()] for table in self._tables]
        self._users = [
            table
            for part, table in zip(self.modules, self._tables, strict=False)
            if not type(part).__module__.startswith("torch.nn.")
        ]

    def are_there_still(self) -> bool:
        return self._children == [[*table["_modules"].values()] for table in self._tables]

    def settings(self) -> tuple[object, ...] | None:
        """Which are in training, and numbers and words that users' modules have as attributes.

        None where hooks, a compiler or code that asks for types would be given plain tensors.
        """
        if self._are_compiled or self._ask_for_types or _has_any_global_hook():
            return None
        own, *inner = self._tables  # hooks of the module itself are given Slabs
        if own.get("_compiled_call_impl"):
            return None
        for table in inner:
            if (
                table["_forward_hooks"]
                or table["_forward_pre_hooks"]
                or table["_backward_hooks"]
                or table.get("_backward_pre_hooks")
                or table.get("_compiled_call_impl")
            ):
                return None
        found = [
            (name, value)
            for table in self._users
            for name, value in table.items()
            if type(value) in _SETTINGS
        ]
        return (*found, *[table["training"] for table in self._tables])


def _asks_for_types(cls: type[nn.Module]) -> bool:
    """Whether methods of ``cls`` mention what tells a Slab from a tensor, as far as one can see."""
    if cls.__module__.startswith("torch.nn."):
        return False
    codes = [code for each in vars(cls).values() if (code := getattr(each, "__code__", None))]
    names = {name for code in codes for name in code.co_names}
    return bool(names & {"Slab", "is_tensor"}) or {"isinstance", "Tensor"} <= names
