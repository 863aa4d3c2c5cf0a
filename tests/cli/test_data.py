import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hyperslab.cli.data import COMMANDS
from hyperslab.cli.main import main


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def cosmo(tmp_path, monkeypatch):
    """Five files like those of CosmoFlow in the folder ``cosmo``, which we stand beside."""
    rng = np.random.default_rng(0)
    (tmp_path / "cosmo").mkdir()
    for number in range(5):
        with h5py.File(tmp_path / f"cosmo/{number}.h5", "w") as file:
            counts = rng.poisson(30, (16, 32, 16, 4)).astype("i2")
            file.create_dataset("full", data=counts, chunks=counts.shape, compression="gzip")
            file["unitPar"] = rng.random(4).astype("f4")
    monkeypatch.chdir(tmp_path)
    return "cosmo/*.h5"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_has_examples(name):
    assert "Examples:\n" in run(name, "--help").output


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "synth"])
def test_the_commands_load_no_torch(name):
    program = (
        "import sys\n"
        "from hyperslab.cli.main import main\n"
        f"main(['data', '{name}', '--help'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# info


def test_info_lists_the_arrays_of_a_file_and_hints_at_a_preset(cosmo):
    output = run("info", cosmo).output
    assert "2 arrays" in output
    assert "int16 16x32x16x4" in output
    assert "hyperslab data info 'cosmo/*.h5' --preset cosmoflow\n" in output
    assert "cosmoflow-cdhw" not in output


def test_info_shows_a_dataset(cosmo):
    output = run("info", cosmo, "--preset", "cosmoflow").output
    for words in ("5, in 5 files", "4x16x32x16", "gzip", "whole on every rank", "depth 8"):
        assert words in output


def test_info_warns_of_expensive_boxes_and_names_the_command_that_mends_it(cosmo):
    mesh = ("--preset", "cosmoflow", "--mesh", "depth=2,height=2")
    found = json.loads(run("info", cosmo, *mesh, "--json").output)
    assert [rank["amplification"] > 3.9 for rank in found["ranks"]] == [True] * 4
    assert "times as much" in found["warnings"][0]
    run(*found["remedy"].removeprefix("hyperslab data ").replace("'", "").split(), "--jobs", 1)
    out = found["remedy"].split()[4]
    mended = json.loads(run("info", f"{out}/*.h5", *mesh, "--json").output)
    assert not mended["warnings"]
    assert {rank["amplification"] for rank in mended["ranks"]} == {1.0}


def test_info_shows_tiles(cosmo):
    tiles = ("--preset", "cosmoflow", "--tile", "8x16x16", "--index", 6, "--mesh", "depth=2")
    output = run("info", cosmo, *tiles).output
    for words in ("20, in 5 files", "4x8x16x16", "16x32x16x4", "tile 2 of sample 0", "[0:4, 0:4,"):
        assert words in output
    assert "their depth of 5 does not divide 16" in run("info", cosmo, *tiles[:3], 5, code=1).stderr


def test_info_hints_at_the_preset_that_names_most(tmp_path):
    with h5py.File(tmp_path / "hep.h5", "w") as file:
        file["data"] = np.zeros((2, 3, 8, 8), np.float32)
        file["label"], file["normweight"] = np.zeros(2, np.int32), np.zeros(2, np.float32)
    output = run("info", tmp_path / "hep.h5").output
    assert "--preset hepcnn" in output
    assert "--preset images" not in output


def test_info_sums_up_many_ranks(cosmo):
    output = run("info", cosmo, "--preset", "cosmoflow", "--mesh", "depth=16,height=4").output
    assert "64 ranks" in output
    assert "least" in output


def test_info_draws_a_slice(cosmo):
    pytest.importorskip("matplotlib")
    assert "slice.png" in run("info", cosmo, "--preset", "cosmoflow", "--png", "slice.png").output
    assert Path("slice.png").stat().st_size > 10_000


def test_info_of_raw_files(tmp_path):
    np.arange(24, dtype="<i2").tofile(tmp_path / "x.raw")
    options = ("-o", "dtype=int16", "-o", "shape=2x3x4", "--axes", "CHW")
    assert "2x3x4" in run("info", tmp_path / "x.raw", *options).output


# repack and stage


def test_repack_says_what_it_did(cosmo):
    output = run("repack", cosmo, "out", "--preset", "cosmoflow", "--mesh", "depth=4").output
    assert "5 written to out" in output
    assert "dims DHWC, chunks of 4x32x16x4, bitshuffle-lz4" in output
    report = json.loads(
        run("repack", cosmo, "out", "--preset", "cosmoflow", "--mesh", "depth=4", "--json").output
    )
    assert (report["num_written"], report["num_kept"]) == (0, 5)


def test_stage_copies_the_box_of_some_ranks(cosmo):
    arguments = ("--preset", "cosmoflow", "--mesh", "depth=2,height=2", "--ranks", "0-1", "--json")
    report = json.loads(run("stage", cosmo, "local", *arguments).output)
    assert (report["num_staged"], report["nbytes"]) == (5, 5 * (4 * 8 * 32 * 16 * 2 + 16))
    report = json.loads(run("stage", cosmo, "local", *arguments).output)
    assert report["num_kept"] == 5
    assert "5 staged in whole" in run("stage", cosmo, "whole", "--preset", "cosmoflow").output


@pytest.mark.slow
def test_ctrl_c_leaves_no_temporary_file(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(0).random((2, 50, 100, 100)))
    paths = [str(tmp_path / f"{number}.npy") for number in range(4)]
    out = tmp_path / "out"
    command = [sys.executable, "-m", "hyperslab", "data", "repack", *paths, str(out)]
    command += ["--axes", "CDHW"]
    process = subprocess.Popen(
        [*command, "--jobs", "2", "--compression", "gzip"], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not list(out.glob(".*.part")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    # Python tells of an interrupt that meets a weak reference's callback, and goes on with it.
    assert "Traceback" not in errors.partition("Exception ignored in")[0]
    assert errors.endswith("Aborted!\n")
    assert not list(out.glob(".*"))


# Wrong usage and wrong files


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "x.npy", "--mesh", "deep=2"], "'deep=2' is not a mesh such as depth=2,height=2"),
        (["info", "x.npy", "--mesh", "depth=0"], "is not a mesh"),
        (["stage", "x.npy", "out", "--mesh", "width=2", "--ranks", "a"], "is not numbers such as"),
        (["stage", "x.npy", "out", "--axes", "CHW", "--ranks", "0"], "--ranks needs --mesh"),
        (["repack", "x.npy", "out", "--chunks", "4by4"], "is not lengths joined by 'x'"),
        (["info", "x.npy", "-o", "dtype"], "is not a name and a value"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((2, 4, 4)))
    assert words in " ".join(run(*arguments, code=2).stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "none.npy"], "none.npy does not exist"),
        (["info", "no*.npy"], "no file fits 'no*.npy'"),
        (["info", "x.tiff"], "tells its format"),
        (["info", "bad.npy"], "bad.npy"),
        (["info", "x.npy", "--axes", "QQQ"], "axes 'QQQ'"),
        (["info", "x.npy", "--sample", "full"], "no array 'full'"),
        (["info", "x.npy", "--axes", "CHW", "--index", "7"], "no sample 7"),
        (["info", "x.npy", "--axes", "CHW", "--mesh", "depth=2"], "cuts along depth"),
        (["info", "x.npy", "--axes", "CHW", "--png", "no/folder.png"], "cannot be written"),
        (["info", "x.npy", "-o", "shape=4x4"], "cannot be opened with options"),
        (["repack", "x.npy", "x.npy/out", "--axes", "CHW"], "cannot be written"),
        (
            ["stage", "x.npy", "out", "--axes", "CHW", "--mesh", "width=2", "--ranks", "0-2"],
            "there is no rank 2",
        ),
        (["info", "x.npy"], "has shape (2, 4, 4), which does not tell its dims: say what they are"),
        (["info", "x.npy"], "axes='CHW' (one sample of 2 channels of 4x4), "),
    ],
)
def test_errors_are_one_line_and_exit_with_1(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((2, 4, 4)))
    (tmp_path / "bad.npy").write_text("no array")
    result = run(*arguments, code=1)
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
