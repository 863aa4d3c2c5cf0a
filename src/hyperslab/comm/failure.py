"""A lost rank, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError


def lost_contact(doing: str, mesh: Mesh, error: RuntimeError) -> CommError:
    """The error to raise in place of ``error``, which torch raised as a peer is gone or late."""
    why = str(error).partition("\n")[0] or type(error).__name__
    return CommError(
        f"rank {mesh.rank} lost contact while {doing}: another rank died, raised an error or did "
        f"not answer within {mesh.timeout.total_seconds():g} s; its own output says why ({why})"
    )


@contextmanager
def contact(doing: str, mesh: Mesh) -> Iterator[None]:
    """Within it, an error of torch is a lost contact."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
