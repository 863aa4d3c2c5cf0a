import json
from dataclasses import replace

import numpy as np
import pytest

from hyperslab.errors import FormatError
from hyperslab.testing.traces import SECOND, Made, MadeRun, write_trace
from hyperslab.trace import Category, Flag, Tier, report, write_report
from hyperslab.trace.analysis.page.content import run_content

RUN = MadeRun()


@pytest.fixture
def of_run(tmp_path):
    def of(run, name="run", **options):
        write_trace(tmp_path / name / "trace", run.spans(), **options)
        return report(tmp_path / name)

    return of


def waited(run):
    """Seconds that the loop of a made-up run waits, by epoch: reads go on while it computes."""
    rest = run.copy + run.num_layers * run.layer * run.slowness + run.reduce + run.optimizer
    reads = [run.first_read, *[run.read] * (run.num_epochs - 1)]
    return [read + (run.num_steps - 1) * max(0, read - rest) for read in reads]


def test_the_exposed_part_of_a_throttled_reader_is_found(of_run):
    for read in (0.05, 0.3, 1.0):
        run = replace(RUN, read=read)
        found = of_run(run, f"{read}")
        for (_, period), truth in zip(found.analysis.epochs.items(), waited(run), strict=True):
            assert period.exposed(Category.read) == pytest.approx(truth, rel=0.05)
            assert period.categories[Category.wait].exposed_seconds == pytest.approx(0, abs=1e-6)


def test_the_verdict_names_reads_their_share_and_what_would_hide_them(of_run):
    found = of_run(RUN)
    seconds, wall = waited(RUN)[0], found.analysis.epochs[0].seconds
    assert f"waited {seconds / wall:.0%} of epoch 0 for reads" in found.verdict
    assert "3 more reader threads a rank would hide it. If samples came" in found.verdict
    free = found.what_ifs[0]
    assert free.name == "io_free"
    assert free.seconds == pytest.approx(found.analysis.total.seconds - sum(waited(RUN)), rel=1e-3)


def test_the_verdict_of_a_gpu_that_waits_in_one_epoch(tmp_path):
    made, at = [], 0.0
    for epoch, read in enumerate([0.5, 1.45, 0.5]):  # seconds of each read beside 1 s of the GPU
        start, ready = at, at
        for step in range(10):
            begun, ready = at, ready + (read if step else 0.01)
            of = {"epoch": epoch, "step": 10 * epoch + step}
            made.append(Made(Category.read, ready - read, ready, "a.h5", thread=1, nbytes=9, **of))
            at = max(at, ready)
            made.append(Made(Category.wait, begun, at, flags=Flag.exposed, **of))
            made.append(Made(Category.delay, ready, at, thread=1, **of))  # as our loader has it
            made.append(Made(Category.other, at, at + 0.9, "launch forward", **of))
            gpu = {"thread": 3, "flags": Flag.device, **of}
            made.append(Made(Category.compute, at, at + 1, "forward", **gpu))
            at += 1
            made.append(Made(Category.step, begun, at, **of))
        made.append(Made(Category.epoch, start, at, epoch=epoch))
    write_trace(tmp_path, [made])
    found = report(tmp_path)
    share = found.analysis.epochs[1].share(Category.read)
    assert share == pytest.approx(9 * 0.45 / 14, rel=0.01)
    assert found.verdict.startswith(
        f"The GPU waited {share:.0%} of epoch 1 for reads (4.06 s of 14.1 s), 0.1% of the others; "
        "1 more reader thread a rank or store=memory would hide it. If samples came at once, "
        "the run would take 30 s, not 34.1 s."
    )
    assert found.to_dict()["ranks"][0]["has_gpu_times"]


def test_more_readers_save_what_the_same_run_with_faster_reads_saves(of_run):
    slow = replace(RUN, read=0.6, first_read=0.6, num_steps=40)
    found = of_run(slow)
    (more,) = [each for each in found.what_ifs if each.name == "one_more_reader"]
    # Two threads in turn read as one does: half as many more are half as fast again.
    fast = of_run(replace(slow, read=0.4, first_read=0.4), "fast")
    assert more.seconds == pytest.approx(fast.analysis.total.seconds, rel=0.05)


def test_what_memory_does_not_help_is_not_advised(of_run):
    verdict = of_run(replace(RUN, read=0.001)).verdict
    assert "of epoch 0 for reads" in verdict
    assert "store=memory" not in verdict


def test_readers_that_are_slower_side_by_side_are_not_advised(tmp_path):
    made = []
    for i in range(40):  # alone for 1 s, then two of them for 2 s each
        made.append(Made(Category.read, 3 * i, 3 * i + 1, f"{i}.h5", thread=1, nbytes=100))
        made += [
            Made(Category.read, 3 * i + 1, 3 * i + 3, "b", thread=t, nbytes=100) for t in (1, 2)
        ]
        made.append(Made(Category.wait, 3 * i, 3 * i + 2.9, flags=Flag.exposed))
        made.append(Made(Category.compute, 3 * i + 2.9, 3 * i + 3))
        made.append(Made(Category.step, 3 * i, 3 * i + 3, epoch=0))
    write_trace(tmp_path, [made])
    found = report(tmp_path)
    assert "more reader threads would not help: 2 reads at once bring 100 B/s, 1 100 B/s" in (
        found.verdict
    )
    assert [(each.num_reads, each.count) for each in found.analysis.reading] == [(1, 40), (2, 80)]


def looped(step, num_epochs=2, num_steps=6, ranks=1):
    """Of each rank, ``step(made, at, rank, i)`` appends what it does from ``at`` on; gives the end.

    It is step ``i`` of all.
    """
    spans = []
    for rank in range(ranks):
        made, at = [], 0.0
        for epoch in range(num_epochs):
            start = at
            for i in range(num_steps):
                begun, at = at, step(made, at, rank, i + epoch * num_steps)
                made.append(Made(Category.step, begun, at, epoch=epoch, step=i))
            made.append(Made(Category.epoch, start, at, epoch=epoch))
        spans.append(made)
    return spans


def waits(made, at, stop, *, of=None, name="a.h5", thread=1):
    """For a batch from ``at`` to ``stop``, while a reader does something."""
    made.append(Made(Category.wait, at, stop, flags=Flag.exposed))
    if of is not None:
        made.append(Made(of, at, stop, name, thread=thread, nbytes=1000))
    return stop


def computes(made, at, seconds):
    made.append(Made(Category.compute, at, at + seconds, "forward"))
    return at + seconds


def verdict_of(tmp_path, spans):
    write_trace(tmp_path, spans)
    return report(tmp_path).verdict


def test_code_in_which_the_loop_makes_batches_is_named_with_its_share(tmp_path):
    def step(made, at, rank, i):
        made.append(Made(Category.user, at, at + 0.8, "augment"))
        return computes(made, waits(made, at, at + 0.8), 0.2)

    write_trace(tmp_path, looped(step))
    found = report(tmp_path)
    assert "waited 80% of the time for code that makes batches (augment 80%)" in found.verdict
    assert found.shares()["user"] == pytest.approx(0.8)
    assert {each.name: each.saved_share for each in found.what_ifs} == {
        "io_free": pytest.approx(0.8)
    }


def test_of_a_wait_that_nothing_explains_no_advice_is_given(tmp_path):
    def step(made, at, rank, i):
        at = waits(made, at, at + 0.1, of=Category.read)
        return computes(made, waits(made, at, at + 0.5), 0.4)

    verdict = verdict_of(tmp_path, looped(step))
    assert "50% batches that no recorded work explains, 10% reads" in verdict
    assert "what readers did then is not known, hyperslab.span in the data set tells" in verdict
    assert "prefetch" not in verdict
    assert "disks" not in verdict


def test_more_readers_are_not_advised_where_only_the_first_batch_waits(tmp_path):
    def step(made, at, rank, i):
        stop = at if i else waits(made, at, at + 5, of=Category.read)
        made.append(Made(Category.read, stop, stop + 0.9, "a.h5", thread=1, nbytes=1000))
        return computes(made, stop, 1)

    verdict = verdict_of(tmp_path, looped(step))
    assert "of epoch 0 for reads" in verdict
    assert "most of it is for the first batch" in verdict
    assert not any(word in verdict for word in ("more reader", "store=memory", "disks"))


def test_one_more_reader_saves_nothing_of_what_comes_before_the_first_batch(tmp_path):
    def step(made, at, rank, i):
        return computes(made, waits(made, at, at + (0.1 if i % 6 else 5), of=Category.read), 0.1)

    write_trace(tmp_path, looped(step))
    saved = {each.name: each.saved_seconds for each in report(tmp_path).what_ifs}
    assert 0 < saved["one_more_reader"] <= 10 * 0.1


def test_disks_are_only_advised_where_reads_are_waited_for(tmp_path):
    def step(made, at, rank, i):
        for thread in range(1, 41):  # so many that 32 more would not do
            made.append(Made(Category.stage, at, at + 1, "a.h5", thread=thread, nbytes=1000))
        return computes(made, waits(made, at, at + 1), 0.25)

    write_trace(tmp_path, looped(step), threads=[f"{i}" for i in range(41)])
    verdict = report(tmp_path).verdict
    assert "waited 80% of the time for staging" in verdict
    assert "disks" not in verdict


def test_a_loader_that_starts_later_makes_no_straggler_and_a_slow_rank_is_one(tmp_path):
    def of(slowness):
        def step(made, at, rank, i):
            at = at if i else waits(made, at, at + 1 + 2 * rank, of=Category.read)
            at = computes(made, at, 1.0 if rank < 3 else slowness)
            made.append(Made(Category.all_reduce, at, at + 0.1, flags=Flag.exposed))
            return at + 0.1

        return looped(step, ranks=4)

    write_trace(tmp_path / "even", of(1))
    assert report(tmp_path / "even").stragglers == []
    write_trace(tmp_path / "slow", of(3))
    found = report(tmp_path / "slow")
    assert [each.rank for each in found.stragglers] == [3]
    assert found.stragglers[0].lag_seconds == pytest.approx(24)
    assert found.verdict.startswith("Rank 3 (on node0) is a straggler")


def test_a_rank_that_is_slower_now_and_then_by_chance_is_no_straggler(tmp_path):
    def step(made, at, rank, i):
        at = computes(made, at, 1.3 if rank == 0 and i in (2, 5) else 1.0)
        made.append(Made(Category.all_reduce, at, at + 0.1, flags=Flag.exposed))
        return at + 0.1

    write_trace(tmp_path, looped(step, num_steps=4, ranks=2))
    assert report(tmp_path).stragglers == []


def test_the_iteration_is_a_usual_step(tmp_path):
    def step(made, at, rank, i):
        at = waits(made, at, at + 5) if i % 4 == 0 else at
        at = computes(made, at, 1.0)
        if i % 4 == 3:
            made.append(Made(Category.evaluation, at, at + 4, "evaluation"))
            at += 4
        return at

    write_trace(tmp_path, looped(step, num_steps=4))
    (rows,) = report(tmp_path).analysis.iteration.ranks
    assert rows.seconds == 1


def test_seconds_of_threads_are_of_the_time_of_an_epoch_and_nested_spans_count_once(tmp_path):
    made = [
        *(Made(Category.epoch, 10 * i, 10 * i + 10, epoch=i) for i in range(2)),
        *(Made(Category.step, 10 * i, 10 * i + 10, epoch=i) for i in range(2)),
        Made(Category.compute, 0, 6, "forward"),
        Made(Category.compute, 1, 5, "forward", layer="conv"),
        *(Made(Category.read, 8, 12, "a.h5", thread=t, epoch=1) for t in (1, 2)),
    ]
    write_trace(tmp_path, [made])
    first, second = report(tmp_path).analysis.epochs.values()
    assert first.categories[Category.compute].thread_seconds == 6
    assert [each.categories[Category.read].thread_seconds for each in (first, second)] == [4, 4]
    for period in (first, second):
        for share in period.categories.values():
            assert share.thread_seconds >= share.seconds


def test_the_verdict_has_four_sentences_and_of_the_first_what_it_costs(of_run):
    run = replace(RUN, num_ranks=4, slowness=1.5, reduce=0.2, optimizer=0.2)
    found = of_run(run)
    assert len(found.findings) == 4
    assert found.verdict == " ".join(each.text for each in found.findings)
    costly = of_run(replace(RUN, slowness=1.3), "costly")
    texts = [each.text for each in costly.findings]
    assert costly.verdict == " ".join([texts[0], costly.findings[0].would, *texts[1:]])


def test_a_run_in_which_nothing_computes_is_not_said_to(tmp_path):
    made = [Made(Category.step, 0, 1, epoch=0), Made(Category.checkpoint, 0.95, 1, epoch=0)]
    assert "computing" not in verdict_of(tmp_path, [made])


def test_names_of_spans_are_no_files(tmp_path):
    made = [
        Made(Category.read, i, i + 1, name, nbytes=8) for i, name in enumerate(["load", "a.h5"])
    ]
    write_trace(tmp_path, [made])
    assert [each.name for each in report(tmp_path).analysis.files] == ["a.h5"]


def test_a_straggler_is_found_and_what_makes_it_late(of_run):
    run = replace(RUN, num_ranks=4, slowness=1.5, first_read=0.1, read=0.1)
    found = of_run(run, hosts=("fast", "slow"))
    (late,) = found.stragglers
    lag = run.num_epochs * run.num_steps * run.num_layers * run.layer * 0.5
    assert (late.rank, late.host, late.category) == (3, "slow", Category.compute)
    assert late.lag_seconds == pytest.approx(lag)
    assert late.others_wait_seconds == pytest.approx(lag)
    assert "Rank 3 (on slow) is a straggler" in found.verdict
    assert "1.5 times as much as on others" in found.verdict
    even = of_run(replace(run, slowness=1), "even")
    assert even.stragglers == []
    saved = {each.name: each.saved_seconds for each in found.what_ifs}
    assert saved["network_free"] == pytest.approx(run.num_epochs * run.num_steps * run.reduce)
    assert saved["even_ranks"] == pytest.approx(lag * 3 / 4, rel=0.01)


def test_a_run_that_only_computes_is_told_so(of_run):
    run = replace(RUN, num_ranks=1, read=0.01, first_read=0.01, reduce=0, optimizer=0, copy=0)
    assert "Hardly anything is waited for" in of_run(run).verdict


def test_a_program_of_which_only_reads_are_known_is_not_said_to_wait_for_them(tmp_path):
    made = [Made(Category.read, i, i + 0.5, "a.h5", nbytes=2**20) for i in range(4)]
    write_trace(tmp_path, [made])
    verdict = report(tmp_path).verdict
    assert verdict.startswith("Files were read in 57% of the time (2 s of 3.5 s), 4.0 MiB in all.")
    assert "waited 57%" not in verdict


def test_clocks_two_seconds_apart_are_aligned(of_run):
    found = of_run(replace(RUN, num_ranks=4), hosts=("one", "other"), clock_offsets=(0, 2))
    steps = [[step.stop for step in rank.step_list] for rank in found.analysis.ranks]
    assert np.ptp(steps, axis=0).max() < SECOND / 1000


def test_json_has_all_that_a_program_needs(of_run):
    told = json.loads(json.dumps(of_run(RUN).to_dict()))
    assert told["first_epoch"]["seconds"] == told["epochs"][0]["seconds"]
    assert told["later_epochs"]["seconds"] == pytest.approx(told["epochs"][1]["seconds"])
    assert {"verdict", "epochs", "ranks", "what_if", "stragglers", "slowest_files"} <= told.keys()
    assert [epoch["epoch"] for epoch in told["epochs"]] == [0, 1, 2]
    for epoch in (*told["epochs"], *told["ranks"][1]["epochs"]):
        assert sum(each["exposed_seconds"] for each in epoch["categories"].values()) == (
            pytest.approx(epoch["seconds"])
        )
        for each in epoch["categories"].values():
            parts = each["exposed_seconds"] + each["hidden_seconds"]
            assert each["seconds"] == pytest.approx(parts)
    read = told["epochs"][0]["categories"]["read"]
    assert read["bytes"] == RUN.num_ranks * RUN.num_steps * 50_000_000
    assert read["seconds"] == pytest.approx(RUN.num_steps * RUN.first_read)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert told["iteration"]["ranks"][0]["rows"]["halo"]["hidden_share"] == 1
    assert told["outside_epochs"]["categories"]["checkpoint"]["seconds"] == pytest.approx(0.6)


def test_the_file_that_lags_behind_the_others_comes_first(tmp_path):
    made = [
        Made(Category.read, i, i + (5 if i == 3 else 0.5), f"{i}.h5", nbytes=1000) for i in range(6)
    ]
    write_trace(tmp_path, [made])
    slowest, *others = report(tmp_path).analysis.files
    assert (slowest.name, slowest.lost_seconds) == ("3.h5", pytest.approx(4.5))
    assert all(each.lost_seconds == 0 for each in others)


def test_bandwidth_is_told_by_where_bytes_came_from(tmp_path):
    made = [
        Made(Category.read, 0, 1, "a.h5", nbytes=1000, tier=Tier.file, epoch=0),
        Made(Category.read, 3, 4, "a.h5", nbytes=1000, tier=Tier.memory, epoch=0),
    ]
    write_trace(tmp_path, [made])
    found = report(tmp_path).analysis.bandwidth
    assert {*found.total} == {"read from file", "read from memory"}
    for values in found.total.values():
        assert sum(values) * found.seconds == pytest.approx(1000)
    assert not found.total["read from file"][100:].any()


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 0.3, 100])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_chart_of_bandwidth_is_filled_however_short_a_run_is(tmp_path, seconds, num_ranks):
    read = Made(Category.read, 0, seconds, "a.h5", nbytes=10**6, tier=Tier.file, epoch=0)
    write_trace(tmp_path, [[read]] * num_ranks)
    found = report(tmp_path)
    told = run_content(found)["bandwidth"]
    for rank in range(num_ranks):
        shown = told["ranks"].get(str(rank)) or told["total"]
        assert len(shown["read from file"]) == 200
        assert min(shown["read from file"]) > 0
    total = sum(told["total"]["read from file"]) * found.analysis.bandwidth.seconds
    assert total == pytest.approx(num_ranks * 10**6, rel=0.01)
    assert {*told["ranks"]} == ({"0", "1"} if num_ranks == 2 else set())


def test_bytes_that_are_told_of_twice_count_once(tmp_path):
    made = [
        Made(Category.halo, 0, 2, "halo", thread=1, nbytes=1000, epoch=0),
        Made(Category.halo, 0, 1, "halo", thread=4, nbytes=1000, epoch=0, flags=Flag.device),
        Made(Category.all_reduce, 1, 2, "gradients", thread=1, nbytes=500, epoch=0),
        Made(Category.all_reduce, 1, 2, "wait for gradients", 0, 500, epoch=0, flags=Flag.exposed),
        Made(Category.all_reduce, 2, 3, "sum", nbytes=7, epoch=0, flags=Flag.exposed),
    ]
    write_trace(tmp_path, [made])
    found = report(tmp_path).analysis
    assert found.epochs[0].categories[Category.halo].nbytes == 1000
    assert found.epochs[0].categories[Category.all_reduce].nbytes == 507
    assert sum(found.bandwidth.total["halo"]) * found.bandwidth.seconds == pytest.approx(1000)


def test_damaged_truncated_and_empty_files_are_named_and_the_rest_is_reported(tmp_path):
    paths = write_trace(tmp_path / "trace", replace(RUN, num_ranks=4).spans())
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[: len(whole) // 2])
    paths[1].write_bytes(b"")
    paths[2].write_bytes(b"no trace" * 99)
    found = report(tmp_path)
    told = "\n".join(found.analysis.notes)
    for path, words in zip(
        paths, ("ends within a chunk", "is empty", "is no trace file"), strict=False
    ):
        assert f"{path} {words}" in told
    assert [rank.rank for rank in found.analysis.ranks] == [3]
    assert "waited" in found.verdict
    assert all(note in found.to_html().replace("&#x27;", "'") for note in found.analysis.notes)


def test_a_run_without_spans_says_so(tmp_path):
    write_trace(tmp_path, [[]])
    found = report(tmp_path)
    assert found.verdict == "Nothing was recorded."
    assert found.to_dict()["epochs"] == []
    assert "Nothing was recorded." in found.to_html()


def test_write_report_leaves_a_page_and_json_in_the_run_folder(tmp_path):
    write_trace(tmp_path / "trace", RUN.spans())
    (tmp_path / "config.toml").write_text('[data]\nshuffle = "local"\n')
    found = write_report(tmp_path)
    assert found.shuffle == "local"
    assert sum(found.shares(0).values()) == pytest.approx(1)
    assert json.loads((tmp_path / "trace.json").read_text())["verdict"] == found.verdict
    assert found.verdict in (tmp_path / "trace.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("trace", "config.toml", "trace.json", "trace.html")
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="has no trace files"):
        write_report(tmp_path / "empty")
    assert [*(tmp_path / "empty").iterdir()] == []


def test_epochs_of_which_nothing_is_known_are_noted(tmp_path):
    write_trace(tmp_path, [[Made(Category.epoch, i, i + 1, epoch=i) for i in (0, 2, 6)]])
    assert report(tmp_path).analysis.notes == [
        "nothing is known of epoch 1",
        "nothing is known of epochs 3 to 5",
    ]
