"""What runs in a rank: take a seat, then answer calls until the caller is gone."""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from hyperslab.testing.messages import Call, Outcome, Raised, Returned, Seat
from hyperslab.testing.warning_filters import WarningFilter, install_filters

PR_SET_PDEATHSIG = 1


def work(seat: Seat, caller: Connection, server: int) -> NoReturn:
    """Answer calls. ``server`` is the id of the process that this one was forked from."""
    die_with(server)
    take(seat)
    filters: tuple[WarningFilter, ...] | None = None
    try:
        while True:
            call: Call = caller.recv()
            if call.filters != filters:
                install_filters(filters := call.filters)
            caller.send(answer(call))
    except (EOFError, ConnectionError):
        os._exit(0)


def die_with(parent: int) -> None:
    """Let this process be killed as soon as ``parent`` is gone (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def take(seat: Seat) -> None:
    os.environ.clear()
    os.environ.update(seat.environment)
    os.chdir(seat.working_folder)
    sys.path[:] = seat.search_path
    redirect_output(seat.output)
    faulthandler.enable()
    # The file stays open: the handler writes to it from C, wherever the rank may be stuck.
    stacks = os.open(seat.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # By the line, so that little is lost when the rank is killed.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def answer(call: Call) -> Outcome:
    try:
        function = call.function.load()
        args, kwargs = pickle.loads(call.arguments)
        result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller shall know
        return raised(error)
    try:
        return Returned(pickle.dumps(result))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return raised(TypeError(f"{call.function.qualname} returned what cannot be sent: {error}"))


def raised(error: BaseException) -> Raised:
    when = time.monotonic()
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(error.with_traceback(frames))
    only = traceback.TracebackException.from_exception(error)
    only.__notes__ = None  # they follow in the traceback
    return Raised(when, "".join(only.format_exception_only()).strip(), "".join(lines))


def leave() -> None:
    """Give back what a rank may still hold when its team ends."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
