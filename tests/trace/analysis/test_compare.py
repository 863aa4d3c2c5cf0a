import json
from dataclasses import replace

import pytest

from hyperslab.errors import FormatError
from hyperslab.testing.traces import MadeRun, write_trace
from hyperslab.trace import report
from hyperslab.trace.analysis.compare import Comparison
from hyperslab.trace.analysis.page import to_html
from hyperslab.trace.analysis.runs import lines_of_runs, runs_verdict

RUN = MadeRun(num_ranks=1, checkpoint=0)


@pytest.fixture
def of_run(tmp_path):
    def of(name, run, shuffle=None):
        write_trace(tmp_path / name / "trace", run.spans())
        if shuffle:
            (tmp_path / name / "config.toml").write_text(f'[data]\nshuffle = "{shuffle}"\n')
        return report(tmp_path / name)

    return of


def test_what_became_faster_is_told_with_its_numbers(of_run):
    found = Comparison(of_run("before", RUN), of_run("after", replace(RUN, read=0.01)))
    before, after = (period.seconds for period in found.periods)
    assert f"after is faster than before by a factor of {before / after:.3g}" in found.verdict
    assert "read -710 ms (720 ms to 10 ms)" in found.verdict
    back = Comparison(found.after, found.before)
    assert f"before is slower than after by a factor of {before / after:.3g}" in back.verdict
    assert "read +710 ms (10 ms to 720 ms)" in back.verdict
    told = json.loads(json.dumps(found.to_dict()))
    assert told["categories"]["read"]["gained_seconds"] == pytest.approx(0.71)
    gained = sum(each["gained_seconds"] for each in told["categories"].values())
    assert gained == pytest.approx(before - after)


def test_what_is_only_hidden_now_is_told(of_run):
    slow = replace(RUN, layer=0.1)
    found = Comparison(of_run("before", RUN), of_run("after", slow))
    assert ", now hidden)" in found.verdict


def test_runs_that_are_alike_are_told_so(of_run):
    one = of_run("one", RUN)
    assert "one is as fast as" not in Comparison(one, one).verdict
    assert "the second is as fast as the first" in Comparison(one, one).verdict


def test_runs_on_more_ranks_and_with_other_shuffling_stand_side_by_side(of_run):
    reports = [
        of_run("a", RUN, "local"),
        of_run("b", replace(RUN, read=0.5), "global"),
        of_run("c", replace(RUN, num_ranks=2), "local"),
    ]
    words = runs_verdict(reports)
    later = [each.analysis.epochs[1].seconds for each in reports]
    assert f"On 1 rank later epochs take {later[0]:.3g} s with local" in words
    assert f"{later[1]:.3g} s with global shuffling" in words
    assert "I/O that is waited for (shuffle: local): " in words
    lines = lines_of_runs(reports)
    assert {name: [num for num, _ in points] for name, points in lines.items()} == {
        "shuffle: local": [1, 2],
        "shuffle: global": [1],
    }
    assert lines_of_runs(reports[:2]) == {}
    page = to_html(reports)
    assert page.count("<polyline") == 2
    assert "All runs" in page


def test_a_run_of_which_nothing_was_recorded_is_not_compared(of_run, tmp_path):
    write_trace(tmp_path / "empty", [[]])
    with pytest.raises(FormatError, match="nothing to compare: empty has no epochs"):
        Comparison(of_run("run", RUN), report(tmp_path / "empty"))
