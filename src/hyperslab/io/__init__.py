"""Boxes of samples in files. No torch."""

from hyperslab.io.dataset import Dataset as Dataset
from hyperslab.io.manifest import Manifest as Manifest, Sample as Sample, Where as Where
from hyperslab.io.opening import open as open
from hyperslab.io.presets import PRESETS as PRESETS
from hyperslab.io.reader import (
    ArrayReader as ArrayReader,
    Format as Format,
    Storage as Storage,
    known_formats as known_formats,
    register_format as register_format,
)
from hyperslab.io.spec import ArraySpec as ArraySpec
from hyperslab.io.statistics import with_statistics as with_statistics
from hyperslab.io.tables import attributes as attributes, table as table
