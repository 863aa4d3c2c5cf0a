import json

from hyperslab.cli.output import draw
from hyperslab.train.outcome import Outcome

FOLDER = "/scratch/someone/a/rather/long/name/of/a/folder/with/runs/cosmoflow-128-again"
SUMMARY = {"folder": FOLDER, "state": "finished", "scores": {}, "figures": [], "weights": None}


def shown(**changes):
    return draw(Outcome({**SUMMARY, **changes}).report()).splitlines()


def cells(lines):
    return [line.split() for line in lines if not line.startswith("─")]


def test_how_a_run_ended_is_one_line():
    state = "stopped by SIGTERM at step 6; go on with --resume"
    assert shown(state=state) == [f"{FOLDER}: {state}"]


def test_scores_of_each_part_are_told_and_what_is_no_number_is_a_dash():
    scores = {"validation": {"loss": 0.25, "auc": None}, "test": {"loss": 1 / 3, "auc": 1.0}}
    lines = shown(scores=json.loads(json.dumps(scores)))
    assert cells(lines[1:]) == [
        ["score", "validation", "test"],
        ["loss", "0.25", "0.3333"],
        ["auc", "-", "1"],
    ]


def test_scores_by_name_have_a_row_for_each_name():
    found = {"loss": 1.0, "mae/sigma_8": 2.0, "mae/h/0": 3.0, "r2/sigma_8": 4.0, "r2/h/0": None}
    assert cells(shown(scores={"test": found})[1:]) == [
        ["score", "test"],
        ["loss", "1"],
        ["test", "test"],
        ["name", "mae", "r2"],
        ["sigma_8", "2", "4"],
        ["h/0", "3", "-"],
    ]


def test_where_figures_and_weights_are():
    lines = shown(figures=["runs/x/figures/a.png", "runs/x/figures/b.png"], weights="runs/x/w")
    assert lines[1:] == ["Figures: runs/x/figures (a.png, b.png)", "Weights: runs/x/w"]
