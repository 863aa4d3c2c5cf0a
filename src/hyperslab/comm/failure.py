"""A lost rank, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyperslab.comm.last_words import hear_others
from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError


def lost_contact(doing: str, mesh: Mesh, error: RuntimeError) -> CommError:
    """The error to raise in place of ``error``, which torch raised as a peer is gone or late."""
    why = str(error).partition("\n")[0] or type(error).__name__
    cause = hear_others(mesh.rank, mesh.num_ranks, mesh.timeout.total_seconds())
    return CommError(f"rank {mesh.rank} lost contact while {doing}: {cause} ({why})")


@contextmanager
def contact(doing: str, mesh: Mesh) -> Iterator[None]:
    """Within it, an error of torch is a lost contact."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise lost_contact(doing, mesh, error) from error
