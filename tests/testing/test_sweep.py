import re
import sys
from pathlib import Path

import pytest
import torch

from hyperslab.testing import Team
from hyperslab.testing.sweep import Effort, rendered, sweep

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

RULES = """
import os
import torch
from torch import special
import hyperslab as hs


@hs.register(special.erfcx)
def right(input):
    return input.with_local(special.erfcx(input.local))


@hs.register(special.entr)
def wrong_value(input):
    return input.with_local(special.entr(input.local) + 1)


@hs.register(special.i0e)
def wrong_gradient(input):
    return input.with_local(special.i0e(input.local) + input.local - input.local.detach())


@hs.register(special.i1)
def wrong_dtype(input):
    return input.with_local(special.i1(input.local).float())


@hs.register(special.i1e)
def refused_by_one_rank(input):
    if input.mesh.rank:
        raise hs.UnsupportedOp("not here")
    return input.with_local(special.i1e(input.local))


@hs.register(special.log_ndtr)
def another_error(input):
    raise TypeError("unexpected keyword argument")


@hs.register(special.ndtri)
def death(input):
    os._exit(3)


@hs.register(torch.special.bessel_j0)
def refusal(input):
    raise hs.UnsupportedOp("bessel_j0 cannot run: its phase is split. Call hyperslab.gather(x)")
"""


@pytest.fixture(scope="module")
def broken_rules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    (folder / "broken_rules.py").write_text(RULES)
    names = ["erfcx", "entr", "i0e", "i1", "i1e", "log_ndtr", "ndtri", "bessel_j0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(sys.modules[sweep.__module__], "MAX_BREAKS", 1)
        found = sweep(
            [f"special.{name}" for name in names],
            Effort(samples=3, trials=6),
            modules=["broken_rules"],
        )
    return {name.removeprefix("special."): each for name, each in found.by_operator().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("entr", "output 0: \\["),
        ("i0e", "gradient of input 0"),
        ("i1", "dtype torch.float32 instead of torch.float64"),
        ("i1e", "ranks differ"),
        ("log_ndtr", "raises TypeError: unexpected .*, but one process returns"),
        ("ndtri", "rank . died with exit code 3"),
    ],
)
def test_a_wrong_rule_is_found(broken_rules, name, why):
    wrong = [trial for trial in broken_rules[name] if trial.verdict == "wrong"]
    assert any(re.search(why, trial.why) for trial in wrong), wrong


@pytest.mark.slow
def test_a_rule_may_be_right(broken_rules):
    assert {trial.verdict for trial in broken_rules["erfcx"]} == {"right"}


@pytest.mark.slow
def test_a_refusal_is_kept_with_its_reason(broken_rules):
    refused = [trial for trial in broken_rules["bessel_j0"] if trial.verdict == "refused"]
    assert refused
    assert {trial.why for trial in refused} == {"its phase is split"}


def run_example(code):
    exec(code, {})


def test_the_example_of_the_page_runs_on_two_ranks():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    with Team(2) as team:
        team.run(run_example, code)


def dims_on(page):
    """Along which dims each operator may be split, as the text of a page says."""
    found, space = {}, ""
    for line in page.splitlines():
        if line.startswith("### torch"):
            space = line.removeprefix("### torch").removeprefix(".")
        elif row := re.match(r"\| `(.+?)` \| (.+?) \|", line):
            found[f"{space}.{row[1]}" if space else row[1]] = row[2]
    return found


@pytest.fixture(scope="module")
def dims():
    page = PAGE.read_text()
    version = re.search(r"With torch (\S+): ", page)[1]
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(f"the page was written with torch {version}")
    return dims_on(page)


def test_some_operators_are_right_or_refused(dims):
    assert_right_or_refused(sweep(sorted(dims)[::12], Effort(samples=2, trials=6)))


@pytest.mark.slow
def test_every_operator_is_right_or_refused():
    """``python -m hyperslab.testing.sweep --thorough`` tries every sample, for half an hour."""
    assert_right_or_refused(sweep(effort=Effort(samples=2, trials=6)))


def assert_right_or_refused(findings):
    wrong = findings.of("wrong")
    assert not wrong, "\n".join(f"{trial}\n    {trial.why}" for trial in wrong)
    assert findings.of("right")


@pytest.mark.slow
def test_the_page_says_which(dims):
    """Some operators are tried as often as they were for the page."""
    some = sorted(dims)[::20]
    now = dims_on(rendered(sweep(some)))
    changed = {name: (dims[name], found) for name, found in now.items() if found != dims[name]}
    assert now.keys() == {*some}
    assert not changed, "run: python -m hyperslab.testing.sweep --write docs/operators.md"
