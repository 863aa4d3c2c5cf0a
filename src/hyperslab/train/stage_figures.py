"""Figures of a run in stages: samples and what came back, the loss of each stage, filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperslab.comm.mesh import Mesh
from hyperslab.io.info.pictures import BLUE, ORANGE, Scale, count_whole
from hyperslab.models import StackedAutoencoder
from hyperslab.nn import gather
from hyperslab.nn.parallel.cut_weights import slab_of_weight
from hyperslab.train.figures import new_figure, save_figure, tidy
from hyperslab.train.fitting import Values, widened
from hyperslab.train.recorder import Line, read_log

MOST_SAMPLES = 6
MOST_FILTERS = 64
Image = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Slices of the first channels of some samples, and of what came back: (N, C, H, W)."""

    originals: Image
    restored: Image


@torch.no_grad()
def look_at(model: nn.Module, x: Values) -> Pairs:
    """The first samples of a batch, and what the model makes of them. Collective over the mesh."""
    restored = model(x)
    return Pairs(_slices(x[:MOST_SAMPLES]), _slices(restored[:MOST_SAMPLES]))


def _slices(x: Values) -> Image:
    """The middle of the first of three spatial dims; a line is an image of one row."""
    x = widened(x)
    if x.ndim == 5:
        x = x.select(2, x.shape[2] // 2)
    found = gather(x).detach().cpu().float().numpy()
    if found.ndim < 4:
        found = found.reshape(len(found), 1, 1, -1) if found.ndim == 2 else found[:, :, None]
    return np.asarray(found)


def draw_pairs(pairs: Pairs, path: Path) -> list[Path]:
    """Writes samples above what came back of them; three channels are colours."""
    num, num_channels = pairs.originals.shape[:2]
    if not num or (figure := new_figure(1.9 * num + 0.6, 4.4)) is None:
        return []
    rows = figure.subplots(2, num, squeeze=False)
    in_colours = num_channels == 3 and _is_unit(pairs.originals)
    for column in range(num):
        both = (pairs.originals[column], pairs.restored[column])
        norm = Scale.of(both[0][0], both[1][0]).norm()
        for axes, image in zip(rows[:, column], both, strict=True):
            if in_colours:
                axes.imshow(np.clip(np.moveaxis(image, 0, -1), 0, 1))
            else:
                axes.imshow(image[0], norm=norm, aspect="auto" if len(image[0]) == 1 else "equal")
            axes.set(xticks=[], yticks=[])
    for row, title in zip(rows, ("original", "reconstructed"), strict=True):
        row[0].set_ylabel(title)
    shown = "all channels as RGB" if in_colours else "channel 0"
    figure.suptitle(f"Samples and their reconstructions, {shown}", fontsize="medium")
    return save_figure(figure, path)


def _is_unit(values: Image) -> bool:
    return bool(values.size) and float(values.min()) >= 0 and float(values.max()) <= 1


# The loss of each stage


def draw_stages(log: Path, path: Path, last: int) -> list[Path]:
    """Writes a panel for each stage up to ``last``, which trains all pairs, with its losses."""
    lines = read_log(log)
    steps = [line for line in lines if line.get("kind") == "step" and "stage" in line]
    stages = sorted({line["stage"] for line in steps})
    if not stages or (figure := new_figure(3.2 * len(stages) + 0.8, 3.4)) is None:
        return []
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    for axes, stage in zip(panels, stages, strict=True):
        mine = [line for line in steps if line["stage"] == stage]
        ends = mine[0]["step"], mine[-1]["step"]
        scores = [line for line in lines if _is_validation(line, ends)]
        _draw_stage(axes, mine, scores)
        axes.set_title("all together" if stage == last else f"stage {stage + 1}", fontsize="medium")
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False, fontsize="small")
    return save_figure(figure, path)


def _is_validation(line: Line, ends: tuple[int, int]) -> bool:
    is_score = line.get("kind") == "scores" and line.get("part") == "validation"
    return is_score and ends[0] <= line["step"] <= ends[1]


def _draw_stage(axes: Any, steps: Sequence[Line], scores: Sequence[Line]) -> None:
    tidy(axes)
    for lines, colour, name in ((steps, BLUE, "training"), (scores, ORANGE, "validation")):
        if lines:
            points = [line["step"] for line in lines], [line["loss"] for line in lines]
            marker = "o" if len(lines) < 30 else ""
            axes.plot(*points, color=colour, linewidth=1.5, marker=marker, markersize=3, label=name)
    axes.set_xlabel("step")
    count_whole(axes.xaxis)


# Learned filters


def first_filters(model: StackedAutoencoder, shape: Sequence[int], mesh: Mesh) -> Image | None:
    """What the first layer looks for: (N, C, H, W); None if it has no weights like images.

    ``shape`` is that of a sample. Collective over the mesh: these filters alone are gathered.
    """
    weights = (p for p in model.encoder[0].parameters() if p.ndim > 1)
    weight = next(weights, None)
    if weight is None:
        return None
    filters = _whole(weight.detach(), mesh)
    if filters.ndim == 2:
        if filters.shape[1] != math.prod(shape):
            return None
        filters = filters.reshape(len(filters), *shape)
    if not 3 <= filters.ndim <= 5:
        return None
    return _slices(filters)


def _whole(weight: Tensor, mesh: Mesh) -> Tensor:
    """The first filters of a weight, which may be cut."""
    found: Values = slab_of_weight(weight, mesh) if isinstance(weight, DTensor) else weight
    return gather(found[:MOST_FILTERS]).cpu().float()


def draw_filters(filters: Image, path: Path) -> list[Path]:
    """Writes the first channel of each as one image, red above 0 and blue below."""
    columns = min(len(filters), math.ceil(math.sqrt(len(filters))))
    rows = -(-len(filters) // columns)
    if (figure := new_figure(0.8 * columns + 1, 0.8 * rows + 0.8)) is None:
        return []
    cells = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in cells:
        axes.axis("off")
    for axes, each in zip(cells, filters, strict=False):
        peak = float(np.abs(each[0]).max()) or 1.0
        axes.imshow(each[0], cmap="RdBu_r", vmin=-peak, vmax=peak)
    figure.suptitle(f"{len(filters)} filters of the first layer, channel 0", fontsize="medium")
    return save_figure(figure, path)
