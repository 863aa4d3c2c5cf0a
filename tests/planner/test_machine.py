import tomllib

import pytest

from hyperslab.errors import ConfigError, FormatError
from hyperslab.planner.machine import FOLDER, known_machines, load_machine

NAMES = ("dgx-h100", "dgx-h200", "frontier", "laptop", "lassen", "perlmutter")
LAPTOP = (FOLDER / "laptop.toml").read_text()


@pytest.fixture
def refusal(tmp_path):
    """``refusal(text)`` is what loading a file with that text complains of."""

    def load(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(FormatError) as caught:
            load_machine(path)
        (line,) = str(caught.value).splitlines()
        return line.removeprefix(str(path))

    return load


def changed(line, new):
    """The laptop's file with another line in place of the first that begins as ``line``."""
    lines = LAPTOP.splitlines()
    number = next(i for i, each in enumerate(lines) if each.startswith(line))
    return "\n".join([*lines[:number], new, *lines[number + 1 :]])


def test_the_machines_that_are_shipped():
    assert tuple(known_machines()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_shipped_machine_has_a_source(name):
    machine = load_machine(name)
    assert all(machine.sources.values())
    assert len(machine.sources) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_no_rate_exceeds_what_it_is_part_of(name):
    machine = load_machine(name)
    assert machine.rate("fp32") <= machine.rate("tf32") <= machine.rate("bf16")
    assert machine.files_bytes_per_second <= machine.all_files_bytes_per_second
    assert machine.between.bytes_per_second <= machine.inside.bytes_per_second
    assert machine.inside.latency_seconds <= machine.between.latency_seconds


def test_the_values_of_a_file_are_read():
    machine = load_machine("lassen")
    assert machine.gpus_per_node == 4
    assert machine.inside.latency_seconds == 8e-6
    assert machine.inside.bytes_per_second == 37.6e9
    assert not machine.trees
    assert not machine.fuses
    assert machine.cores_per_node == 0
    assert machine.sources["inside.latency_seconds"] == "LBANN's model"


def test_a_number_needs_no_source(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(changed("kernel_seconds", "kernel_seconds = 3e-6"))
    assert load_machine(path).kernel_seconds == 3e-6


def test_a_hop_is_a_message_unless_it_is_given(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(changed("hop_seconds", ""))
    assert load_machine(path).inside.hop == load_machine(path).inside.latency_seconds
    assert load_machine("dgx-h100").between.hop < load_machine("dgx-h100").between.latency_seconds


def test_an_unknown_machine_is_answered_with_those_that_are_known():
    with pytest.raises(ConfigError) as caught:
        load_machine("lasen")
    assert str(caught.value) == (
        "there is no machine 'lasen'; did you mean 'lassen'? (there are "
        f"{', '.join(NAMES)}, or give a TOML file)"
    )


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"^there is no file .*none\.toml$"):
        load_machine(tmp_path / "none.toml")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(FormatError, match=r"folder\.toml: "):
        load_machine(tmp_path / "folder.toml")


def test_what_is_not_toml_names_the_line(refusal):
    assert "at line 1" in refusal("name is mine")


@pytest.mark.parametrize(
    ("line", "new", "complaint"),
    [
        ("memory_nbytes", "", "gpu.memory_nbytes is missing"),
        ("[gpu.flops]", "[gpu.rates]", "gpu.flops.fp32 is missing"),
        ("memory_nbytes", "memory_nbytes = -1", "memory_nbytes must be a number above 0, got -1"),
        ("memory_nbytes", "memory_nbytes = 0", "memory_nbytes must be a number above 0, got 0"),
        ("memory_nbytes", "memory_nbytes = nan", "memory_nbytes must be a number above 0, got nan"),
        ("memory_nbytes", "memory_nbytes = inf", "memory_nbytes must be a number above 0, got inf"),
        ("memory_nbytes", "memory_nbytes = true", "must be a number above 0, got True"),
        ("memory_nbytes", 'memory_nbytes = "4 GB"', "must be a number above 0, got '4 GB'"),
        ("gpus", "gpus = 2.5", "node.gpus must be a whole number, got 2.5"),
        ("name", "", "name is missing"),
        ("kernel_seconds", "kernel_second = 1", "gpu.kernel_seconds is missing"),
        ("cores", "core = 4", "node.core is not known; did you mean 'node.cores'?"),
        ("[gpu.flops]", "fuses = 1\n[gpu.flops]", "gpu.fuses must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(refusal, line, new, complaint):
    told = refusal(changed(line, new))
    assert told.startswith(" does not describe a machine: ")
    assert complaint in told
    assert "laptop.toml" in told


def test_files_are_plain_tables():
    for name in NAMES:
        assert tomllib.loads((FOLDER / f"{name}.toml").read_text())["gpu"]["name"]
