"""What a sweep found, and the support table that is made of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

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


ANY, FIRST, SOME, NONE = "any", "any of its input", "some", "none"

_SPACES = ("nn.functional", "Tensor", "linalg", "fft", "special", "masked", "signal.windows")

_INTRODUCTION = """\
# Which torch operators run on Slabs

Every operator of PyTorch's own test database, all of `torch.nn.functional`, the methods of
`torch.Tensor` and whatever else can be overridden were called on two ranks, with arguments split
along each dim in turn: unevenly, with an empty piece, one argument or several, the same way or
crosswise. Each call gave what it gives in one process (values, shapes, dtypes, what it writes in
place, all gradients, in float64), or raised `hs.UnsupportedOp`; none did anything else.

The second column says along which dims a tensor may be split:

| split dims | the operator is right |
|---|---|
| any | on every split that was tried, whichever arguments are split |
| any of its input | on every split of its first tensor; a split weight or index may be refused |
| all but 1 | on every split of its first tensor along the other dims |
| some | on some, and refused on others: it depends on the arguments, as on `dim=` |
| none | on a Slab that no axis splits, as every rank then holds the whole |
| refused | never |

"Because" is the most frequent reason of a refusal. All ranks refuse together, before the first
message, so a model stops with a line that names the function.

## What to do about a refusal

Gather the tensor, or write a rule. Both are a line or two:

```python
import torch
import hyperslab as hs

torch.manual_seed(0)                               # the same x on every rank
mesh = hs.init(depth=2)
x = hs.shard(torch.rand(2, 1, 8, 4, 4), mesh)      # dim 2 is split

middle = torch.median(hs.gather(x))                # every rank has all of x


@hs.register(torch.histc)                          # a rule takes the function's own arguments
def histc(x, *args, **kwargs):
    return torch.histc(hs.gather(x), *args, **kwargs)


y = torch.histc(x, bins=10, min=0, max=1)
```

Save the rule in `my_rules.py` and try it as all others here were tried, on two ranks:

```console
$ python -m hyperslab.testing.sweep --import my_rules histc
```

This page is written by `python -m hyperslab.testing.sweep --write docs/operators.md`.
"""


@dataclass(frozen=True)
class Support:
    """Where one operator is right."""

    dims: str
    because: str = ""


def support(trials: Sequence[Trial]) -> Support:
    """Where the operator of these trials is right."""
    calls = [trial for trial in trials if not trial.sample.startswith("error")]
    split = [trial for trial in calls if trial.kind != "whole"]
    refused = [trial for trial in split if trial.verdict == REFUSED]
    if not any(trial.verdict == RIGHT for trial in split):
        whole = any(trial.verdict == RIGHT for trial in calls)
        return Support(NONE if whole else REFUSED, _reason(refused or calls))
    if not refused:
        return Support(ANY)
    main = [trial for trial in split if trial.kind == "main"]
    return Support(_dims(main), _reason(main) or _reason(refused))


def _dims(trials: Sequence[Trial]) -> str:
    """The dims of the first tensor along which it may be split."""
    verdicts: dict[int, set[str]] = {}
    for trial in trials:
        assert trial.dim is not None
        verdicts.setdefault(trial.dim, set()).add(trial.verdict)
    never = [dim for dim, each in verdicts.items() if RIGHT not in each]
    if verdicts and not any(REFUSED in each for each in verdicts.values()):
        return FIRST
    if all(len(each) == 1 for each in verdicts.values()) and len(never) == 1 < len(verdicts):
        return f"all but {never[0]}"
    return SOME


def _reason(trials: Sequence[Trial]) -> str:
    """The most frequent reason of a refusal."""
    counts = Counter(trial.why for trial in trials if trial.verdict == REFUSED)
    return min(counts, key=lambda why: (-counts[why], why), default="")


def rendered(findings: Findings) -> str:
    """The page as Markdown."""
    found = {name: support(trials) for name, trials in findings.by_operator().items()}
    return "\n".join([_INTRODUCTION, *_summary(findings, found), *_tables(found)]) + "\n"


def _summary(findings: Findings, found: Mapping[str, Support]) -> Iterator[str]:
    counts = Counter(each.dims for each in found.values())
    partly = len(found) - counts[ANY] - counts[NONE] - counts[REFUSED]
    yield "## The table"
    yield ""
    yield (
        f"Of {len(found)} operators {counts[ANY]} run on any split, {partly} on some, "
        f"{counts[NONE]} on tensors that no axis splits, and {counts[REFUSED]} are refused. "
        f"With torch {_version()}: {findings.summary()}."
    )


def _tables(found: Mapping[str, Support]) -> Iterator[str]:
    for space in ("", *_SPACES):
        rows = {name: each for name, each in found.items() if _space(name) == space}
        if not rows:
            continue
        yield ""
        yield f"### torch{'.' * bool(space)}{space}"
        yield ""
        yield "| operator | split dims | because |"
        yield "|---|---|---|"
        for name in sorted(rows, key=lambda name: name.lower()):
            shown = name.removeprefix(f"{space}.")
            yield f"| `{shown}` | {rows[name].dims} | {_cell(rows[name].because)} |"


def _space(name: str) -> str:
    return next((space for space in _SPACES if name.startswith(f"{space}.")), "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _version() -> str:
    return torch.__version__.partition("+")[0]
