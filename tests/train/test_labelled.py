"""Few labels: which samples keep theirs."""

import h5py
import numpy as np
import pytest
from hypothesis import given, strategies as st

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.train.datasets import open_parts
from hyperslab.train.labelled import labelled_order, take_labelled
from hyperslab.train.read_config import read_config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 samples, ten of them of class 1."""
    path = tmp_path_factory.mktemp("data") / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(60, dtype=np.float32)[:, None, None].repeat(4, 1)
        file["y"] = (np.arange(60) % 6 == 0).astype(np.int32)
        file["z"] = np.zeros((60, 2), np.float32)
    return hs.open(str(path), sample="x", target=["y", "z"], axes="NCW")


def chosen(part):
    return {int(part.read(i)[0, 0]) for i in range(len(part))}


def test_a_larger_fraction_has_all_samples_of_a_smaller_one(data):
    parts = [chosen(take_labelled(data, each, 0, classes="y")) for each in (0.1, 0.3, 0.7, 1)]
    assert [len(part) for part in parts] == [6, 18, 42, 60]
    assert parts[0] < parts[1] < parts[2] < parts[3]


def test_classes_keep_their_shares(data):
    for fraction in (0.1, 0.2, 0.5):
        part = take_labelled(data, fraction, 5, classes="y")
        labels = [int(part.read(i, array="y")) for i in range(len(part))]
        assert abs(sum(labels) - 10 * fraction) < 1


def test_other_seeds_choose_others_and_the_same_seed_the_same(data):
    one, same, other = (chosen(take_labelled(data, 0.2, seed)) for seed in (0, 0, 1))
    assert one == same
    assert one != other


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(0, 2**31))
def test_any_beginning_of_the_order_has_each_class_to_rounding(labels, seed):
    labels = np.array(labels)
    order = labelled_order(len(labels), seed, labels)
    assert sorted(order.tolist()) == list(range(len(labels)))
    num_classes = len(np.unique(labels))
    for num in range(1, len(labels) + 1):
        for each in np.unique(labels):
            due = num * (labels == each).sum() / len(labels)
            assert abs((labels[order[:num]] == each).sum() - due) <= num_classes


def test_fractions_that_leave_no_label_or_too_many_are_told_with_numbers(data):
    with pytest.raises(ConfigError, match=r"0.001 of 60 samples to train on is none: set 0.017"):
        take_labelled(data, 0.001, 0)
    with pytest.raises(ConfigError, match="there are 60 samples"):
        take_labelled(data, 1.5, 0)
    with pytest.raises(ConfigError, match="labelled_fraction must be above 0 and at most 1"):
        read_config("finetune", ["data.labelled_fraction=40"])
    with pytest.raises(ConfigError, match="'z' has 2 numbers a sample"):
        take_labelled(data, 0.5, 0, classes="z")


def test_a_run_takes_labels_of_the_training_part_alone(files):
    settings = [f"data.files={files['hep']}", "task.kind=classification", "finetune.outputs=2"]
    settings += ["data.preset=hepcnn", "data.validation=0.25", "data.test=0", "task.names=none"]
    settings = [each for each in settings if "none" not in each] + ["task.names=['a', 'b']"]
    whole = open_parts(read_config("finetune", [*settings, "data.labelled_fraction=1"]))
    few = open_parts(read_config("finetune", [*settings, "data.labelled_fraction=0.5"]))
    assert (len(whole["train"]), len(few["train"])) == (6, 3)
    assert len(whole["validation"]) == len(few["validation"]) == 2
    places = [
        {part.place_of(i) for i in range(len(part))} for part in (few["train"], whole["train"])
    ]
    assert places[0] < places[1]
