"""The process that ranks are forked from, and what runs in a rank.

It has torch loaded, one thread, and no CUDA. It forks, passes signals on and tells of exits, and is
gone when its caller is.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from hyperslab.cli.rank_process import die_with
from hyperslab.testing.messages import (
    Call,
    Exited,
    Outcome,
    Raised,
    Returned,
    Seat,
    Signal,
    WarningFilter,
    install_filters,
)

READY = "ready"
POLL_SECONDS = 1.0


def main(handle: int, caller_pid: int) -> None:
    """Serve the process ``caller_pid`` over the socket ``handle``."""
    with Connection(handle) as caller:
        warm_up()
        caller.send(READY)
        Server(caller, caller_pid).serve()


def warm_up() -> None:
    import torch
    import torch.distributed
    import torch.testing

    torch.set_num_threads(1)
    # The first call imports some 500 modules.
    torch.testing.assert_close(torch.ones(1), torch.ones(1))


def load(modules: Iterable[str]) -> None:
    for name in modules:
        # A name that only the caller can import is left to the rank.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a rank that looked through all of this would have it copied


class Server:
    def __init__(self, caller: Connection, caller_pid: int) -> None:
        self._caller = caller
        self._caller_pid = caller_pid
        self._seats: dict[int, Seat] = {}  # by process id
        self._folders: set[Path] = set()
        """Of all ranks that ever were. The caller removes them, unless it is killed."""
        self._woken, self._waker = socket.socketpair()

    def serve(self) -> None:
        self._wake_on_exits()
        try:
            # A fork of the caller may hold its end of the socket open: look for the caller, too.
            while os.getppid() == self._caller_pid:
                ready = wait([self._caller, self._woken], POLL_SECONDS)
                if self._woken in ready:
                    self._woken.recv(4096)
                    self._tell_exits()
                if self._caller in ready:
                    self._obey(self._caller.recv())
        except (EOFError, ConnectionError):
            pass
        finally:
            signal.set_wakeup_fd(-1)
            for pid in self._seats:
                send_signal(pid, signal.SIGKILL)
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _wake_on_exits(self) -> None:
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def _obey(self, request: Seat | Signal) -> None:
        if isinstance(request, Seat):
            self._fork(request, recv_handle(self._caller))
        else:
            for pid, seat in self._seats.items():
                if seat.number in request.numbers:
                    send_signal(pid, request.signum)

    def _fork(self, seat: Seat, handle: int) -> None:
        load(seat.warm)
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._forget_all()
                work(seat, Connection(handle), server)
            finally:
                os._exit(1)
        os.close(handle)
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(pid, pid)
        self._seats[pid] = seat
        self._folders.add(seat.folder)

    def _forget_all(self) -> None:
        """Give up, in the new rank, all that makes this process the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._woken.close()
        self._waker.close()
        self._caller.close()
        os.setpgid(0, 0)

    def _tell_exits(self) -> None:
        for pid, seat in list(self._seats.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._seats[pid]
                send_signal(pid, signal.SIGKILL)  # what the rank itself has started
                self._caller.send(Exited(seat.number, os.waitstatus_to_exitcode(status)))


def send_signal(pid: int, signum: int) -> None:
    """Send to a rank; SIGKILL goes to all that it has started as well."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if signum == signal.SIGKILL else os.kill)(pid, signum)


# What runs in a rank: take a seat, then answer calls until the caller is gone


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
        seed_random_numbers()
        result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller shall know
        return raised(error)
    try:
        return Returned(pickle.dumps(result))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return raised(TypeError(f"{call.function.qualname} returned what cannot be sent: {error}"))


def seed_random_numbers() -> None:
    """Make what a test draws independent of the tests that ran before it in this process."""
    random.seed(0)
    for name, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(0)


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
