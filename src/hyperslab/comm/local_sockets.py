"""Small messages between ranks of one node, which the calling threads write and read themselves.

gloo takes messages to threads of its own. With as many ranks as cores these push those that compute
from their cores: a step of ten halos of 1 KiB took 9 to 18 ms, of which its threads burnt 2 to 7.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_NBYTES = 1 << 16
"""Of a message; the kernel holds several for a reader who has not come yet."""
_TAG = struct.Struct("<q")
_HELLO = struct.Struct("<q16s")
_BUFFER_NBYTES = 1 << 20
"""Asked for; the kernel gives what it allows."""
_SLICE_SECONDS = 0.1
"""After which a reader looks whether another thread has read what it waits for."""
_HELLO_SECONDS = 10.0


class Address(NamedTuple):
    """Where other ranks of the node reach a rank; where they cannot, it is a node of its own."""

    node: str
    name: str
    token: bytes
    """What a connection must begin with."""


def connect(rank: int, tell_all: Callable[[Any], list[Any]]) -> LocalSockets | None:
    """Sockets to the other ranks of this one's node; None where some cannot reach each other.

    Collective over all ranks: ``tell_all`` gives what each brings, by rank.
    """
    listener, found = _Listener(), dict[int, socket.socket]()
    try:
        addresses: list[Address] = tell_all(listener.address)
        near = {other for other, each in enumerate(addresses) if each.node == addresses[rank].node}
        for other in sorted(near):
            if other < rank and (connection := _connected(addresses[other], rank)):
                found[other] = connection
        told: list[set[int]] = tell_all(set(found))
        if any(told[each] != {other for other in near if other < each} for each in near):
            _close(found)  # as all ranks of the node do
            return None
        while len(found) < len(near) - 1:
            caller, connection = listener.accept()
            found[caller] = connection
        return LocalSockets(found)
    except BaseException:
        _close(found)
        raise
    finally:
        listener.close()


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


class _Listener:
    """What the ranks above this one connect to, if they run on its node."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.address = Address(secrets.token_hex(16), "", b"")
        if sys.platform != "linux":
            return
        name = f"hyperslab-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.bind(f"\0{name}")  # no file: it ends with the process
            listening.listen(4096)
        except OSError:
            listening.close()
            return
        listening.settimeout(_HELLO_SECONDS)
        self._socket = listening
        self.address = Address(_node(), name, secrets.token_bytes(16))

    def accept(self) -> tuple[int, socket.socket]:
        """The next rank that has connected; others than ranks of this run are turned away."""
        assert self._socket is not None
        while True:
            connection, _ = self._socket.accept()
            try:
                connection.settimeout(_HELLO_SECONDS)
                caller, token = _HELLO.unpack(connection.recv(_HELLO.size))
            except (OSError, struct.error):
                token = b""
            if secrets.compare_digest(token, self.address.token):
                return caller, connection
            connection.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _node() -> str:
    """The same on ranks that can reach each other; ``HYPERSLAB_NODE`` overrides it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        here = f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        here = ""
    return os.environ.get("HYPERSLAB_NODE") or here


def _connected(address: Address, rank: int) -> socket.socket | None:
    """A socket to the rank at ``address``; None where it cannot be reached, as in a container."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{address.name}")
        connection.send(_HELLO.pack(rank, address.token))
    except OSError:
        connection.close()
        return None
    return connection


class Receive:
    """A message that is awaited; ``wait`` returns when it has filled its tensor."""

    __slots__ = ("_sockets", "_timeout_seconds", "body", "is_done", "peer", "tag")

    def __init__(
        self, sockets: LocalSockets, peer: int, tag: int, body: Any, timeout_seconds: float
    ) -> None:
        self._sockets, self._timeout_seconds = sockets, timeout_seconds
        self.peer, self.tag, self.body, self.is_done = peer, tag, body, False

    def wait(self) -> None:
        """Raises ``RuntimeError`` if its sender is gone, or late."""
        self._sockets.wait_for(self, self._timeout_seconds)


class Send:
    """A message that the kernel had no room for yet; ``wait`` returns when it has left."""

    __slots__ = ("_sockets", "_timeout_seconds", "body", "is_done", "peer")

    def __init__(
        self, sockets: LocalSockets, peer: int, body: list[Any], timeout_seconds: float
    ) -> None:
        self._sockets, self._timeout_seconds = sockets, timeout_seconds
        self.peer, self.body, self.is_done = peer, body, False

    def wait(self) -> None:
        """Raises ``RuntimeError`` if its receiver is gone, or late."""
        self._sockets.wait_for(self, self._timeout_seconds)


class Shared:
    """Tensors of one shape that ranks tell each other."""

    def __init__(self, parts: Mapping[int, Tensor], works: list[Send | Receive]) -> None:
        self._parts, self._works = parts, works

    def wait(self) -> list[Tensor]:
        """Those of all, by rank; ``RuntimeError`` if one is gone, or late."""
        for work in self._works:
            work.wait()
        return [self._parts[rank] for rank in sorted(self._parts)]


class LocalSockets:
    """Connected sockets to other ranks of this node, by rank.

    Messages between two ranks are matched by their tags; those of one tag keep their order. No rank
    waits for room: while it waits for anything, it reads what others have sent it.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._lock = threading.Lock()
        self._awaited: dict[int, deque[Receive]] = {peer: deque() for peer in sockets}
        self._early: dict[tuple[int, int], deque[bytes]] = {}
        self._unsent: dict[int, deque[Send]] = {}
        self._polls: dict[int, select.poll] = {}
        self._tag, self._rest = bytearray(_TAG.size), memoryview(bytearray(MAX_NBYTES))
        for peer, each in sockets.items():
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
            self._polls[peer] = select.poll()
            self._polls[peer].register(each, select.POLLIN)

    @property
    def peers(self) -> Collection[int]:
        return self._sockets.keys()

    def carries(self, peer: int, x: Tensor) -> bool:
        """Whether a message such as ``x`` to or from ``peer`` goes by a socket; both sides know."""
        return peer in self._sockets and x.nbytes <= MAX_NBYTES

    def send(self, peer: int, tag: int, x: Tensor, timeout_seconds: float) -> Send | None:
        """Sends the contiguous ``x``; None if it has left. ``x`` may be written into at once."""
        body = [_TAG.pack(tag), _bytes_of(x)]
        with self._lock:
            if peer not in self._unsent and self._try_send(peer, body):
                return None
            send = Send(self, peer, [body[0], bytes(body[1])], timeout_seconds)
            self._unsent.setdefault(peer, deque()).append(send)
        return send

    def receive(self, peer: int, tag: int, out: Tensor, timeout_seconds: float) -> Receive:
        """Asks for a message that will fill the contiguous ``out``."""
        asked = Receive(self, peer, tag, _bytes_of(out), timeout_seconds)
        with self._lock:
            if early := self._early.get((peer, tag)):
                _fill(asked, early.popleft())
                if not early:
                    del self._early[peer, tag]
            else:
                self._awaited[peer].append(asked)
        return asked

    def share(
        self, x: Tensor, rank: int, ranks: Collection[int], tag: int, timeout_seconds: float
    ) -> Shared:
        """Sends the contiguous ``x`` of this ``rank`` to the others of ``ranks``, who do the same.

        Collective over ``ranks``.
        """
        parts = {each: x if each == rank else torch.empty_like(x) for each in ranks}
        peers = [each for each in parts if each != rank]
        sends = [self.send(peer, tag, x, timeout_seconds) for peer in peers]
        works: list[Send | Receive] = [send for send in sends if send]
        works += [self.receive(peer, tag, parts[peer], timeout_seconds) for peer in peers]
        return Shared(parts, works)

    def wait_for(self, message: Receive | Send, timeout_seconds: float) -> None:
        deadline = None
        while True:
            with self._lock:
                if not message.is_done:
                    self._move(message.peer)
                if message.is_done:
                    return
            now = time.monotonic()
            deadline = deadline or now + timeout_seconds
            if now > deadline:
                raise RuntimeError(f"rank {message.peer} did not answer in {timeout_seconds:g} s")
            self._sleep(message.peer, min(_SLICE_SECONDS, deadline - now))

    def _move(self, peer: int) -> None:
        """Reads what is there from ``peer``, up to what is awaited, and sends what can be sent.

        While something is left to be sent, reads what is there from anyone.
        """
        while self._read(peer) and self._awaited[peer]:
            pass
        for other, messages in list(self._unsent.items()):
            while messages and self._try_send(other, messages[0].body):
                messages.popleft().is_done = True
            if not messages:
                del self._unsent[other]
        if self._unsent:
            for other in self._sockets:
                while self._read(other):
                    pass

    def _sleep(self, peer: int, seconds: float) -> None:
        """Until ``peer`` has sent something, or that time is over; or anything can be moved."""
        if not self._unsent:
            self._polls[peer].poll(seconds * 1e3)
            return
        every = select.poll()
        for other, each in self._sockets.items():
            every.register(each, select.POLLIN | (select.POLLOUT if other in self._unsent else 0))
        every.poll(seconds * 1e3)

    def _read(self, peer: int) -> bool:
        """Takes the next message of ``peer``; whether there was one."""
        awaited = self._awaited[peer]
        first = awaited[0] if awaited else None
        body = first.body if first else self._rest[:0]
        into = [self._tag, body, self._rest]
        try:
            try:
                nbytes = self._sockets[peer].recvmsg_into(into)[0]
            except ConnectionResetError:  # told once; what the peer sent before it ended is there
                nbytes = self._sockets[peer].recvmsg_into(into)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"rank {peer} is gone ({error.strerror})") from error
        if not nbytes:
            raise RuntimeError(f"rank {peer} has closed its connection")
        (tag,), size = _TAG.unpack(self._tag), nbytes - _TAG.size
        if first and tag == first.tag and size == len(body):
            awaited.popleft()
            first.is_done = True
            return True
        text = bytes(body[:size]) + bytes(self._rest[: max(0, size - len(body))])
        taker = next((each for each in awaited if each.tag == tag), None)
        if taker is None:
            self._early.setdefault((peer, tag), deque()).append(text)
        else:
            awaited.remove(taker)
            _fill(taker, text)
        return True

    def _try_send(self, peer: int, body: list[Any]) -> bool:
        try:
            self._sockets[peer].sendmsg(body, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"rank {peer} is gone ({error.strerror})") from error
        return True

    def close(self) -> None:
        _close(self._sockets)


def _bytes_of(x: Tensor) -> Any:
    """The memory of a contiguous tensor, which lives as long as this does."""
    flat = x.detach().as_strided((x.numel(),), (1,))  # a single number may have any stride
    return flat.view(torch.uint8).numpy().data


def _fill(asked: Receive, text: bytes) -> None:
    if len(text) != len(asked.body):
        raise RuntimeError(
            f"rank {asked.peer} sent {len(text)} bytes where {len(asked.body)} were awaited"
        )
    asked.body[:] = text
    asked.is_done = True
