"""From files that users have to a trained network, with no code."""

import json

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.errors import ConfigError
from hyperslab.train.datasets import open_parts
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run

CONFIG = """
[model]
name = "cosmoflow"
options = {{ size = 16, in_channels = 1, outputs = 2, base_channels = 1, dropout = 0.0 }}

[data]
{data}
batch_size = 2
validation = 0.25
test = 0

[task]
names = ["omega_m", "sigma_8"]

[mesh]
device = "cpu"

[train]
epochs = 1
precision = "fp64"

[run]
log_every = 1
tensorboard = false
figures = false
"""

DATA = {
    "table": """
files = "FOLDER/cubes/*.hdf5"
sample = "density"
axes = "DHW"
beside = { parameters = "FOLDER/parameters.csv" }
columns = ["omega_m", "sigma_8"]
""",
    "attributes": """
files = "FOLDER/cubes"
sample = "density"
axes = "DHW"
attributes = ["omega_m", "sigma_8"]
""",
    "array": """
files = "FOLDER/cubes"
sample = "density"
axes = "DHW"
beside = { parameters = "FOLDER/parameters.npy" }
pair_by = "row"
""",
    "index": """
files = "FOLDER/cubes.json"
normalize = "standard"
""",
}


def hyperslab(*words):
    result = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="session")
def universe(tmp_path_factory):
    """Eight cubes; their parameters in a table in another order, in attributes, in one array."""
    folder = tmp_path_factory.mktemp("universe")
    (folder / "cubes").mkdir()
    rng = np.random.default_rng(5)
    parameters = rng.uniform(0.2, 0.9, (8, 2))
    lines = []
    for number, (omega_m, sigma_8) in enumerate(parameters.tolist()):
        with h5py.File(folder / "cubes" / f"u{number}.hdf5", "w") as file:
            file["density"] = (5 + rng.normal(size=(16, 16, 16)) * sigma_8).astype(np.float32)
            file.attrs["omega_m"], file.attrs["sigma_8"] = omega_m, sigma_8
        lines.append(f"u{number},seed {number},{sigma_8!r},{omega_m!r}")
    text = "\n".join(["name,comment,sigma_8,omega_m", *reversed(lines)])
    (folder / "parameters.csv").write_text(text)
    np.save(folder / "parameters.npy", parameters)
    for name, data in DATA.items():
        data = data.replace("FOLDER", str(folder))
        (folder / f"{name}.toml").write_text(CONFIG.format(data=data))
    return folder


def losses(universe, folder, name, *changes):
    """Of every step, and of validation."""
    run(read_config(universe / f"{name}.toml", [f"run.folder={folder}", *changes]))
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def by_table(universe, tmp_path_factory):
    return losses(universe, tmp_path_factory.mktemp("table") / "run", "table")


def test_a_table_attributes_and_an_array_teach_the_same(universe, by_table, tmp_path):
    assert len(by_table) >= 3
    for name in ("attributes", "array"):
        assert losses(universe, tmp_path / name, name) == by_table


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["depth", "sample"])
def test_cubes_and_a_table_teach_two_ranks_what_they_teach_one(axis, universe, by_table, tmp_path):
    found = losses(universe, tmp_path / "run", "table", f"mesh.{axis}=2")
    assert found == pytest.approx(by_table, rel=1e-9)


def test_an_index_with_statistics_teaches_as_its_numbers_do(universe, tmp_path):
    index = universe / "cubes.json"
    options = ["--sample", "density", "--axes", "DHW", "--column", "omega_m", "--column", "sigma_8"]
    beside = f"parameters={universe / 'parameters.csv'}"
    hyperslab("data", "index", universe / "cubes", "-o", index, *options, "--beside", beside)
    found = json.loads(hyperslab("data", "stats", index, "--json"))
    (channel,) = found["channels"]
    by_index = losses(universe, tmp_path / "index", "index")
    numbers = f"data.normalize={{mean = [{channel['mean']!r}], std = [{channel['std']!r}]}}"
    assert losses(universe, tmp_path / "table", "table", numbers) == by_index


def test_what_is_wrong_with_a_table_stops_a_run_in_a_line(universe, tmp_path):
    lines = (universe / "parameters.csv").read_text().splitlines()
    (tmp_path / "short.csv").write_text("\n".join(lines[:-2]))
    changes = [f"data.beside={{parameters = '{tmp_path / 'short.csv'}'}}"]
    words = (
        r"data\.beside: .*short\.csv, column 'name' does not name each of 8 files once in its 6 "
    )
    with pytest.raises(ConfigError, match=words + r"rows: 2 without a row: u0\.hdf5, u1\.hdf5"):
        losses(universe, tmp_path / "run", "table", *changes)
    assert not (tmp_path / "run").exists()


def test_parts_of_other_files_share_a_table(universe, tmp_path):
    changes = [f"data.validation=['{universe}/cubes/u3.hdf5', '{universe}/cubes/u6.hdf5']"]
    config = read_config(universe / "table.toml", changes)
    parts = open_parts(config)
    assert [len(parts[name]) for name in ("train", "validation")] == [6, 2]
    expected = np.load(universe / "parameters.npy")
    for index, number in enumerate((3, 6)):
        found = parts["validation"].read(index, array="parameters")
        np.testing.assert_array_equal(found, expected[number])
