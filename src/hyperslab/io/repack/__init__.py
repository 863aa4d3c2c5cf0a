"""Samples rewritten to HDF5 files whose chunks fit the boxes that ranks read."""

from hyperslab.io.repack.plan import choose_chunks as choose_chunks
from hyperslab.io.repack.run import RepackReport as RepackReport, repack as repack
