"""The command that the user gave, which local ranks know from the process that started them."""

from __future__ import annotations

import os
import shlex
import sys

COMMAND = "HYPERSLAB_COMMAND"
"""The environment variable with the command, where the process has another one itself."""


def user_command() -> str:
    """The command as it can be typed again."""
    return os.environ.get(COMMAND) or shlex.join(sys.orig_argv)
