from dataclasses import replace

import numpy as np
import pytest

from hyperslab.testing.traces import SECOND, Made, write_trace
from hyperslab.trace import Category, Flag, load_trace, report
from hyperslab.trace.analysis.analysis import analyse
from hyperslab.trace.analysis.loop import NUM_BINS, READERS, ranks_of


def rank_of(tmp_path, made):
    write_trace(tmp_path, [made])
    (rank,) = ranks_of(load_trace(tmp_path))
    return rank


def windows(rank):
    base = int(rank.starts.min())
    return {
        number: [
            ((start - base) / SECOND, (stop - base) / SECOND)
            for start, stop in zip(each.starts.tolist(), each.stops.tolist(), strict=True)
        ]
        for number, each in rank.epochs.items()
    }


def test_epochs_are_those_of_their_spans(tmp_path):
    made = [
        Made(Category.epoch, 0, 4, epoch=0),
        Made(Category.read, 3, 6, epoch=1, thread=1),
        Made(Category.epoch, 5, 9, epoch=1),
        Made(Category.evaluation, 9, 10, epoch=1),
    ]
    rank = rank_of(tmp_path, made)
    assert windows(rank) == {0: [(0, 4)], 1: [(5, 9)]}
    found = report(tmp_path).analysis
    assert found.outside.seconds == 2
    assert found.outside.categories[Category.evaluation].exposed_seconds == 1


def test_an_epoch_that_was_killed_is_known_by_its_steps(tmp_path):
    made = [
        Made(Category.epoch, 0, 4, epoch=0),
        Made(Category.read, 3, 5, epoch=1, thread=1),
        Made(Category.wait, 4, 5, epoch=1, flags=Flag.exposed),
        Made(Category.step, 4, 7, epoch=1),
    ]
    assert windows(rank_of(tmp_path, made)) == {0: [(0, 4)], 1: [(4, 7)]}


def test_an_epoch_that_went_on_in_another_process_has_two_parts(tmp_path):
    first, second = ([Made(Category.epoch, at, at + 2, epoch=3)] for at in (0, 10))
    one, other = write_trace(tmp_path, [first, second])
    content = other.read_bytes()
    other.unlink()
    assert b'"rank": 1' in content
    trace = load_trace(one)
    assert len(trace) == 1
    write_trace(tmp_path / "more", [[*first, *second]])
    (rank,) = ranks_of(load_trace(tmp_path / "more"))
    assert windows(rank) == {3: [(0, 2), (10, 12)]}
    assert report(tmp_path / "more").analysis.epochs[3].seconds == 4


def test_without_epochs_all_is_epoch_0_and_the_report_says_so(tmp_path):
    made = [Made(Category.read, 1, 2, "a.npy", nbytes=8), Made(Category.read, 5, 6, "a.npy")]
    rank = rank_of(tmp_path, made)
    assert windows(rank) == {0: [(0, 5)]}
    assert len(rank.steps) == NUM_BINS
    assert not rank.has_steps
    assert any("no span tells its epoch" in note for note in report(tmp_path).analysis.notes)


def test_epochs_by_the_numbers_of_spans_begin_with_their_first_work(tmp_path):
    made = [
        Made(Category.read, 0, 2, epoch=0, thread=1),
        Made(Category.compute, 2, 4, epoch=0),
        Made(Category.read, 3, 5, epoch=1, thread=1),
        Made(Category.compute, 5, 8, epoch=1),
    ]
    assert windows(rank_of(tmp_path, made)) == {0: [(0, 4)], 1: [(4, 8)]}


@pytest.mark.parametrize("told", ["spans", "numbers"])
def test_steps_reach_from_end_to_end(tmp_path, told):
    made = [Made(Category.epoch, 0, 10, epoch=0)]
    for i, (start, stop) in enumerate([(1, 4), (5, 8)]):
        made.append(Made(Category.compute, start, stop, step=i, epoch=0))
        if told == "spans":
            made.append(Made(Category.step, start, stop, step=i, epoch=0))
    steps = rank_of(tmp_path, made).steps
    assert [(each.stop - each.start) // SECOND for each in steps] == [4, 6]
    assert [each.number for each in steps] == [0, 1]
    assert np.diff([steps[0].stop, steps[1].start]) == 0


@pytest.mark.parametrize("told", ["spans", "numbers"])
def test_what_helpers_do_for_the_next_epoch_makes_no_epoch(tmp_path, told):
    made = []
    for epoch in range(2):
        at = 4 * epoch
        of = {"epoch": epoch, "step": epoch}
        if told == "spans":
            made += [
                Made(Category.epoch, at, at + 4, epoch=epoch),
                Made(Category.step, at, at + 4, **of),
            ]
        made.append(Made(Category.compute, at, at + 4, **of))
    helpers = (*READERS, Category.copy, Category.delay, Category.user, Category.compute)
    made.append(Made(Category.wait, 0, 0.5, epoch=0, flags=Flag.exposed))
    made += [Made(each, 9, 10, epoch=2, step=2, thread=1) for each in helpers]
    assert windows(rank_of(tmp_path, made)) == {0: [(0, 4)], 1: [(4, 8)]}


def test_an_epoch_that_was_killed_and_resumed_counts_both_parts_and_is_noted(tmp_path):
    whole = [Made(Category.epoch, 0, 4, epoch=0), Made(Category.step, 0, 4, epoch=0)]
    killed = [Made(Category.step, 4 + i, 5 + i, epoch=1) for i in range(2)]
    resumed = [Made(Category.step, 20, 23, epoch=1), Made(Category.epoch, 20, 23, epoch=1)]
    rank = two_processes(tmp_path, [*whole, *killed], resumed)
    assert windows(rank) == {0: [(0, 4)], 1: [(4, 6), (20, 23)]}
    assert rank.broken_off == {1: 2}
    (note,) = analyse(rank.trace).notes
    assert note.startswith("epoch 1 was broken off after 2 steps")


@pytest.mark.parametrize("num", [0, 2])
def test_an_epoch_without_an_end_is_noted_however_few_its_steps(tmp_path, num):
    made = [Made(Category.epoch, 0, 4, epoch=0), Made(Category.step, 0, 4, epoch=0)]
    made += [Made(Category.step, 4 + i, 5 + i, epoch=1) for i in range(num)]
    rank = rank_of(tmp_path, [*made, Made(Category.compute, 6, 7, epoch=1)])
    assert rank.broken_off == {1: num}
    assert windows(rank)[1] == [(4 if num else 6, 7)]


def test_epochs_of_a_tool_that_tells_no_ends_are_not_broken_off(tmp_path):
    made = [Made(Category.step, i, i + 1, epoch=i) for i in range(3)]
    assert rank_of(tmp_path, made).broken_off == {}


def two_processes(tmp_path, *spans):
    """A rank of which each of ``spans`` is of a process."""
    write_trace(tmp_path, spans)
    trace = load_trace(tmp_path)
    trace.processes[:] = [replace(each, rank=0) for each in trace.processes]
    (rank,) = ranks_of(trace)
    return rank
