"""Files that take data from other files are refused where the user says so."""

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import hyperslab as hs
from hyperslab.cli.main import main
from hyperslab.io.formats.hdf5 import Hdf5
from hyperslab.train.datasets import open_parts
from hyperslab.train.read_config import read_config

ARRAY = np.arange(24.0, dtype="float32").reshape(1, 2, 3, 4)


def external_link(file):
    file["x"] = h5py.ExternalLink("secret.h5", "/y")


def link_to_a_group(file):
    file["out"] = h5py.ExternalLink("secret.h5", "/")
    file["x"] = h5py.SoftLink("out/y")


def link_in_a_group(file):
    file["deep/out"] = h5py.ExternalLink("secret.h5", "/")
    file["deep/x"] = h5py.SoftLink("./out/y")
    file["x"] = h5py.SoftLink("/deep/x")


def external_data(file):
    file.create_dataset("x", ARRAY.shape, "f4", external=[("secret.bin", 0, ARRAY.nbytes)])


def virtual_dataset(file):
    layout = h5py.VirtualLayout(ARRAY.shape, "f4")
    layout[...] = h5py.VirtualSource("secret.h5", "y", ARRAY.shape)
    file.create_virtual_dataset("x", layout)


MADE_BY = [external_link, link_to_a_group, link_in_a_group, external_data, virtual_dataset]


@pytest.fixture
def folder(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["y"] = ARRAY
    (tmp_path / "secret.bin").write_bytes(ARRAY.tobytes())
    return tmp_path


def made(folder, make):
    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        make(file)
    return folder / "a.h5"


@pytest.mark.parametrize("make", MADE_BY)
def test_data_in_other_files_is_refused(folder, make):
    path = made(folder, make)
    np.testing.assert_array_equal(hs.open(path, sample="x", axes="CDHW").read(0), ARRAY)
    with pytest.raises(hs.FormatError, match=r"a\.h5 has .*, which external=False refuses"):
        hs.open(path, sample="x", external=False)
    with pytest.raises(hs.HyperslabError):
        hs.open(path, external=False)


@pytest.mark.parametrize("make", [external_link, link_to_a_group, link_in_a_group])
def test_links_out_of_the_file_are_not_followed_for_names(folder, make):
    path = made(folder, make)
    assert "x" in Hdf5.names(path)
    assert Hdf5.names(path, external=False) == []
    with pytest.raises(hs.FormatError, match="has no dataset 'z': it has none"):
        hs.open(path, sample="z", external=False)


@pytest.mark.filterwarnings("ignore:.*scaleoffset")
@pytest.mark.parametrize("how", [{}, {"chunks": (1, 2, 3, 4), "scaleoffset": 4}])
def test_links_inside_of_a_file_are_followed(folder, how):
    def make(file):
        file.create_dataset("deep/y", data=ARRAY, **how)
        file["deep/same"] = h5py.SoftLink("y")
        file["x"] = h5py.SoftLink("/deep/./same")

    path = made(folder, make)
    data = hs.open(path, sample="x", axes="CDHW", external=False)
    np.testing.assert_array_equal(data.read(0), ARRAY)
    assert sorted(Hdf5.names(path, external=False)) == ["deep/same", "deep/y", "x"]


def test_links_in_a_circle_come_to_an_end(folder):
    def make(file):
        file["x"], file["z"] = h5py.SoftLink("/z"), h5py.SoftLink("/x")

    with pytest.raises(hs.FormatError, match="on the way to 'x'"):
        hs.open(made(folder, make), sample="x", external=False)


def test_formats_that_read_no_other_files_may_be_asked_too(folder):
    np.save(folder / "a.npy", ARRAY)
    np.testing.assert_array_equal(
        hs.open(folder / "a.npy", axes="CDHW", external=False).read(0), ARRAY
    )


def test_a_name_below_a_dataset_is_told(folder):
    path = made(folder, lambda file: file.create_dataset("x", data=ARRAY))
    with pytest.raises(hs.FormatError, match="has no dataset 'x/y': it has 'x'"):
        hs.open(path, sample="x/y", external=False)


def test_a_command_can_say_so(folder):
    words = ["--sample", "x", "-o", "external=False"]
    result = CliRunner().invoke(main, ["data", "info", str(made(folder, external_link)), *words])
    assert result.exit_code == 1
    assert "which external=False refuses" in result.output


@pytest.mark.parametrize("files", ["a.h5", "secret.h5"])
def test_a_configuration_can_say_so_for_all_its_files(folder, files):
    """Those beside the samples too."""
    made(folder, virtual_dataset)
    beside = {"a.h5": "secret.h5", "secret.h5": "a.h5"}[files]
    (folder / "run.toml").write_text(
        f"""
        model.name = "CosmoFlow"
        data.files = "{folder / files}"
        data.axes = "CDHW"
        data.beside.label = "{folder / beside}"
        data.validation = 0
        data.test = 0
        """
    )
    assert len(open_parts(read_config(folder / "run.toml"))["train"]) == 1
    with pytest.raises(hs.FormatError, match="external=False refuses"):
        open_parts(read_config(folder / "run.toml", ["data.external=false"]))
