"""Two runs: what became faster, what slower."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from hyperslab.errors import FormatError
from hyperslab.pages import shown_seconds
from hyperslab.trace.analysis.periods import Period, Share
from hyperslab.trace.analysis.runs import first_and_later
from hyperslab.trace.analysis.tables import new_table, shown
from hyperslab.trace.span import Category

if TYPE_CHECKING:
    from hyperslab.trace.analysis.report import Report

ALIKE = 0.02
"""Times of runs that differ by less are the same."""
MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Of a category: seconds of an epoch, in the one run and in the other."""

    category: Category
    seconds: tuple[float, float]
    exposed_seconds: tuple[float, float]

    @property
    def gained(self) -> float:
        """Seconds of an epoch."""
        return self.exposed_seconds[0] - self.exposed_seconds[1]


@dataclass(frozen=True)
class Comparison:
    """``before`` and ``after``, by the means of their epochs after the first."""

    before: Report
    after: Report

    def __post_init__(self) -> None:
        for each in (self.before, self.after):
            if not each.analysis.total.seconds:
                raise FormatError(f"there is nothing to compare: {each.name} has no epochs")

    @property
    def periods(self) -> tuple[Period, Period]:
        """An epoch of each: the mean of those after the first, or the only one."""
        return first_and_later(self.before)[1], first_and_later(self.after)[1]

    @property
    def first_periods(self) -> tuple[Period, Period]:
        return first_and_later(self.before)[0], first_and_later(self.after)[0]

    @property
    def changes(self) -> list[Change]:
        """Of all categories, the largest first."""
        before, after = self.periods
        nothing = Share()
        found = []
        for category in sorted({*before.categories, *after.categories}):
            pair = [each.categories.get(category, nothing) for each in (before, after)]
            found.append(
                Change(
                    category,
                    (pair[0].seconds, pair[1].seconds),
                    (pair[0].exposed_seconds, pair[1].exposed_seconds),
                )
            )
        return sorted(found, key=lambda each: -abs(each.gained))

    @property
    def verdict(self) -> str:
        """Which is faster, and by what."""
        before, after = (period.seconds for period in self.periods)
        names = self.before.name, self.after.name
        if names[0] == names[1]:
            names = "the first", "the second"
        times = f"an epoch takes {shown_seconds(after)}, not {shown_seconds(before)}"
        if abs(after - before) <= ALIKE * before:
            return f"{names[1]} is as fast as {names[0]}: {times}. {self._what(before)}".rstrip()
        faster = before > after
        ratio = before / after if faster else after / before
        word = "faster" if faster else "slower"
        first = f"{names[1]} is {word} than {names[0]} by a factor of {ratio:.3g}: {times}."
        return f"{first} {self._what(before)}{self._first_epoch()}".rstrip()

    def _what(self, whole: float) -> str:
        told = [
            f"{shown(each.category)} {_signed(-each.gained)} "
            f"({shown_seconds(each.exposed_seconds[0])} to {shown_seconds(each.exposed_seconds[1])}"
            f"{_hides(each)})"
            for each in self.changes
            if abs(each.gained) > 0.5 * ALIKE * whole
        ]
        return f"What changed most: {', '.join(told[:MOST_CHANGES])}." if told else ""

    def _first_epoch(self) -> str:
        before, after = (period.seconds for period in self.first_periods)
        if min(len(each.analysis.epochs) for each in (self.before, self.after)) < 2:
            return ""
        return f" The first epoch takes {shown_seconds(after)}, not {shown_seconds(before)}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "runs": [self.before.name, self.after.name],
            "epoch_seconds": [period.seconds for period in self.periods],
            "first_epoch_seconds": [period.seconds for period in self.first_periods],
            "categories": {
                each.category.name: {
                    name: value for name, value in asdict(each).items() if name != "category"
                }
                | {"gained_seconds": each.gained}
                for each in self.changes
            },
        }

    def to_parts(self) -> Iterable[RenderableType]:
        """The verdict and a table."""
        yield Text(self.verdict)
        yield Text()
        names = [self.before.name, self.after.name]
        table = new_table(["an epoch"], [*names, "change", *(f"{name}, exposed" for name in names)])
        before, after = (period.seconds for period in self.periods)
        table.add_row("time", shown_seconds(before), shown_seconds(after), _signed(after - before))
        for each in self.changes:
            if any(each.seconds):
                table.add_row(
                    shown(each.category),
                    *map(shown_seconds, each.seconds),
                    _signed(-each.gained),
                    *map(shown_seconds, each.exposed_seconds),
                )
        yield table


def _hides(change: Change) -> str:
    """Whether it takes as long as before, and is only hidden or no longer hidden."""
    before, after = change.seconds
    if abs(after - before) > 0.1 * max(before, after) or change.category is Category.compute:
        return ""
    return ", now hidden" if change.gained > 0 else ", no longer hidden"


def _signed(seconds: float) -> str:
    sign = "+" if seconds > 0 else "-" if seconds < 0 else ""
    return f"{sign}{shown_seconds(abs(seconds))}"
