"""What a sweep found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

RIGHT, REFUSED, WRONG = VERDICTS = ("right", "refused", "wrong")


@dataclass(frozen=True)
class Trial:
    """One call on Slabs, with its verdict once there is one."""

    operator: str
    number: int
    """Of the trials of its operator."""
    spelling: str
    sample: str
    placement: str
    kind: str
    """Of the placement."""
    dim: int | None
    """Along which the first Slab is split."""
    grads: bool
    verdict: str = ""
    why: str = ""

    def __str__(self) -> str:
        grads = "" if self.grads else ", no gradients"
        return f"{self.operator}, {self.spelling}, sample {self.sample}, {self.placement}{grads}"


@dataclass
class Findings:
    """The trials of a sweep."""

    trials: list[Trial] = field(default_factory=list)

    def of(self, verdict: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.verdict == verdict]

    def by_operator(self) -> dict[str, Sequence[Trial]]:
        grouped = defaultdict(list)
        for trial in self.trials:
            grouped[trial.operator].append(trial)
        return dict(grouped)

    def summary(self) -> str:
        """The counts, such as ``24 right, 3 refused, 0 wrong in 27 trials of 2 operators``."""
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in VERDICTS)
        return f"{counts} in {len(self.trials)} trials of {len(self.by_operator())} operators"
