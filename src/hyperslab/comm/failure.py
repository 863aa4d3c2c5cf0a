"""A lost rank, told in one line."""

from __future__ import annotations

from hyperslab.comm.mesh import Mesh
from hyperslab.errors import CommError


def lost_contact(doing: str, mesh: Mesh, error: RuntimeError) -> CommError:
    """The error to raise in place of ``error``, which torch raised because a peer is gone or late."""
    return CommError(
        f"rank {mesh.rank} lost contact while {doing}: another rank died, raised an error or did not "
        f"answer within {mesh.timeout.total_seconds():g} s; its own output says why "
        f"({str(error).splitlines()[0]})"
    )
