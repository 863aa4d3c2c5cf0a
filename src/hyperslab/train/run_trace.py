"""The trace of a run: recorded in its folder by all ranks, and told by rank 0 at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from hyperslab import trace
from hyperslab.comm.device_spans import collect_all
from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel
from hyperslab.trace import active
from hyperslab.trace.clocks import ClockComparison, clock_name
from hyperslab.train.run_folder import RunFolder

_log = logging.getLogger("hyperslab")

SHARES = ("read", "exchange", "wait", "halo", "all_reduce")
"""The categories of which TensorBoard shows the exposed part of each epoch."""
Shares = Mapping[str, float]


class RunTrace:
    """Records a run from here to its end; what is recorded already, by whoever, goes on."""

    def __init__(self, folder: RunFolder, mesh: Mesh, level: str) -> None:
        self._folder, self._mesh, self._level = folder, mesh, level
        self._is_ours = False
        self._last_steps: dict[int, int] = {}

    def __enter__(self) -> Self:
        if active.recorder is None and self._level != "off":
            active.start(self._folder.trace, level=self._level, rank=self._mesh.rank)
            self._is_ours = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            self._is_ours = False
            active.stop()

    def note_epoch(self, epoch: int, step: int) -> None:
        """Says what the last step of an epoch was."""
        self._last_steps[epoch] = step

    def finish(self, channel: SideChannel) -> dict[int, Shares]:
        """Ends the trace, and has rank 0 write its report.

        Gives by steps what the loop waited for in the epochs that they ended, on rank 0, as shares
        of their time. No trace and no report ever stops a run. Collective over all ranks.
        """
        if self._level == "off":
            return {}
        ClockComparison(channel.tell_all(clock_name()), channel).compare()
        collect_all()
        is_ours = self._is_ours
        self.__exit__()
        channel.tell_all(None)  # all files are there
        return self._report() if is_ours and self._mesh.rank == 0 else {}

    def _report(self) -> dict[int, Shares]:
        write_report = getattr(trace, "write_report", None)
        if write_report is None or not self._folder.trace.exists():
            return {}
        try:
            told = write_report(self._folder.path).to_dict()
            return {
                self._last_steps[each["epoch"]]: _shares(each)
                for each in told["epochs"]
                if each["epoch"] in self._last_steps
            }
        except Exception as error:  # noqa: BLE001 - the run is done, and its results are what counts
            _log.warning(
                "the trace in %s was not reported (%s: %s): hyperslab trace report %s tries again",
                self._folder.trace,
                type(error).__name__,
                error,
                self._folder.path,
            )
            return {}


def _shares(epoch: Mapping[str, Any]) -> Shares:
    seconds = max(epoch["seconds"], 1e-9)
    found = epoch["categories"]
    return {
        f"{name}_share": found[name]["exposed_seconds"] / seconds
        for name in SHARES
        if name in found
    }
