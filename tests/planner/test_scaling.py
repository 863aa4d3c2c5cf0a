from dataclasses import replace

import pytest

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.planner.cost import Job
from hyperslab.planner.machine import load_machine
from hyperslab.planner.network import load_shipped
from hyperslab.planner.scaling import (
    best_gpus,
    fewest_gpus,
    largest_batch,
    strong_scaling,
    training_run,
    weak_scaling,
)
from hyperslab.planner.search import has_fitting, search

LASSEN = load_machine("lassen")
JOB = Job(load_shipped("cosmoflow-512"), 3)


@pytest.mark.parametrize("memory_nbytes", [16e9, 7e9, 2e9])
def test_one_gpu_less_than_the_fewest_or_one_node_is_not_enough(memory_nbytes):
    machine = replace(LASSEN, memory_nbytes=memory_nbytes)
    gpus = fewest_gpus(JOB, machine)
    less = gpus - (4 if gpus > 4 else 1)
    assert has_fitting(JOB, machine, gpus)
    assert gpus == 1 or not has_fitting(JOB, machine, less)


def test_no_number_of_gpus_is_told_as_such():
    assert fewest_gpus(JOB, replace(LASSEN, memory_nbytes=1e3), most=16) is None


def test_one_sample_more_than_the_largest_batch_does_not_fit():
    job = replace(JOB, batch=64)
    batch = largest_batch(job, LASSEN, 4)
    assert has_fitting(replace(job, batch=batch), LASSEN, 4)
    assert not has_fitting(replace(job, batch=batch + 1), LASSEN, 4)
    assert largest_batch(JOB, replace(LASSEN, memory_nbytes=1e3), 4) is None


@pytest.mark.slow
def test_what_would_fit_is_told_and_does():
    found = search(replace(JOB, batch=64), LASSEN, 4)
    gpus, batch = fewest_gpus(found.job, LASSEN), largest_batch(found.job, LASSEN, 4)
    assert f"; {gpus} GPUs or a batch of {batch} would do" in found.sentence
    with pytest.raises(ConfigError, match=r"lacks .* GiB of memory on each[,;] "):
        _ = found.best


def test_the_most_gpus_that_are_efficient():
    found = best_gpus(JOB, LASSEN, 0.8, most=32)
    assert found.efficiency(found.best) >= 0.8
    more = search(JOB, LASSEN, found.gpus * 2, recut=False)
    assert found.gpus == 32 or more.efficiency(more.best) < 0.8


def test_an_efficiency_that_nothing_has():
    with pytest.raises(ConfigError, match=r"^no number of GPUs up to 8 has 100% of ideal speed"):
        best_gpus(replace(JOB, source="files"), LASSEN, 1.0, most=8)
    with pytest.raises(ConfigError, match="efficiency must be above 0 and at most 1, got 70"):
        best_gpus(JOB, LASSEN, 70)


def test_curves_go_through_what_was_found():
    found = search(replace(JOB, batch=2), LASSEN, 8)
    strong, weak = strong_scaling(found), weak_scaling(found)
    assert [point.gpus for point in strong] == [1, 2, 4, 8, 16]
    assert [(point.gpus, point.batch) for point in weak] == [(4, 1), (8, 2), (16, 4)]
    for points in (strong, weak):
        assert next(point.best for point in points if point.gpus == 8) is found.best
    assert strong[0].best is None  # does not fit
    assert strong[0].samples_per_second is None


def test_hours_of_a_run():
    found = search(JOB, LASSEN, 4)
    run = training_run(found, samples=10, epochs=2)
    assert run.steps == 8  # of 3, 3, 3 and 1 samples
    assert run.hours == pytest.approx(8 * found.best.step_seconds / 3600)
    assert run.gpu_hours == 4 * run.hours


@pytest.mark.parametrize("counts", [{"gpus": 0}, {"gpus": 1, "batch": 0}])
def test_counts_below_one(counts):
    name = "batch" if "batch" in counts else "gpus"
    with pytest.raises(ConfigError, match=f"^{name} must be at least 1, got 0$"):
        hs.plan("cosmoflow-64", machine="lassen", **counts)


def test_a_batch_that_does_not_divide_is_cut_unevenly():
    found = hs.plan("cosmoflow-64", gpus=2, batch=5, machine="lassen")
    cuts = {str(each.cut): each for each in found.candidates}
    even = hs.plan("cosmoflow-64", gpus=2, batch=6, machine="lassen")
    same = {str(each.cut): each for each in even.candidates}
    assert cuts["sample=2"].cost.kernels == pytest.approx(same["sample=2"].cost.kernels)


def test_shapes_of_a_shipped_network():
    with pytest.raises(ConfigError, match=r"^cosmoflow-64 is known for samples of 4x64x64x64, not"):
        hs.plan("cosmoflow-64", (4, 32, 32, 32), gpus=1)
    with pytest.raises(ConfigError, match=r"^precision must be one of auto, fp32, tf32, bf16, got"):
        hs.plan("cosmoflow-64", gpus=1, precision="fp8")
