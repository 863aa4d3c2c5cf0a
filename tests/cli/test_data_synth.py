import json

import h5py
import pytest
from click.testing import CliRunner

from hyperslab.cli import data_synth
from hyperslab.cli.main import main
from hyperslab.synth import Universes


def synth(*arguments):
    return CliRunner().invoke(main, ["data", "synth", *map(str, arguments)])


@pytest.mark.parametrize(
    ("command", "options", "preset"),
    [
        ("cosmo", ["--size", "8"], "cosmoflow"),
        ("hep", ["--size", "16x20", "--per-file", "1"], "hepcnn"),
        ("climate", ["--size", "16x24"], "climate"),
        ("mesh", ["--size", "64"], "mesh"),
        ("volumes", ["--size", "16x16x20"], "volumes"),
        ("images", ["--size", "16", "--per-file", "1"], "images"),
    ],
)
def test_files_are_made_and_it_is_said_how_to_open_them(command, options, preset, tmp_path):
    result = synth(command, *options, "--count", 2, "--jobs", 1, tmp_path)
    assert result.exit_code == 0, result.output
    assert "Made 2 files" in result.stdout
    assert f"hs.open('{tmp_path}/{command}_*.h5', preset='{preset}')" in result.stdout
    assert len(list(tmp_path.iterdir())) == 2


def test_json_is_one_object(tmp_path):
    options = ["cosmo", "--size", "8x8x8", "--count", 2, "--jobs", 1, "--json", tmp_path]
    first, second = (json.loads(synth(*options).stdout) for _ in range(2))
    assert (first["made"], first["kept"]) == (2, 0)
    assert (second["made"], second["kept"], second["nbytes"]) == (0, 2, 0)
    assert first["recipe"] == {"size": 8, "count": 2, "seed": 0, "particles": 1}
    assert first["files"] == f"{tmp_path}/cosmo_*.h5"


def test_more_particles_can_be_asked_for(tmp_path):
    synth("cosmo", "--size", 8, "--count", 1, "--jobs", 1, "--particles", 8, tmp_path)
    with h5py.File(tmp_path / "cosmo_000000.h5") as file:
        assert file["full"][..., 0].sum() == 8 * 8**3


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cosmo", "--size", "0"], 2, "'0' is not a size such as 128 or 128x128x128"),
        (["cosmo", "--size", "big"], 2, "'big' is not a size"),
        (["cosmo", "--size", "8x8"], 2, "'8x8' is not a size"),
        (["cosmo", "--size", "8x8x9"], 2, "8x8x9 is not a cube"),
        (["cosmo", "--size", "2"], 1, "must be 4 to 1024, got 2"),
        (["cosmo", "--particles", "2"], 1, "must be a cube"),
        (["cosmo", "--count", "0"], 2, "0 is not in the range"),
        (["climate", "--size", "768"], 2, "'768' is not a size such as 768x1152"),
        (["climate", "--size", "8x8"], 1, "must be 16 to 8192 along each dim"),
        (["hep", "--seed", "-1"], 2, "-1 is not in the range"),
        (["mesh", "--size", "64x128"], 2, "64x128 is not a square"),
        (["mesh", "--size", "96"], 1, "must be a multiple of 64"),
        (["volumes", "--size", "8"], 1, "must be 16 to 1024 along each dim, got 8x8x8"),
        (["images", "--size", "8x64"], 1, "must be 16 to 4096 along each dim, got 8x64"),
    ],
)
def test_bad_values_are_one_clear_line(arguments, code, words, tmp_path):
    result = synth(*arguments, tmp_path / "out")
    assert result.exit_code == code
    assert words in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    assert "is a file" in synth("cosmo", tmp_path / "out").stderr


def test_no_more_processes_than_memory_is_for():
    def jobs(cores, gib):
        machine = {"cpu_cores": cores, "memory_nbytes": int(gib * 2**30), "gpus": []}
        return data_synth.jobs_that_fit(Universes(size=512), machine)

    assert jobs(4, 1000) == 4
    assert jobs(64, 16) < 4
    with pytest.raises(data_synth.ConfigError, match=r"takes about 3.* GiB of memory"):
        jobs(64, 2)


@pytest.mark.parametrize(
    "command", [[], ["cosmo"], ["hep"], ["climate"], ["mesh"], ["volumes"], ["images"]]
)
def test_help_has_examples(command):
    assert "hyperslab data synth" in synth(*command, "--help").stdout.split("Examples:")[1]
