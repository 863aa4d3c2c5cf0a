"""Pictures of one slice of a sample and of its maps, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.info.pictures import Picture, Scale, draw_picture, has_long_tail
from hyperslab.nn import gather
from hyperslab.train.figures import new_figure, save_figure
from hyperslab.train.fitting import Values

MOST_CHANNELS = 3
MOST_CELLS = 1024
"""Along one dim of a picture; of larger ones every second cell is shown, or third, and so on."""
PANEL_INCHES = 4.4
LETTERS_PER_INCH = 11
LINE_INCHES = 0.2


def input_pictures(x: Values, *, num: int = MOST_CHANNELS) -> list[Picture]:
    """Pictures of what the network is given; an image of three channels is one in colours.

    Collective over the mesh.
    """
    num_channels = x.shape[1]
    pictures = pictures_of(x, "input", num=3 if num_channels == 3 else num)
    if num_channels == 3 and _can_be_colours(pictures):
        return in_colours(pictures, "input")
    note = _channels_note(num, num_channels)
    return [replace(picture, note=note) for picture in pictures[:num]]


def pictures_of(
    x: Values, title: str, names: Sequence[str] = (), *, num: int = MOST_CHANNELS
) -> list[Picture]:
    """The middle slice of the first sample of ``x`` (N, C, ...), of each of its first channels.

    Collective over the mesh: the slice alone is gathered.
    """
    if not x.numel() or not 3 <= x.ndim <= 5:
        return []
    channels, depth = _middle(x[0, :num], first=1)
    known = names or [f"channel {number}" for number in range(x.shape[1])]
    titles = [title] if x.shape[1] == 1 else [f"{title}, {name}" for name in known]
    return [Picture(name, each, depth) for name, each in zip(titles, channels, strict=False)]


def _can_be_colours(pictures: Sequence[Picture]) -> bool:
    """Whether these are the three channels of an image, and not counts, which would look black."""
    return len(pictures) == 3 and all(
        picture.values.ndim == 2 and picture.depth is None and not has_long_tail(picture.values)
        for picture in pictures
    )


def in_colours(pictures: Sequence[Picture], title: str) -> list[Picture]:
    """One picture of three channels."""
    values = np.stack([picture.values for picture in pictures], -1)
    return [Picture(title, values, note="channels 0-2 as RGB")]


def on_one_scale(true: Sequence[Picture], predicted: Sequence[Picture]) -> list[Picture]:
    """Both, with colours that mean the same in each picture and its counterpart.

    They reach from the least to the largest value of either, so that none is beyond them.
    """
    scales = [
        Scale.of(one.values, other.values) for one, other in zip(true, predicted, strict=True)
    ]
    return [
        replace(picture, scale=scale)
        for pictures in (true, predicted)
        for picture, scale in zip(pictures, scales, strict=True)
    ]


def _channels_note(num: int, num_channels: int) -> str:
    if num_channels == 1:
        return "as the network sees it"
    if num == 1:
        return f"channel 0 of {num_channels}, as the network sees it"
    return f"channels 0-{min(num, num_channels) - 1} of {num_channels}, as the network sees them"


def label_picture(
    labels: Values, title: str, num_classes: int, names: Sequence[str]
) -> list[Picture]:
    """The same of a label map (N, ...)."""
    if not labels.numel() or not 2 <= labels.ndim <= 4:
        return []
    values, depth = _middle(labels[0], first=0)
    return [Picture(title, values, depth, num_classes, names)]


def _middle(x: Values, first: int) -> tuple[NDArray[Any], int | None]:
    """The middle of the first of three spatial dims, which begin at dim ``first``, and its index.

    Collective over the mesh.
    """
    depth = None
    if x.ndim == first + 3:
        depth = x.shape[first] // 2
        x = x.select(first, depth)
    for dim in range(first, x.ndim):
        step = -(-x.shape[dim] // MOST_CELLS)
        x = x[(*[slice(None)] * dim, slice(None, None, step))] if step > 1 else x
    values = gather(x).detach().cpu()
    return np.asarray(values.float() if values.is_floating_point() else values), depth


def draw_pictures(
    pictures: Sequence[Picture], path: Path, remarks: Sequence[str] = ()
) -> list[Path]:
    """Writes all of them as one PNG; gives its path, or nothing if there are none.

    Remarks are lines below its title.
    """
    if not pictures:
        return []
    num_rows, num_columns = _grid(len(pictures))
    title = _title(pictures, remarks, width=round(PANEL_INCHES * LETTERS_PER_INCH * num_columns))
    height = _panel_height(pictures[0].values.shape) * num_rows + LINE_INCHES * len(title)
    if (figure := new_figure(PANEL_INCHES * num_columns, height + 0.2)) is None:
        return []
    cells = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes in cells[len(pictures) :]:
        axes.axis("off")
    for axes, picture in zip(cells, pictures, strict=False):
        draw_picture(figure, axes, picture)
    figure.suptitle("\n".join(title), fontsize="medium")
    return save_figure(figure, path)


def _title(pictures: Sequence[Picture], remarks: Sequence[str], width: int) -> list[str]:
    """Lines of so many letters at most."""
    depth = pictures[0].depth
    first = "The first sample" + (f" at depth {depth}" if depth is not None else "")
    notes = dict.fromkeys(picture.note for picture in pictures if picture.note)
    lines = [": ".join([first, *notes]), *remarks]
    return [part for line in lines for part in textwrap.wrap(line, width)]


def _grid(num: int) -> tuple[int, int]:
    num_columns = 2 if num == 4 else min(num, 3)
    return -(-num // num_columns), num_columns


def _panel_height(shape: tuple[int, ...]) -> float:
    aspect = min(2.0, max(0.4, shape[0] / shape[1])) if len(shape) > 1 else 0.6
    return 3.3 * aspect + 0.5
