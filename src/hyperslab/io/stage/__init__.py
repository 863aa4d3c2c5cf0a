"""Copies of samples, or of boxes of them, on a disk of the node's own."""

from hyperslab.io.stage.run import StageReport as StageReport, stage as stage
from hyperslab.io.stage.staged import open_staged as open_staged
