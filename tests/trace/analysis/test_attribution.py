import numpy as np
import pytest
from hypothesis import given, strategies as st

from hyperslab.testing.traces import Made, spans_from
from hyperslab.trace import Category, Flag, Process, Thread, Trace
from hyperslab.trace.analysis.analysis import analyse
from hyperslab.trace.analysis.loop import READERS

MESSAGES = (Category.halo, Category.all_reduce)
OF_LOOP = (Category.step, Category.epoch, Category.wait, Category.optimizer)
NUM_THREADS = 3
TIME = 24
WITHOUT_STEPS = [each for each in Category if each not in (Category.step, Category.epoch)]


def trace_of(*spans_of_ranks):
    """A trace in memory, of a process with three threads for each rank."""
    strings = {"": 0}
    parts = []
    for rank, made in enumerate(spans_of_ranks):
        part = spans_from(made, strings)
        part["process"] = rank
        part["thread"] += NUM_THREADS * rank
        parts.append(part)
    spans = np.concatenate(parts)
    ranks = range(len(spans_of_ranks))
    return Trace(
        spans[np.argsort(spans["start"], kind="stable")],
        [*strings],
        [Process(rank=rank, host="here") for rank in ranks],
        [Thread(process=rank, tid=i, name=f"{i}") for rank in ranks for i in range(NUM_THREADS)],
    )


def exposed_of(made):
    return {
        c: share.exposed_seconds for c, share in analyse(trace_of(made)).total.categories.items()
    }


@st.composite
def made_spans(draw):
    """Of whole seconds, so that each second has one state."""
    start = draw(st.integers(0, TIME - 1))
    category = draw(st.sampled_from(WITHOUT_STEPS))
    is_device = category in (Category.compute, *MESSAGES, Category.copy) and draw(st.booleans())
    waits = category in (*MESSAGES, Category.wait) and draw(st.booleans())
    flags = Flag.device * is_device | Flag.exposed * waits
    stop = draw(st.integers(start, TIME))
    return Made(category, start, stop, thread=draw(st.integers(0, 2)), flags=Flag(flags))


@given(st.lists(made_spans(), max_size=9))
def test_each_second_is_given_once_and_to_whom_the_rules_say(made):
    span = Made(Category.step, 0, TIME, thread=0)
    made = [*made, span, Made(Category.epoch, 0, TIME, epoch=0)]
    wanted = dict.fromkeys(Category, 0)
    for second in range(TIME):
        wanted[owner_of(second, made)] += 1
    analysis = analyse(trace_of(made))
    period = analysis.epochs[0]
    for category, share in period.categories.items():
        assert share.exposed_seconds == wanted.pop(category)
        assert share.hidden_seconds == pytest.approx(share.seconds - share.exposed_seconds)
    assert not any(wanted.values())
    assert sum(share.exposed_seconds for share in period.categories.values()) == period.seconds
    assert period.seconds == TIME


def owner_of(second, made):
    """The rules in words of one second."""
    now = [each for each in made if each.start <= second < each.stop]
    loop_threads = {
        each.thread
        for each in made
        if (each.category in OF_LOOP or each.flags & Flag.exposed) and not each.flags & Flag.device
    }

    def goes_on(*categories, where=lambda each: True):
        return [each for each in now if each.category in categories and where(each)]

    def is_device(each):
        return bool(each.flags & Flag.device)

    def is_waiting(each):
        return bool(each.flags & Flag.exposed)

    def in_loop(each):
        return is_device(each) or is_waiting(each) or each.thread in loop_threads

    def computes(device):
        passes = goes_on(Category.compute, where=lambda each: is_device(each) == device)
        return passes and not [
            each for each in now if is_waiting(each) and is_device(each) == device
        ]

    # One step: where the GPU computes in it, its time counts alone.
    device_counts = step_has_device_compute(made)
    if computes(device=True) or (not device_counts and computes(device=False)):
        return Category.compute
    for category in MESSAGES:
        if goes_on(category, where=lambda each: is_device(each) or is_waiting(each)):
            return category
    if goes_on(Category.copy, where=in_loop):
        return Category.copy
    if goes_on(Category.optimizer):
        return Category.optimizer
    if goes_on(Category.checkpoint, where=in_loop):
        return Category.checkpoint
    for category in (*READERS, Category.copy):
        if goes_on(category, where=in_loop):
            return category
    waits = [each for each in made if each.category == Category.wait and each.stop > each.start]
    waited = {second for each in waits for second in range(each.start, each.stop)}

    def within_a_wait(each):
        of_loop = each.thread in loop_threads and not is_device(each)
        return of_loop and waited.issuperset(range(each.start, each.stop))

    for category in (Category.user, Category.compute):
        if goes_on(category, where=within_a_wait):
            return category
    if not waits or second in waited:
        for category in (*READERS, Category.copy):
            if goes_on(category):
                return category
    if second in waited and goes_on(
        Category.user, where=lambda each: each.thread not in loop_threads
    ):
        return Category.user
    rest = (Category.wait, *MESSAGES, Category.copy, Category.checkpoint, Category.evaluation)
    for category in (*rest, Category.user):
        if goes_on(category):
            return category
    return Category.other


def step_has_device_compute(made):
    """Apart from what the GPU only waits in."""
    on_device = [each for each in made if each.flags & Flag.device]
    passes = [each for each in on_device if each.category == Category.compute]
    waits = [each for each in on_device if each.flags & Flag.exposed]
    return any(
        not any(wait.start <= second < wait.stop for wait in waits)
        for each in passes
        for second in range(int(each.start), int(each.stop))
    )


def test_reads_are_exposed_while_nothing_computes_and_hidden_while_it_does():
    made = [
        Made(Category.read, 0, 3, thread=1, nbytes=30, epoch=0),
        Made(Category.compute, 2, 5, epoch=0),
        Made(Category.read, 3, 4, thread=2, nbytes=10, epoch=0),
        Made(Category.read, 3, 4, thread=1, nbytes=10, epoch=0),
    ]
    period = analyse(trace_of(made)).epochs[0]
    read = period.categories[Category.read]
    assert (read.seconds, read.exposed_seconds, read.hidden_seconds) == (4, 2, 2)
    assert (read.thread_seconds, read.nbytes) == (5, 50)
    assert period.categories[Category.compute].exposed_seconds == 3
    assert period.seconds == 5


def test_waiting_within_a_forward_pass_is_not_computing():
    made = [
        Made(Category.compute, 0, 10, "forward"),
        Made(Category.halo, 2, 7, "halo", thread=2),
        Made(Category.halo, 5, 7, "wait for halo", flags=Flag.exposed),
    ]
    assert exposed_of(made) == {Category.compute: 8, Category.halo: 2}


def test_the_code_in_which_the_loop_makes_a_batch_is_what_it_waits_for():
    made = [
        Made(Category.user, 0, 20, "all of it"),
        Made(Category.wait, 0, 9, flags=Flag.exposed),
        Made(Category.user, 1, 6, "load"),
        Made(Category.read, 2, 4),
        Made(Category.compute, 6, 8, "simulate"),
        Made(Category.read, 1, 9, thread=1),
        Made(Category.step, 0, 20),
    ]
    wanted = {Category.user: 3 + 11, Category.read: 2 + 1, Category.compute: 2, Category.wait: 1}
    assert exposed_of(made) == wanted


def test_spans_of_who_makes_batches_explain_waiting_after_reads():
    made = [
        Made(Category.wait, 0, 9, flags=Flag.exposed),
        Made(Category.read, 0, 5, thread=1),
        Made(Category.user, 4, 7, "augment", thread=1),
        Made(Category.step, 0, 10),
    ]
    found = exposed_of(made)
    assert found == {Category.read: 5, Category.user: 2, Category.wait: 2, Category.other: 1}


def test_the_gpu_decides_in_steps_whose_times_it_told():
    made = [
        Made(Category.step, 0, 10),
        Made(Category.compute, 0, 9, "launches"),
        Made(Category.compute, 2, 5, thread=2, flags=Flag.device),
        Made(Category.all_reduce, 4, 8, thread=1, flags=Flag.device),
        Made(Category.step, 10, 20),
        Made(Category.compute, 10, 19, "on the host alone"),
    ]
    found = exposed_of(made)
    assert found == {Category.compute: 12, Category.all_reduce: 3, Category.other: 5}


def test_readers_explain_waiting_and_do_not_count_while_nobody_waits():
    made = [
        Made(Category.wait, 0, 4, flags=Flag.exposed),
        Made(Category.read, 0, 2, thread=1),
        Made(Category.decode, 1, 3, thread=2),
        Made(Category.step, 0, 9),
        Made(Category.read, 5, 9, thread=1),
        Made(Category.compute, 4, 6),
        Made(Category.delay, 6, 9, thread=2),
    ]
    found = exposed_of(made)
    assert found[Category.read] == 2
    assert found[Category.decode] == 1
    assert found[Category.wait] == 1
    assert found[Category.compute] == 2
    assert found[Category.delay] == 0
    assert found[Category.other] == 3
