"""What the ranks of a node need of the files, copied to the node's own disk by all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hyperslab.errors import FormatError, HyperslabError
from hyperslab.io import Dataset
from hyperslab.io.spec import around
from hyperslab.io.stage import StageReport, open_staged, stage
from hyperslab.store.peers import Peers, ranks_of_node
from hyperslab.store.placement import Placement

_log = logging.getLogger("hyperslab")


def staged(
    dataset: Dataset,
    directory: Path,
    placement: Placement,
    peers: Peers,
    samples: Sequence[int] | None,
    *,
    reads_whole: bool,
    skips_bad: bool,
) -> Dataset:
    """The dataset, read from ``directory``, to which the ranks of each node have copied it.

    ``samples`` (None: all) are those that ranks of this node read from files; ``reads_whole`` says
    that they read more of a sample than their own boxes. With ``skips_bad`` a file that cannot be
    copied stays where it is, and is met again when its sample is read. Collective over all ranks.
    """
    together = ranks_of_node(peers)
    boxes = None
    if not reads_whole:
        boxes = {
            name: around([placement.box(name, rank) for rank in together])
            for name in placement.arrays
        }
    part = (together.index(placement.rank), len(together))
    faults = {}
    try:
        report = stage(
            dataset, directory, boxes=boxes, samples=samples, part=part, skip_bad=skips_bad
        )
    except HyperslabError as error:
        faults[placement.rank] = str(error)
    _raise_first(peers.merge_faults(faults))
    _tell(report, placement.rank)
    found = dataset
    try:
        found = open_staged(
            dataset, directory, boxes=boxes, samples=samples, allow_missing=skips_bad
        )
    except HyperslabError as error:
        faults[placement.rank] = str(error)
    _raise_first(peers.merge_faults(faults))
    return found


def shares_of_node(placement: Placement, peers: Peers) -> list[int]:
    """The shares of the samples that ranks of this node take. Collective over all ranks."""
    return sorted({placement.share_of(rank) for rank in ranks_of_node(peers)})


def _raise_first(faults: dict[int, str]) -> None:
    if faults:
        raise FormatError(faults[min(faults)])


def _tell(report: StageReport, rank: int) -> None:
    if rank == 0 and report.num_staged:
        _log.info(
            "rank 0 staged %d files, %.1f MB in %.1f s (%.0f MB/s), to %s",
            report.num_staged,
            report.nbytes / 1e6,
            report.seconds,
            report.bandwidth / 1e6,
            report.directory,
        )
