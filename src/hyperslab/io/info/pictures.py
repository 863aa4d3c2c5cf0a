"""Slices of samples and of their maps as pictures, for figures of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

BLUE, ORANGE, GREEN = "#2a6f97", "#d1603d", "#4c956c"
CLASS_COLOURS = (
    "#e9ecef",
    BLUE,
    ORANGE,
    GREEN,
    "#e9c46a",
    "#7b2cbf",
    "#90be6d",
    "#f28482",
    "#48cae4",
    "#6d597a",
)
"""The first is that of a background."""
LONG_TAIL = 20
"""Values from 0 to so many times their mean are looked at by their logarithm."""


def finite_of(values: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return found


def has_long_tail(values: NDArray[Any]) -> bool:
    """Whether there are few large values among many small ones, and none below 0, as of counts."""
    finite = finite_of(values)
    if not finite.size or finite.min() < 0:
        return False
    return bool(finite.max() > LONG_TAIL * finite.mean(dtype=np.float64))


@dataclass(frozen=True)
class Scale:
    """How values become colours."""

    low: float
    high: float
    even_to: float | None = None
    """Colours go by the logarithm above this, as for counts; None is nowhere."""

    @classmethod
    def of(cls, values: NDArray[Any], *others: NDArray[Any]) -> Scale:
        """From the least to the largest of all; ``values`` alone tell whether it is logarithmic."""
        each = np.concatenate([array.ravel() for array in (values, *others)])
        known = each[np.isfinite(each)]
        if not known.size:
            return cls(0.0, 1.0)
        ends = float(known.min()), float(known.max())
        if not has_long_tail(values) or not ends[1] > 0:
            return cls(*ends)
        # It is even from 0, which has no logarithm, to a tenth of the typical value.
        return cls(min(0.0, ends[0]), ends[1], float(known[known > 0].mean()) / 10)

    def norm(self) -> Normalize:
        from matplotlib.colors import Normalize, SymLogNorm

        if self.low == self.high:
            return Normalize(self.low - 1, self.high + 1)
        if self.even_to is None:
            return Normalize(self.low, self.high)
        return SymLogNorm(linthresh=self.even_to, vmin=self.low, vmax=self.high)


@dataclass(frozen=True)
class Picture:
    """A slice (height, width), one in colours (height, width, 3), or a line (width,)."""

    title: str
    values: NDArray[Any]
    depth: int | None = None
    """Where the slice was taken, if there is a third dim."""
    num_classes: int | None = None
    """Of a label map; None where values are numbers."""
    names: Sequence[str] = ()
    scale: Scale | None = None
    """Of the colours; left out, that of the values themselves."""
    note: str = ""
    """On what is shown, for the title of all pictures."""


def count_whole(*axis: Axis) -> None:
    """Ticks at whole numbers only, for what is counted: steps, cells."""
    from matplotlib.ticker import MaxNLocator

    for each in axis:
        each.set_major_locator(
            MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
        )


def draw_picture(figure: Figure, axes: Axes, picture: Picture) -> None:
    axes.set_title(picture.title, fontsize="medium")
    axes.tick_params(labelsize="x-small")
    count_whole(*([axes.xaxis] if picture.values.ndim == 1 else [axes.xaxis, axes.yaxis]))
    if picture.values.ndim == 1:
        _draw_line(axes, picture)
    elif picture.values.ndim == 3:
        axes.imshow(_unit_range(picture))
    elif picture.num_classes is not None:
        _draw_labels(figure, axes, picture, picture.num_classes)
    else:
        _draw_values(figure, axes, picture)


def _draw_line(axes: Axes, picture: Picture) -> None:
    axes.plot(picture.values, linewidth=1, drawstyle="steps-mid")
    axes.set_xlabel("cell")
    if picture.scale is not None:
        margin = 0.05 * (picture.scale.high - picture.scale.low) or 1.0
        axes.set_ylim(picture.scale.low - margin, picture.scale.high + margin)


def _draw_values(figure: Figure, axes: Axes, picture: Picture) -> None:
    scale = picture.scale or Scale.of(picture.values)
    is_log = scale.even_to is not None
    cmap = "magma" if is_log else "viridis"
    image = axes.imshow(picture.values.astype(np.float64), cmap=cmap, norm=scale.norm())
    bar = _add_bar(figure, axes, image, "log scale" if is_log else "")
    if scale.low == scale.high:
        bar.set_ticks([scale.low], labels=[f"{scale.low:g}"])


def _unit_range(picture: Picture) -> NDArray[Any]:
    """Red, green and blue from 0 to 1; what is no number is black."""
    scale = picture.scale or Scale.of(picture.values)
    scaled = (picture.values - scale.low) / (scale.high - scale.low or 1.0)
    return np.clip(np.nan_to_num(scaled, nan=0.0), 0, 1)


def _draw_labels(figure: Figure, axes: Axes, picture: Picture, num: int) -> None:
    """A colour for each class; cells that do not count are dark."""
    shown = np.ma.masked_less(picture.values, 0)
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
