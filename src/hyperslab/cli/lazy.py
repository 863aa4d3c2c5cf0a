"""Groups of commands whose modules are imported when they are asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """The commands of ``modules``: by name, the module that holds each under its name.

    ``module:name`` says under which other name. The help of the group asks for all of them: their
    modules import torch and other heavy packages inside functions only.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        module, _, name = self._modules[cmd_name].partition(":")
        command = getattr(import_module(module), name or cmd_name)
        assert isinstance(command, click.Command)
        return command
