"""Zarr arrays of versions 2 and 3, in directories."""

from hyperslab.io.formats.zarr.format import Zarr as Zarr
