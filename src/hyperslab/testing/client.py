"""The caller's end of the server."""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from hyperslab.testing.messages import Exited, Seat, Signal

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hyperslab.testing.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
STOP_SECONDS = 5.0


class ServerError(RuntimeError):
    """The server did not start, or is gone and its ranks with it."""


class Client:
    """Starts a server and speaks to it; made by ``connect``, one per process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.exit_codes: dict[int, int] = {}
        """By the number of the seat, once its process is gone."""
        self._numbers = itertools.count()
        self.connection, self._process = start_server()
        atexit.register(self.close)
        try:
            self.connection.recv()
        except EOFError:
            self.close()
            raise ServerError("the server that ranks are forked from did not start") from None

    @property
    def usable(self) -> bool:
        """False in a fork of the process that made it, and when the server is gone."""
        return self.pid == os.getpid() and self._process.poll() is None

    def next_number(self) -> int:
        return next(self._numbers)

    def fork(self, seat: Seat, handle: int) -> None:
        """Fork a rank that answers calls over a copy of the socket ``handle``."""
        self.connection.send(seat)
        send_handle(self.connection, handle, self._process.pid)

    def signal(self, numbers: list[int], signum: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(Signal(numbers, signum))

    def listen(self) -> None:
        """Note the exits that the server has told of; do not wait for any."""
        while self.connection.poll():
            try:
                exited: Exited = self.connection.recv()
            except (EOFError, ConnectionError):
                raise ServerError("the server that ranks are forked from was killed") from None
            self.exit_codes[exited.number] = exited.exit_code

    def await_exits(self, numbers: Collection[int], timeout_seconds: float) -> None:
        """Wait until the processes of these seats are gone, and forget them."""
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(ServerError):
            while not self.exit_codes.keys() >= set(numbers) and time.monotonic() < deadline:
                if self.connection.poll(deadline - time.monotonic()):
                    self.listen()
        for number in numbers:
            self.exit_codes.pop(number, None)

    def close(self) -> None:
        self.connection.close()
        if self.pid != os.getpid():
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_server() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A new interpreter rather than a fork: the caller may have threads, or CUDA in use."""
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                BOOT,
                json.dumps(sys.path),
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    return ours, process


_client: Client | None = None


def connect() -> Client:
    """This process's server, started if need be: seconds the first time, nothing later."""
    global _client
    if _client is None or not _client.usable:
        _client = Client()
    return _client
