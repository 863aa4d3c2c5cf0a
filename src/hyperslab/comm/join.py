"""How ranks find each other: rank 0 listens at an address, and the others go there."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from hyperslab.comm.launch import Launch, how_to_set
from hyperslab.errors import CommError, ConfigError

ANSWER_SECONDS = 10.0
"""How long what listens at rank 0's address may take to answer as rank 0 would."""


def join_ranks(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Starts ``torch.distributed``.

    Collective over all ranks. A port in use stops all of them, each for the same reason: rank 0
    cannot listen there, and the others are not answered by what does.
    """
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent listens
            os.environ.setdefault("MASTER_ADDR", launch.master_addr or "127.0.0.1")
            dist.init_process_group(backend, timeout=timeout)
            return
        dist.init_process_group(
            backend,
            store=_listen(launch, timeout) if launch.rank == 0 else _find_rank_0(launch, timeout),
            rank=launch.rank,
            world_size=launch.num_ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise CommError(
            f"rank {launch.rank} of {launch.num_ranks} did not meet the others at {_place(launch)} "
            f"within {timeout.total_seconds():g} s: a rank died, raised an error or was not "
            f"started, or the address cannot be reached ({first_line(error)})"
        ) from error


def first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _listen(launch: Launch, timeout: timedelta) -> TCPStore:
    try:
        return _store(launch, timeout)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise _port_in_use(launch, "rank 0 cannot listen there") from error


def _find_rank_0(launch: Launch, timeout: timedelta) -> TCPStore:
    """The store of rank 0, which may not listen yet.

    Torch waits without end for the answer of what is no store, so another thread does that.
    """
    found: list[TCPStore] = []
    errors: list[RuntimeError] = []

    def find() -> None:
        try:
            found.append(_store(launch, timeout))
        except RuntimeError as error:
            errors.append(error)

    finder = threading.Thread(target=find, name="hyperslab-join", daemon=True)
    finder.start()
    finder.join(ANSWER_SECONDS)
    listens = False
    while finder.is_alive():
        if listens:
            raise _port_in_use(launch, "what listens there does not answer as rank 0 would")
        listens = _listens(launch)
        finder.join(ANSWER_SECONDS)
    if errors:
        raise errors[0]
    return found[0]


def _store(launch: Launch, timeout: timedelta) -> TCPStore:
    assert launch.master_addr is not None
    assert launch.master_port is not None
    return TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.num_ranks,
        is_master=launch.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _listens(launch: Launch) -> bool:
    """Whether anyone does at the address where rank 0 should."""
    try:
        address = (launch.master_addr, launch.master_port)
        with closing(socket.create_connection(address, timeout=ANSWER_SECONDS)):
            return True
    except OSError:
        return False


def _port_in_use(launch: Launch, how: str) -> ConfigError:
    return ConfigError(
        f"port {launch.master_port} of {launch.master_addr} is in use by another program, often an "
        f"earlier run that has not ended: {how}; end that program, or set MASTER_PORT to a free "
        f"port{how_to_set(launch)}"
    )


def _place(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"
