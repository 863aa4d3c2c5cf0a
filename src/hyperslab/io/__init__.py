"""Boxes of samples in files. No torch."""

from hyperslab.io.dataset import ArraySpec as ArraySpec, Dataset as Dataset, open as open
from hyperslab.io.presets import PRESETS as PRESETS
from hyperslab.io.reader import (
    ArrayReader as ArrayReader,
    Format as Format,
    Storage as Storage,
    known_formats as known_formats,
    register_format as register_format,
)
