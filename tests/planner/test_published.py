import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyperslab.planner.machine import load_machine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import plan_published
    finally:
        sys.path.remove(str(BENCHMARKS))
    return plan_published


def test_what_was_published_is_predicted(published):
    rows = published.predictions()
    assert [(row.published, row.bar) for row in rows] == [
        (119, 0.05),
        (120, 0.05),
        (111, 0.05),
        (1.19, 0.05),
        (2.28, 0.15),
        (1.42, 0.05),
        (0.824, 0.02),
        (6.59, 0.02),
        (52.7, 0.02),
    ]
    assert [row for row in rows if not row.is_met] == []


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("bytes_per_second", 700e9, 850e9),
        ("kernel_seconds", 1e-6, 20e-6),
        ("host_bytes_per_second", 45e9, 75e9),
    ],
)
def test_no_assumed_value_has_to_be_exact(published, value, least, most):
    for each in (least, most):
        machine = replace(load_machine("lassen"), **{value: each})
        assert [row for row in published.predictions(machine)[:5] if not row.is_met] == []


@pytest.mark.parametrize("seconds", [18e-6, 24e-6])
def test_the_time_between_nodes_may_be_off_by_a_tenth(published, seconds):
    lassen = load_machine("lassen")
    link = replace(lassen.between, latency_seconds=seconds, hop_seconds=seconds)
    rows = published.predictions(replace(lassen, between=link))
    assert [row for row in rows[:5] if not row.is_met] == []


def test_trees_would_scale_better_than_was_published(published):
    """Rings, and the latency of their hops, are what one doubling of nodes shows."""
    rows = published.predictions(replace(load_machine("lassen"), trees=True))
    assert not rows[3].is_met
    assert rows[3].off > 0


def test_the_table_and_json(published):
    table = CliRunner().invoke(published.main, [])
    assert table.exit_code == 0, table.output
    assert table.output.count(" met ") == 9
    shown = json.loads(CliRunner().invoke(published.main, ["--json"]).output)
    assert {"what", "published", "predicted", "bar", "off", "met"} == set(shown[0])
