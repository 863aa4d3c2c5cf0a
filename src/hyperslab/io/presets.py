"""The schemas of known data sets: what to give to ``hyperslab.open``, by name."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # One universe a file: particle counts at four redshifts, four parameters scaled to [-1, 1].
    "cosmoflow": {"sample": "full", "target": "unitPar", "axes": "DHWC"},
    # The same, rewritten with channels first.
    "cosmoflow-cdhw": {"sample": "full", "target": "unitPar", "axes": "CDHW"},
    # MLPerf's records of the same, cut to 128, one a file; those of version 1.0 are gzipped.
    "cosmoflow-tfrecord": {
        "format": "tfrecord",
        "sample": "x",
        "target": "y",
        "axes": "DHWC",
        "stacked": False,
        "shape": {"x": (128, 128, 128, 4), "y": (4,)},
        "dtype": {"x": "int16", "y": "float32"},
    },
    # Many collisions a file, with their weights.
    "hepcnn": {"sample": "data", "target": ("label", "normweight"), "axes": "NCHW"},
    # One time step a file: 16 fields, and a map of three classes.
    "climate": {
        "sample": "climate/data",
        "target": "climate/labels",
        "axes": "CHW",
        "stats": "climate/stats",
    },
    # One mesh a file: 18 quantities of every cell, and for blocks of cells how many will tangle.
    "mesh": {"sample": "data", "target": "target", "axes": "CHW"},
    # One volume a file, and a map of classes.
    "volumes": {"sample": "image", "target": "label", "axes": "CDHW", "stats": "stats"},
    # Many images a file, and the class of each.
    "images": {"sample": "data", "target": "label", "axes": "NCHW"},
}
