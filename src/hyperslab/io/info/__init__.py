"""What is in files of samples, and what reading boxes of them costs."""

from hyperslab.io.info.describe import (
    ArrayInfo as ArrayInfo,
    DataInfo as DataInfo,
    describe as describe,
    list_arrays as list_arrays,
)
from hyperslab.io.info.reads import MeshReads as MeshReads, mesh_reads as mesh_reads
from hyperslab.io.info.slices import (
    SliceInfo as SliceInfo,
    describe_slice as describe_slice,
    draw_slice as draw_slice,
)
