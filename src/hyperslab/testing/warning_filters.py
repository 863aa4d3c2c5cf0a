"""The caller's warning filters, for the ranks: what is an error in a test is one in its ranks."""

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WarningFilter:
    action: Any
    message: str
    category_module: str
    category_name: str
    module: str
    line: int

    @property
    def category(self) -> Any:
        """The warning class, or None where its module is not loaded: nobody can warn with it."""
        return getattr(sys.modules.get(self.category_module), self.category_name, None)


def current_filters() -> tuple[WarningFilter, ...]:
    filters: Iterable[tuple[Any, ...]] = warnings.filters
    return tuple(
        WarningFilter(
            action, _text(message), category.__module__, category.__name__, _text(module), line
        )
        for action, message, category, module, line in filters
    )


def install_filters(filters: Iterable[WarningFilter]) -> None:
    """Replace this process's filters by ``filters``, of which the first that fits counts."""
    warnings.resetwarnings()
    for each in reversed(tuple(filters)):
        if each.category is not None:
            warnings.filterwarnings(
                each.action, each.message, each.category, each.module, each.line
            )


def _text(pattern: re.Pattern[str] | str | None) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""
