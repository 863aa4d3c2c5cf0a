"""Pictures of one slice of a sample and of its maps, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.io.info.values import has_long_tail
from hyperslab.nn import gather
from hyperslab.train.fitting import IGNORED, Values
from hyperslab.train.plotting import CLASS_COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_CHANNELS = 3
MOST_CELLS = 1024
"""Along one dim of a picture; of larger ones every second cell is shown, or third, and so on."""


@dataclass(frozen=True)
class Picture:
    """A slice (height, width), or a line (width,)."""

    title: str
    values: NDArray[Any]
    depth: int | None = None
    """Where the slice was taken, if there is a third dim."""
    num_classes: int | None = None
    """Of a label map; None where values are numbers."""
    names: Sequence[str] = ()
    scale: NDArray[Any] | None = None
    """Other values from whose least to whose largest the colours go."""


def pictures_of(
    x: Values,
    title: str,
    names: Sequence[str] = (),
    *,
    num: int = MOST_CHANNELS,
    scales: Sequence[Picture] = (),
) -> list[Picture]:
    """The middle slice of the first sample of ``x`` (N, C, ...), of each of its first channels.

    Colours mean the same as in the pictures ``scales``, if there are any. Collective over the mesh:
    the slice alone is gathered.
    """
    if not x.numel() or not 3 <= x.ndim <= 5:
        return []
    channels, depth = _middle(x[0, :num], first=1)
    known = names or [f"channel {number}" for number in range(x.shape[1])]
    titles = [title] if x.shape[1] == 1 else [f"{title}, {name}" for name in known]
    like = [picture.values for picture in scales] or list(channels)
    return [
        Picture(name, each, depth, scale=scale)
        for name, each, scale in zip(titles, channels, like, strict=False)
    ]


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


def draw_pictures(pictures: Sequence[Picture], path: Path) -> list[Path]:
    """Writes all of them as one PNG; gives its path, or nothing if there are none."""
    if not pictures or (figure := new_figure(*_size(pictures))) is None:
        return []
    cells = figure.subplots(*_grid(pictures), squeeze=False).flatten()
    for axes in cells[len(pictures) :]:
        axes.axis("off")
    for axes, picture in zip(cells, pictures, strict=False):
        _draw(figure, axes, picture)
    depth = pictures[0].depth
    figure.suptitle("The first sample" + (f" at depth {depth}" if depth is not None else ""))
    return save_figure(figure, path)


def _grid(pictures: Sequence[Picture]) -> tuple[int, int]:
    num_columns = 2 if len(pictures) == 4 else min(len(pictures), 3)
    return -(-len(pictures) // num_columns), num_columns


def _size(pictures: Sequence[Picture]) -> tuple[float, float]:
    num_rows, num_columns = _grid(pictures)
    shape = pictures[0].values.shape
    aspect = min(2.0, max(0.4, shape[0] / shape[1])) if len(shape) == 2 else 0.6
    return 4.4 * num_columns, (3.3 * aspect + 0.5) * num_rows + 0.4


def _draw(figure: Figure, axes: Axes, picture: Picture) -> None:
    axes.set_title(picture.title, fontsize="medium")
    axes.tick_params(labelsize="x-small")
    if picture.values.ndim == 1:
        axes.plot(picture.values, linewidth=1, drawstyle="steps-mid")
        axes.set_xlabel("cell")
    elif picture.num_classes is not None:
        _draw_labels(figure, axes, picture, picture.num_classes)
    else:
        norm, is_log = _norm(picture.values if picture.scale is None else picture.scale)
        cmap = "magma" if is_log else "viridis"
        image = axes.imshow(picture.values, cmap=cmap, norm=norm)
        _add_bar(figure, axes, image, "log scale" if is_log else "")


def _draw_labels(figure: Figure, axes: Axes, picture: Picture, num: int) -> None:
    """A colour for each class; cells that do not count are dark."""
    shown = np.ma.masked_equal(picture.values, IGNORED)
    image = axes.imshow(
        shown, cmap=_class_colours(num), vmin=-0.5, vmax=num - 0.5, interpolation="nearest"
    )
    bar = _add_bar(figure, axes, image, "" if picture.names else "class")
    if num <= len(CLASS_COLOURS):
        bar.set_ticks(range(num), labels=list(picture.names) or [str(k) for k in range(num)])


def _class_colours(num: int) -> Colormap:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colours: Colormap = ListedColormap(CLASS_COLOURS[:num])
    if num > len(CLASS_COLOURS):
        colours = colormaps["nipy_spectral"].resampled(num)
    return colours.with_extremes(bad="#212529")


def _add_bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> Any:
    """A colour bar as high as the picture."""
    bar = figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.045, 1)), label=label)
    bar.ax.tick_params(labelsize="x-small")
    return bar


def _norm(values: NDArray[Any]) -> tuple[Normalize, bool]:
    """How values become colours, and whether that is by their logarithm, as for counts.

    It is even from 0, which has no logarithm, to a tenth of the typical value.
    """
    from matplotlib.colors import Normalize, SymLogNorm

    known = values[np.isfinite(values)]
    if known.size and has_long_tail(known) and known.max() > 0:
        typical = float(known[known > 0].mean()) / 10
        return SymLogNorm(linthresh=typical, vmin=0, vmax=float(known.max())), True
    ends = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    return Normalize(*ends), False
