"""A function in a process of its own: should it kill its CUDA context, or hang, others go on."""

import pickle
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


def run_apart(function: Callable[..., Any], *args: Any, timeout_seconds: float) -> Any:
    """What ``function`` returns, or in words why its process gave nothing."""
    context = get_context("spawn")  # CUDA cannot be used in a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_seconds):
            return f"its process gave no result in {timeout_seconds:.0f} s"
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        return f"its process died with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _send_result(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    sender.send_bytes(pickle.dumps(function(*args)))
