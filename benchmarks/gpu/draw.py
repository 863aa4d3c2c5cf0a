"""Timelines as pictures."""

from collections.abc import Sequence
from pathlib import Path

from gpu.timeline import Convolution, Span, Timeline

COLORS = {
    "interior": "tab:blue",
    "pack": "tab:red",
    "border": "tab:green",
    "copy": "tab:orange",
    "other": "lightgray",
    "host waits": "tab:purple",
}


def draw(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """A step of every rank: kernels, copies, and when the host waited for other ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    height = 1 + 1.2 * len(timelines)
    figure, axes = plt.subplots(
        len(timelines), figsize=(16, height), squeeze=False, layout="constrained"
    )
    for rank, (ax, timeline) in enumerate(zip(axes[:, 0], timelines, strict=True)):
        _draw_rank(ax, timeline)
        ax.set_ylabel(f"rank {rank}")
    axes[-1, 0].set_xlabel("ms since the step began")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()],
        ncols=len(COLORS),
        loc="outside upper right",
    )
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rank(ax, timeline: Timeline) -> None:
    roles = _roles(timeline.convolutions)
    lanes = {"kernels": 2, "copies": 1, "host": 0}
    for span in timeline.work:
        lane = lanes["copies" if span.is_exchange else "kernels"]
        _bar(ax, span, timeline.step, lane, roles.get(span, "other"))
    for span in timeline.waits:
        _bar(ax, span, timeline.step, lanes["host"], "host waits")
    ax.set_yticks(list(lanes.values()), list(lanes))
    ax.set_ylim(-0.5, 2.5)


def _roles(convolutions: Sequence[Convolution]) -> dict[Span, str]:
    roles = {}
    for conv in convolutions:
        for spans, role in (
            (conv.post, "pack"), (conv.interior, "interior"),
            (conv.before, "border"), (conv.after, "border"), (conv.wait, "copy"),
        ):  # fmt: skip
            roles |= {span: "copy" if span.is_exchange else role for span in spans}
    return roles


def _bar(ax, span: Span, step: Span, lane: int, role: str) -> None:
    start, length = (span.start - step.start) / 1e3, (span.stop - span.start) / 1e3
    ax.broken_barh([(start, length)], (lane - 0.4, 0.8), facecolors=COLORS[role])
