"""Do the losses and metrics of other libraries give on several ranks what they give in one process?

    python benchmarks/losses.py                             # what is installed
    python benchmarks/losses.py --library monai --filter Dice

Takes every class of ``monai.losses`` and every function of ``monai.losses``, ``monai.metrics`` and
``torchmetrics.functional``, with the options that their signatures have, on all of a few kinds of
inputs that one process takes: scores and labels, images, masks, vectors. Each call is made in one
process and on Slabs, in float64, and its values and the gradient of its first input are compared.
A call is the same, or is refused with the way out. Anything else is wrong, and the exit code 1.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hyperslab as hs
from hyperslab.testing import RankError, Team, seeded

LIBRARIES = ("monai", "torchmetrics")
MESHES = {"height": {"height": 2}, "sample": {"sample": 2}}
TOLERANCE = 1e-9
TIMEOUT_SECONDS = 60.0


# --- the inputs ---------------------------------------------------------------------------------

VOLUME, IMAGE = (
    ("sample", "channel", "depth", "height", "width"),
    ("sample", "channel", "height", "width"),
)
MAP = ("sample", "depth", "height", "width")


def inputs(kind: str) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Tensors of a ``kind``, and the axes of their dims."""
    shape = (3, 4, 5, 7, 6)
    labels = (seeded(3, 1, *shape[2:]).abs() * 2).long().clamp(max=3)
    one_hot = F.one_hot(labels[:, 0], 4).movedim(-1, 1).double()
    masks = (seeded(*shape, seed=5) > 0).double()
    image, other = (seeded(3, 2, 17, 16, seed=seed).sigmoid() for seed in (1, 2))
    classes = torch.tensor([0, 2, 1, 3, 2])
    return {
        "scores, labels": [(seeded(*shape), VOLUME), (labels, VOLUME)],
        "scores, one-hot": [(seeded(*shape), VOLUME), (one_hot, VOLUME)],
        "probabilities, one-hot": [(seeded(*shape).softmax(1), VOLUME), (one_hot, VOLUME)],
        "scores, label map": [(seeded(*shape), VOLUME), (labels[:, 0], MAP)],
        "volumes": [(seeded(*shape, seed=s).sigmoid(), VOLUME) for s in (3, 4)],
        "masks": [(masks, VOLUME), (one_hot, VOLUME)],
        "integer masks": [(masks.long(), VOLUME), (one_hot.long(), VOLUME)],
        "label maps": [(labels[:, 0].flip(1), MAP), (labels[:, 0], MAP)],
        "images": [(image, IMAGE), (other, IMAGE)],
        "binary scores of volumes": [
            (seeded(3, 1, *shape[2:]), VOLUME),
            ((seeded(3, 1, *shape[2:], seed=2) > 0).double(), VOLUME),
        ],
        "a volume": [(seeded(3, 3, *shape[2:]), VOLUME)],
        "scores of samples": [(seeded(5, 4), ("sample", "channel")), (classes, ("sample",))],
        "vectors": [(seeded(5).sigmoid(), ("sample",)), (seeded(5, seed=1).sigmoid(), ("sample",))],
        "binary": [
            (seeded(5).sigmoid(), ("sample",)),
            ((seeded(5, seed=1) > 0).long(), ("sample",)),
        ],
        "rows": [(seeded(5, 4, seed=s), ("sample", "channel")) for s in (1, 2)],
    }[kind]


KINDS = (
    "scores, labels",
    "scores, one-hot",
    "probabilities, one-hot",
    "scores, label map",
    "volumes",
    "masks",
    "integer masks",
    "label maps",
    "images",
    "binary scores of volumes",
    "a volume",
    "scores of samples",
    "vectors",
    "binary",
    "rows",
)


# --- the calls ----------------------------------------------------------------------------------

REQUIRED = {
    "num_classes": 4, "num_labels": 4, "classes": 4, "task": "multiclass",
    "metric_name": "f1 score", "spatial_dims": 3, "dim": 3, "in_channels": 1, "data_range": 1.0,
    "p": 2.0, "beta": 1.0,
    "loss": nn.MSELoss(), "class_thresholds": [0.5] * 4, "min_precision": 0.5, "min_recall": 0.5,
    "min_sensitivity": 0.5, "min_specificity": 0.5, "kernel_type": "gaussian", "kernel_size": 5,
    "kernel_sigma": 1.5, "dist_matrix": np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0))),
}  # fmt: skip
"""Arguments without defaults, by name."""
ALWAYS = ("num_classes",)
SWITCHES = (
    "to_onehot_y",
    "softmax",
    "sigmoid",
    "include_background",
    "reduction",
    "use_softmax",
    "average",
    "spatial_dims",
    "win_size",
    "kernel_size",
)


def options_of(function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Options to try, by the signature."""
    names = inspect.signature(function).parameters
    needed = {
        name: REQUIRED[name]
        for name, parameter in names.items()
        if name in REQUIRED and (parameter.default is parameter.empty or name in ALWAYS)
    }
    values = {
        "to_onehot_y": True, "softmax": True, "sigmoid": True, "use_softmax": True,
        "include_background": False, "reduction": "sum", "average": "none", "spatial_dims": 2,
        "win_size": 5, "kernel_size": 5,
    }  # fmt: skip
    known = [name for name in SWITCHES if name in names]
    for chosen in chain.from_iterable(
        combinations(known, n) for n in range(min(3, len(known) + 1))
    ):
        yield {**needed, **{name: values[name] for name in chosen}}


def made(cls: type[nn.Module], options: dict[str, Any]) -> Callable[..., Any]:
    """A loss, or a metric as a function of one batch."""
    if not hasattr(cls, "update"):
        return cls(**options)
    metric = cls(**options, sync_on_compute=False)  # every rank has the numbers of all

    def update(*tensors: Any) -> Any:
        metric.reset()
        metric.update(*tensors)
        return metric.compute()

    return update


@dataclass(frozen=True)
class Entry:
    """A loss or a metric by its name, and how it is called."""

    module: str
    name: str

    def calls(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        thing = getattr(importlib.import_module(self.module), self.name)
        for options in options_of(thing):
            shown = ", ".join(
                f"{name}={value}" for name, value in options.items() if name not in REQUIRED
            )
            if inspect.isclass(thing):
                try:
                    yield shown, made(thing, options)
                except (TypeError, ValueError, ImportError, OSError, RuntimeError):
                    continue
            else:
                yield shown, lambda *tensors, options=options: thing(*tensors, **options)


def entries(library: str) -> list[Entry]:
    modules = {
        "monai": ("monai.losses", "monai.metrics"),
        "torchmetrics": tuple(
            f"torchmetrics.{space}{subject}"
            for subject in ("classification", "image", "regression", "segmentation")
            for space in ("functional.", "")
        ),
    }[library]
    found = {}
    for module in modules:
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            is_loss = inspect.isclass(thing) and issubclass(thing, nn.Module)
            if (is_loss or inspect.isfunction(thing)) and not name.startswith("_"):
                found.setdefault(name, Entry(module, name))
    return list(found.values())


# --- one process and several ----------------------------------------------------------------------


def outcome(function: Callable[..., Any], tensors: list[Any], leaf: Tensor) -> list[Tensor]:
    """All tensors of the result, whole, and the gradient of ``leaf`` if there is one."""
    torch.manual_seed(0)
    result = function(*tensors)
    leaves = tree_leaves(result, is_leaf=lambda x: isinstance(x, hs.Slab))
    numbers = [
        x if isinstance(x, hs.Slab | Tensor) else torch.tensor(x) for x in leaves if x is not None
    ]
    live = [x for x in numbers if x.requires_grad]
    if live:
        torch.stack([(x.double() * seeded(*x.shape, seed=7)).sum() for x in live]).sum().backward()
    whole = [hs.gather(x).detach() for x in numbers]
    return [*whole, *([leaf.grad] if leaf.grad is not None else [])]


def prepared(kind: str) -> tuple[list[Tensor], Tensor]:
    tensors = [tensor.clone() for tensor, _ in inputs(kind)]
    leaf = tensors[0].requires_grad_(tensors[0].is_floating_point())
    return tensors, leaf


def judge(entry: Entry, axes: dict[str, int]) -> list[tuple[str, str, str, str]]:
    """The verdict on each call of ``entry``: options, inputs, verdict, why."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double  # some losses cast, and would be compared to float32's rounding
    mesh = hs.init(**axes, device="cpu", timeout_seconds=30)
    rows = []
    for options, function in entry.calls():
        for kind in KINDS:
            tensors, leaf = prepared(kind)
            try:
                serial = outcome(function, tensors, leaf)
            except Exception:  # noqa: BLE001 - not what it takes
                continue
            if not serial or any(not t.double().isfinite().all() for t in serial):
                continue
            rows.append((options, kind, *_verdict(function, kind, serial, mesh)))
    return rows


def _verdict(function, kind, serial, mesh) -> tuple[str, str]:
    tensors, leaf = prepared(kind)
    try:
        slabs = [
            hs.shard(tensor, mesh, axes=axes)
            for tensor, (_, axes) in zip(tensors, inputs(kind), strict=True)
        ]
        ours = outcome(function, slabs, leaf)
    except hs.UnsupportedOp as error:
        return "refused", str(error).split("\n")[0]
    except Exception as error:  # noqa: BLE001 - told apart below
        return (
            "raised",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    if len(ours) != len(serial):
        return "wrong", f"{len(ours)} tensors for {len(serial)}"
    for number, (mine, due) in enumerate(zip(ours, serial, strict=True)):
        if mine.shape != due.shape:
            return "wrong", f"tensor {number}: {tuple(mine.shape)} for {tuple(due.shape)}"
        tolerance = 1e-5 if any(t.dtype == torch.float32 for t in serial) else TOLERANCE
        error = (mine.double() - due.double()).abs().max().item() if due.numel() else 0.0
        if not error <= tolerance * max(
            1.0, due.double().abs().max().item() if due.numel() else 0.0
        ):
            return "wrong", f"tensor {number} differs by {error:.3g}"
    return "same", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--filter", default="", help="only names with these letters in them")
    parser.add_argument("--json", action="store_true", help="print the counts only, as JSON")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for library in LIBRARIES:
        if options.library not in (None, library) or importlib.util.find_spec(library) is None:
            continue
        for mesh, axes in MESHES.items():
            with Team(2, TIMEOUT_SECONDS) as team:
                for entry in entries(library):
                    if options.filter in entry.name:
                        rows = _rows(team, entry, axes)
                        counts += Counter(row[2] for row in rows)
                        if not options.json:
                            _tell(mesh, entry, rows)
    print(json.dumps(counts) if options.json else dict(counts))
    return 1 if counts["wrong"] or counts["died"] else 0


def _rows(team: Team, entry: Entry, axes: dict[str, int]) -> list[tuple[str, str, str, str]]:
    try:
        rows: list[tuple[str, str, str, str]] = team.run(judge, entry, axes)[0]
    except RankError as error:
        return [("", "", "died", str(error).splitlines()[0])]
    return rows


def _tell(mesh: str, entry: Entry, rows: list[tuple[str, str, str, str]]) -> None:
    print(mesh, entry.module, entry.name, dict(Counter(row[2] for row in rows)), flush=True)
    whys: dict[tuple[str, str], list[str]] = {}
    for given, kind, verdict, why in rows:
        if verdict != "same":
            whys.setdefault((verdict, why[:230]), []).append(f"[{given}] {kind}")
    for (verdict, why), where in whys.items():
        print(f"    {verdict} {where[0]} and {len(where) - 1} more: {why}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
