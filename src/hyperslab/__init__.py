"""Train CNNs on samples larger than a GPU: one partition, from the file to the gradient."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hyperslab.errors import (
    CommError as CommError,
    ConfigError as ConfigError,
    FormatError as FormatError,
    HyperslabError as HyperslabError,
    LayoutError as LayoutError,
    UnsupportedOp as UnsupportedOp,
)

if TYPE_CHECKING:
    from hyperslab.comm.join import init as init
    from hyperslab.comm.mesh import Mesh as Mesh
    from hyperslab.io.dataset import Dataset as Dataset
    from hyperslab.io.manifest import Manifest as Manifest, Sample as Sample
    from hyperslab.io.opening import open as open
    from hyperslab.io.statistics import with_statistics as with_statistics
    from hyperslab.io.tables import attributes as attributes, table as table
    from hyperslab.models.stacked import (
        EncoderHead as EncoderHead,
        StackedAutoencoder as StackedAutoencoder,
    )
    from hyperslab.nn.op import register as register
    from hyperslab.nn.parallel.clip import clip_grad_norm_ as clip_grad_norm_
    from hyperslab.nn.parallel.parallelize import parallelize as parallelize
    from hyperslab.nn.parallel.summary import summarize as summarize
    from hyperslab.nn.placement import from_local as from_local, gather as gather, shard as shard
    from hyperslab.nn.slab import Slab as Slab
    from hyperslab.planner.planning import plan as plan
    from hyperslab.store.loader import Loader as Loader
    from hyperslab.store.normalize import Normalize as Normalize
    from hyperslab.trace.active import span as span
    from hyperslab.train.pretrain import pretrain as pretrain
    from hyperslab.train.tournament.tournament import Tournament as Tournament

__version__ = "0.1.0"

_LAZY = {
    "Dataset": "hyperslab.io",
    "Manifest": "hyperslab.io",
    "Sample": "hyperslab.io",
    "attributes": "hyperslab.io",
    "open": "hyperslab.io",
    "table": "hyperslab.io",
    "with_statistics": "hyperslab.io",
    "Mesh": "hyperslab.comm",
    "init": "hyperslab.comm",
    "EncoderHead": "hyperslab.models",
    "StackedAutoencoder": "hyperslab.models",
    "Loader": "hyperslab.store",
    "Normalize": "hyperslab.store",
    "Slab": "hyperslab.nn",
    "Tournament": "hyperslab.train.tournament.tournament",
    "clip_grad_norm_": "hyperslab.nn",
    "from_local": "hyperslab.nn",
    "gather": "hyperslab.nn",
    "parallelize": "hyperslab.nn",
    "plan": "hyperslab.planner.planning",
    "pretrain": "hyperslab.train.pretrain",
    "register": "hyperslab.nn",
    "shard": "hyperslab.nn",
    "span": "hyperslab.trace.active",
    "summarize": "hyperslab.nn",
}
"""Names whose modules load torch or h5py, and are therefore imported when first used."""


def __getattr__(name: str) -> Any:
    if name in ("io", "testing", "trace"):
        return import_module(f"hyperslab.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'hyperslab' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
