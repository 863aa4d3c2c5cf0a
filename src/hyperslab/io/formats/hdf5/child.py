"""The process in which the HDF5 library runs, and may die.

The library crashes on some damaged files: HDF5 2.0 on 4 of 3,000 with a few bytes changed in their
metadata. Here it takes nobody with it. The process answers requests, one at a time, until its input
ends. A message is a line of JSON, whose ``nbytes`` says how many bytes follow it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_MEMORY = 32 * 2**30
"""A damaged length must not fill the machine."""
CPU_SECONDS = 60.0
"""For one answer; a damaged file may send the library round in circles."""

Answer = tuple[dict[str, Any], NDArray[Any] | None]
Task = Callable[..., Answer]


class Refusal(Exception):  # noqa: N818 - an answer, told to the user behind the file's name
    """Why a request cannot be met."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for stream in (0, 1, 2):  # what libraries print is no answer
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    try:
        from hyperslab.io.formats.hdf5 import contents
    except ImportError as error:
        _send(answers, {"error": str(error)}, None)
        return
    tasks: dict[str, Task] = {
        "names": contents.names,
        "attributes": contents.attributes,
        "describe": contents.describe,
        "read": contents.read,
    }
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    _send(answers, {"ready": True}, None)
    for line in requests:
        request = json.loads(line)
        _limit_cpu(request.pop("cpu_seconds", CPU_SECONDS))
        _send(answers, *_answer(tasks[request.pop("do")], request))


def _send(stream: Any, header: dict[str, Any], blob: NDArray[Any] | None) -> None:
    nbytes = 0 if blob is None else blob.nbytes
    stream.write(json.dumps({**header, "nbytes": nbytes}).encode() + b"\n")
    if blob is not None:
        stream.write(np.ascontiguousarray(blob).reshape(-1).view(np.uint8).data)
    stream.flush()


def _answer(task: Task, request: dict[str, Any]) -> Answer:
    try:
        os.chdir(request.pop("folder"))  # where the names of other files may begin
        return task(**request)
    except Refusal as error:
        return {"error": str(error)}, None
    except Exception as error:  # noqa: BLE001 - h5py raises what it likes, and the parent tells it
        words = " ".join(str(error).split()) or type(error).__name__
        return {"error": f"cannot be read as HDF5: {words}"}, None


def _limit_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, hard))
