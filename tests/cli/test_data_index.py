"""``hyperslab data index`` and ``stats``, and what ``info`` tells of many files."""

import json
import os

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import hyperslab as hs
from hyperslab.cli.main import main


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Six images with label maps and numbers; we stand beside them."""
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    lines = ["image,age,weight"]
    for number in range(6):
        image = rng.normal(5, 2, (4, 6, 8)).astype(np.float32)
        np.save(tmp_path / f"images/p{number}.npy", image)
        np.save(tmp_path / f"labels/p{number}.npy", (image > 5).astype(np.uint8))
        lines.append(f"p{number},{20 + number},{60.5 + number}")
    (tmp_path / "people.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


OPTIONS = ["--axes", "DHW", "--beside", "label=labels/*.npy", "--beside", "who=people.csv"]


def test_an_index_has_all_that_belongs_to_samples(folder):
    output = run("index", "images", "-o", "data.json", *OPTIONS).output
    assert "6, in 13 files" in output
    data = hs.open("data.json")
    assert list(data.arrays) == ["data", "label", "who"]
    assert data.read(3, array="who").tolist() == [23, 63.5]
    assert (data.read(3, array="label") == (data.read(3) > 5)).all()
    found = json.loads(run("index", "images", "-o", "data.json", *OPTIONS, "--json").stdout)
    assert (found["num_samples"], found["num_shapes"], found["num_unread"]) == (6, 1, 0)
    assert found["arrays"]["who"] == ["float64", [2]]


def test_an_index_tells_of_odd_shapes_and_of_files_that_cannot_be_opened(folder):
    np.save(folder / "images/p3.npy", np.zeros((4, 6, 9), np.float32))
    (folder / "images/p4.npy").write_bytes(b"nothing")
    output = run("index", "images", "-o", "data.json", "--axes", "DHW").output
    assert "2 different shapes" in output
    assert "1 file cannot be opened" in output
    assert "5 of" not in output
    assert "4 of 4x6x8, 1 of 4x6x9" in run("info", "data.json").output
    where = hs.open("data.json").manifest[3].arrays["data"]
    assert where.shape == (4, 6, 9)


def test_statistics_are_kept_in_the_index(folder):
    run("index", "images", "-o", "data.json", *OPTIONS)
    found = json.loads(run("stats", "data.json", "--json").stdout)
    values = np.stack([np.load(path) for path in sorted((folder / "images").iterdir())])
    assert found["channels"][0]["mean"] == pytest.approx(values.mean(dtype=np.float64), rel=1e-12)
    assert json.loads(json.dumps(hs.open("data.json").manifest.statistics.to_dict())) == found
    inside = json.loads(run("stats", "data.json", "--foreground", "label", "--json").stdout)
    assert inside["channels"][0]["count"] == (values > 5).sum()
    output = run("stats", "images", "--axes", "DHW").output
    assert "All values of data in 6 samples" in output
    assert "Kept in" not in output
    assert "Kept in new.json" in run("stats", "images", "--axes", "DHW", "-o", "new.json").output


def test_info_tells_what_lies_beside_samples(folder):
    output = run("info", "images", *OPTIONS).output
    assert "p2 p2.npy people.csv, row 2" in " ".join(output.split())
    found = json.loads(run("info", "images", *OPTIONS, "--json").stdout)
    assert found["pairs"][1] == {
        "key": "p1",
        "beside": [["label", "p1.npy"], ["who", "people.csv, row 1"]],
    }
    assert found["odd"] is None
    run("info", "images", *OPTIONS, "--png", "slice.png")
    assert (folder / "slice.png").read_bytes()[:4] == b"\x89PNG"


def test_info_lists_odd_files_when_it_reads_all(folder):
    assert "none is odd" in run("info", "images", *OPTIONS, "--check").output
    image = np.load(folder / "images/p1.npy")
    image[0, 1, 2] = np.nan
    np.save(folder / "images/p1.npy", image)
    np.save(folder / "images/p2.npy", np.full((4, 6, 8), 7, np.float32))
    np.save(folder / "images/p3.npy", np.zeros((4, 6, 8), np.float64))
    np.save(folder / "images/p4.npy", np.zeros((4, 6, 9), np.float32))
    os.truncate(folder / "images/p5.npy", 200)
    np.save(folder / "labels/p2.npy", np.zeros((4, 6, 8), np.uint8))
    found = json.loads(run("info", "images", *OPTIONS, "--check", "--json").stdout)
    told = {(each["file"][-13:], each["array"]): each["why"] for each in found["odd"]}
    assert "is truncated: 696 bytes are missing" in told.pop(("images/p5.npy", "data"))
    assert told == {
        ("images/p1.npy", "data"): "has 1 of 192 values that are NaN or infinite",
        ("images/p2.npy", "data"): "is 7 everywhere",
        ("images/p3.npy", "data"): "has float64, others float32",
        ("images/p4.npy", "data"): "has shape 4x6x9, others 4x6x8",
        ("labels/p2.npy", "label"): "is 0 everywhere",
    }
    output = run("info", "images", *OPTIONS, "--check").output
    assert "this is odd in 6 arrays of them" in output


def test_attributes_and_pairs_are_options_too(folder):
    (folder / "cubes").mkdir()
    for number in range(3):
        with h5py.File(folder / f"cubes/c{number}.h5", "w") as file:
            file["x"] = np.arange(8.0).reshape(2, 2, 2) + number
            file.attrs["mass"] = number / 2
    run("index", "cubes", "-o", "c.json", "--axes", "DHW", "--attribute", "mass")
    assert hs.open("c.json").read(1, array="attributes") == 0.5
    (folder / "pairs.csv").write_text("cube,label\nc0,p2\nc1,p1\nc2,p0\n")
    for number in range(6):
        if number > 2:
            (folder / f"labels/p{number}.npy").unlink()
        else:
            np.save(folder / f"labels/p{number}.npy", np.zeros((2, 2, 2), np.uint8))
    options = ["--axes", "DHW", "--pair-by", "pairs.csv"]
    run("index", "cubes", "-o", "c.json", *options, "--beside", "label=labels/*.npy")
    assert hs.open("c.json").manifest[0].arrays["label"].file.name == "p2.npy"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["index", "images", "-o", "data.txt"], 2, "an index is a .json file"),
        (["index", "images"], 2, "Missing option '-o' / '--out'"),
        (["index", "images", "-o", "a.json", "--beside", "label"], 2, "is not a name and files"),
        (["index", "nowhere/*.npy", "-o", "a.json"], 1, "no file fits"),
        (["index", "images", "-o", "no/a.json", "--axes", "DHW"], 1, "cannot be written"),
        (["stats", "images", "--axes", "DHW", "--foreground", "lung"], 1, "there are none"),
        (["info", "images", "--axes", "DHW", "--column", "a"], 1, "nothing that lies beside"),
        (
            ["info", "images", "--axes", "DHW", "--beside", "w=people.csv", "--column", "height"],
            1,
            "has no column 'height': it has 'image', 'age', 'weight'",
        ),
    ],
)
def test_wrong_words_are_told_in_a_line(arguments, code, words, folder):
    result = run(*arguments, code=code)
    assert words in result.stderr
    assert not (folder / "a.json").exists()
