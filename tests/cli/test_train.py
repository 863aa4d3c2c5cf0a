import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.text import Text
from torch.distributed.run import get_args_parser as torchrun_parser

from hyperslab.cli import local_ranks, rank_errors
from hyperslab.cli.local_ranks import count_ranks, find_launcher
from hyperslab.cli.main import main
from hyperslab.cli.rank_errors import FOLDER, read_errors, told_once
from hyperslab.cli.train import _config, export as export_command, train as train_command
from hyperslab.errors import CommError, ConfigError
from hyperslab.train.preset_list import PRESETS
from hyperslab.train.read_config import read_config

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: 0)
    monkeypatch.setattr(rank_errors, "STAY_SECONDS", 0.0)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # else it is set
    return tmp_path


def train(*arguments, code=0):
    result = CliRunner().invoke(main, ["train", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def runs(monkeypatch):
    """The configurations that a stand-in for the trainer was given."""
    seen = []

    def run(config, *, resume, ends_process):
        assert ends_process
        seen.append((config, resume))
        if config.train.seed == 13:
            raise ConfigError("seed 13 is unlucky")
        summary = {"folder": config.run.folder}
        code = 75 if config.train.seed == 75 else 0
        return SimpleNamespace(summary=summary, exit_code=code, report=lambda: [Text("scores")])

    monkeypatch.setitem(sys.modules, "hyperslab.train.run", SimpleNamespace(run=run))
    return seen


# Without training


@pytest.mark.parametrize("arguments", [["--help"], ["--list"], ["hepcnn", "--show"]])
def test_commands_that_train_nothing_load_no_torch(arguments):
    program = (
        "import sys\n"
        "from hyperslab.cli.main import main\n"
        f"main({['train', *arguments]}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_list_shows_every_preset_and_how_to_get_data():
    output = train("--list").output
    for name, preset in PRESETS.items():
        assert name in output
        assert preset.input in output
    assert "hyperslab data synth cosmo --size 64 --count 256 cosmo" in output
    listed = json.loads(train("--list", "--json").output)
    assert [each["name"] for each in listed] == list(PRESETS)
    assert listed[0]["num_parameters"] == 9_439_652


def test_show_prints_settings_to_be_saved_and_edited():
    Path("mine.toml").write_text(train("cosmoflow-128", "--set", "train.epochs=3", "--show").output)
    assert read_config("mine.toml") == read_config("cosmoflow-128", ["train.epochs=3"])
    shown = json.loads(train("cosmoflow-128", "--show", "--json").output)
    assert shown["model"] == {
        "name": "cosmoflow",
        "options": {"size": 128, "batch_norm": True},
        "weights": None,
    }


def test_wrong_usage_exits_with_2():
    assert "hyperslab train --list" in train(code=2).stderr
    assert "--ranks" in train("hepcnn", "--ranks", 0, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hepcn"], "did you mean hepcnn?"),
        (["hepcnn", "--set", "train.lr=3"], "did you mean optimizer.lr?"),
        (["hepcnn", "--ranks", 3, "--set", "mesh.height=2"], "ask for a multiple of 2, or change"),
        (["hepcnn", "--ranks", 4, "--set", "mesh.sample=2"], "does not fit mesh.sample=2"),
    ],
)
def test_errors_are_one_line_and_exit_with_1(arguments, words):
    result = train(*arguments, code=1)
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


# One process


def test_a_run_goes_to_a_folder_of_its_name_unless_told_otherwise(runs):
    Path("mine.toml").write_text("base = 'hepcnn'")
    train("hepcnn")
    train("mine.toml")
    train("mine.toml", "--folder", "there", "--resume")
    train("mine.toml", "--run", "there", "--resume")
    train("mine.toml", "--set", "run.folder=elsewhere")
    seen = [(config.run.folder, resume) for config, resume in runs]
    assert seen == [
        ("runs/hepcnn", False),
        ("runs/mine", False),
        ("there", True),
        ("there", True),
        ("elsewhere", False),
    ]


def test_the_outcome_is_printed_and_its_exit_code_passes_through(runs):
    assert "scores" in train("hepcnn").stdout
    result = train("hepcnn", "--json", "--set", "train.seed=75", code=75)
    assert json.loads(result.stdout) == {"folder": "runs/hepcnn"}
    assert "Error: seed 13 is unlucky\n" in train("hepcnn", "--set", "train.seed=13", code=1).stderr


# How many ranks


@pytest.mark.parametrize(
    ("changes", "asked", "num_gpus", "num"),
    [
        ([], None, 0, 1),
        ([], None, 4, 4),
        ([], 3, 4, 3),
        (["data.batch_size=2"], None, 4, 2),
        (["data.batch_size=8", "train.accumulate=8"], None, 4, 1),
        (["mesh.device=cpu"], None, 4, 1),
        (["mesh.height=2"], None, 4, 2),
        (["mesh.height=2"], None, 0, 2),
        (["mesh.height=2"], 6, 0, 6),
        (["mesh.height=2", "mesh.sample=3"], None, 0, 6),
        (["mesh.sample=1"], None, 4, 1),
    ],
)
def test_as_many_ranks_as_asked_for_or_useful(monkeypatch, changes, asked, num_gpus, num):
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: num_gpus)
    assert count_ranks(read_config("hepcnn", changes), asked).num == num


def test_a_mesh_that_is_too_large_for_this_machine_is_refused(monkeypatch):
    monkeypatch.setattr(local_ranks, "find_machine", lambda: {"cpu_cores": 6.0})
    with pytest.raises(ConfigError, match=r"=25 asks for 25 ranks, .* has 6 cores and 0 GPUs"):
        count_ranks(read_config("hepcnn", ["mesh.height=25"]), None)
    assert count_ranks(read_config("hepcnn", ["mesh.height=24"]), None).num == 24
    assert count_ranks(read_config("hepcnn", ["mesh.height=25"]), 25).num == 25
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: 32)
    assert count_ranks(read_config("hepcnn", ["mesh.height=25"]), None).num == 25


def test_idle_gpus_are_told_of(monkeypatch):
    monkeypatch.setattr(local_ranks, "count_gpus", lambda: 4)
    config = read_config("hepcnn", ["mesh.height=2"])
    assert count_ranks(config, None).advice == "--ranks 4 would use 4 of 4 GPUs"
    config = read_config("hepcnn", ["data.batch_size=1"])
    assert "3 more GPUs could share each sample" in count_ranks(config, None).advice


# Local ranks

FAKE_TRAINER = """
import json, os, sys, time, types
import hyperslab
from hyperslab.errors import CommError, ConfigError

rank = int(os.environ.get("RANK", -1))
comm = types.ModuleType("hyperslab.comm")  # without what loads torch
comm.__path__ = [os.path.join(hyperslab.__path__[0], "comm")]

def run(config, *, resume, ends_process):
    name = config.model.name
    if not name.startswith("unread"):
        place = f"rank {rank} of {os.environ['WORLD_SIZE']}"
        sys.stdout.write(f"{place}, {config.train.epochs} epochs, {resume}\\n")  # in one piece
    def fail(error): raise error
    if name == "all": raise ConfigError("no such file")
    if name == "bug" and rank: raise KeyError("oops")
    if name == "killed" and rank: os.kill(os.getpid(), 9)
    if name == "early": sys.exit(0) if rank else (time.sleep(1), fail(CommError("another died")))
    if name == "starting" and rank: os.kill(os.getppid(), 15)
    if name == "starting": time.sleep(60)
    if name == "command": print(os.environ["HYPERSLAB_COMMAND"])
    return types.SimpleNamespace(summary={"rank": rank}, exit_code=75 if "stopped" in name else 0)

fake = types.ModuleType("hyperslab.train.run")
fake.run = run
sys.modules |= {"hyperslab.comm": comm, "hyperslab.train.run": fake}
"""


@pytest.fixture
def fake_trainer(folder, monkeypatch):
    (folder / "fake").mkdir()
    (folder / "fake" / "sitecustomize.py").write_text(FAKE_TRAINER)
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"), prepend=os.pathsep)


def train_on_ranks(name, *arguments):
    command = [sys.executable, "-m", "hyperslab", "train", "hepcnn", "--json", "--ranks", "2"]
    changes = ["--set", f"model.name={name}", "--set", "train.epochs=3"]
    return subprocess.run(
        [*command, *changes, *arguments], capture_output=True, text=True, timeout=60
    )


def test_local_ranks_train_together_and_rank_0_prints(fake_trainer):
    done = train_on_ranks("fine", "--resume")
    assert (done.returncode, done.stderr) == (0, "Starting 2 local ranks (--ranks)\n")
    assert done.stdout.count('{\n  "rank": 0\n}\n') == 1
    assert sorted(line for line in done.stdout.splitlines() if " of 2" in line) == [
        "rank 0 of 2, 3 epochs, True",
        "rank 1 of 2, 3 epochs, True",
    ]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("stopped", 75, ""),
        ("all", 1, "Error: no such file\n"),
        ("early", 1, "Error: rank 1 ended early, with exit code 0, while others were still at"),
        ("starting", 75, "Stopped at once by SIGTERM; the same command with --resume goes on"),
        ("killed", 1, "Error: rank 1 was killed by SIGKILL, by someone or because memory ran out"),
    ],
)
def test_local_ranks_tell_how_they_ended_once(fake_trainer, name, code, told):
    done = train_on_ranks(name)
    assert done.returncode == code
    assert done.stderr.partition("\n")[2].startswith(told)
    assert done.stderr.count("\n") == (2 if told else 1)


@pytest.mark.slow
def test_an_error_that_nobody_meant_comes_with_its_traceback(fake_trainer):
    done = train_on_ranks("bug")
    assert done.returncode == 1
    assert "Error: rank 1: Traceback" in done.stderr
    assert "KeyError: 'oops'" in done.stderr


@pytest.mark.slow
def test_local_ranks_know_the_command_that_the_user_gave(fake_trainer):
    done = train_on_ranks("command", "--set", "run.folder=a b")
    assert "-m hyperslab train hepcnn --json --ranks 2" in done.stdout
    assert "--set 'run.folder=a b'\n" in done.stdout


# Output that cannot be written


@pytest.fixture
def closed_pipe():
    """The end of a pipe that nobody reads from."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


def train_into(stdout, *arguments, stderr=subprocess.PIPE):
    command = [sys.executable, "-m", "hyperslab", "train", *arguments]
    done = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.every(2)
@pytest.mark.parametrize("arguments", [["--list"], ["--list", "--json"], ["hepcnn", "--show"]])
def test_an_answer_that_cannot_be_written_is_an_error(arguments, closed_pipe):
    with Path("/dev/full").open("w") as full:
        told = "Error: stdout cannot be written: No space left on device\n"
        assert train_into(full, *arguments) == (1, told)
    assert train_into(closed_pipe, *arguments) == (1, "")


@pytest.mark.every(4)
@pytest.mark.parametrize(("name", "code"), [("unread", 0), ("unread-stopped", 75)])
def test_a_run_is_what_it_is_even_if_nobody_can_read_of_it(fake_trainer, closed_pipe, name, code):
    arguments = ["hepcnn", "--json", "--set", f"model.name={name}"]
    with Path("/dev/full").open("w") as full:
        found = train_into(full, *arguments)
    assert found == (code, "Warning: stdout cannot be written: No space left on device\n")
    assert train_into(closed_pipe, *arguments) == (code, "")
    arguments += ["--ranks", "2"]
    assert train_into(closed_pipe, *arguments, stderr=subprocess.STDOUT) == (code, None)


# Under a launcher


@pytest.mark.parametrize("command", [train_command, export_command], ids=lambda each: each.name)
def test_torchrun_leaves_every_option_to_us(command):
    """It takes the beginning of one of its own options for that option, wherever it stands."""
    documented = [each for each in command.params if not getattr(each, "hidden", False)]
    shown = [name for each in documented for name in each.opts if name.startswith("-")]
    assert shown
    ours = ["-m", "hyperslab", command.name, *(word for each in shown for word in (each, "value"))]
    assert torchrun_parser().parse_args(ours).training_script_args == ours[2:]


@pytest.fixture
def launched(monkeypatch):
    """Makes this process one of several ranks."""

    def launch(rank, num_ranks, local_rank=None):
        values = (rank, num_ranks, rank if local_rank is None else local_rank, num_ranks)
        for name, value in zip(LAUNCHERS, (*values, "127.0.0.1", 29999), strict=True):
            monkeypatch.setenv(name, str(value))
        return find_launcher()

    return launch


def test_a_launcher_decides_how_many_ranks_there_are(launched, runs):
    launched(0, 2)
    told = train("hepcnn", "--ranks", 3, code=1).stderr
    assert "--ranks 3 was asked for, but torchrun has started 2" in told
    assert not runs
    train("hepcnn", "--ranks", 2)
    train("hepcnn")
    assert len(runs) == 2


def test_only_rank_0_prints(launched, runs):
    launched(1, 2)
    assert train("hepcnn").output == ""


def test_before_ranks_have_met_the_first_of_a_node_speaks(launched):
    launched(2, 4, local_rank=0)
    assert "did you mean hepcnn?" in train("hepcn", code=1).stderr
    launched(3, 4, local_rank=1)
    assert train("hepcn", code=1).output == ""


def test_torch_prints_no_frames_of_a_lost_peer_unless_asked_to(launched, runs, monkeypatch):
    launched(1, 2)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    train("hepcnn")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    train("hepcnn")
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_a_shell_in_a_slurm_job_is_no_launcher():
    assert find_launcher({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
    assert find_launcher({"HOME": "/root"}) is None


def test_ranks_leave_their_errors_to_who_started_them(launched, folder, monkeypatch):
    monkeypatch.setenv(FOLDER, str(folder))
    launch = launched(1, 2)
    for error in (CommError("rank 0 is\n gone"), KeyError("oops")):
        with pytest.raises(SystemExit) as ended, told_once(launch, with_traceback=False):
            raise error
        assert ended.value.code == 1
        [left] = read_errors(folder)
        assert left.rank == 1
        if isinstance(error, CommError):
            assert (left.text, left.is_about_others) == ("rank 0 is gone", True)
        else:
            assert left.text.startswith("Traceback")
    with pytest.raises(SystemExit) as ended, told_once(launch, with_traceback=False):
        raise KeyboardInterrupt
    assert ended.value.code == 128 + signal.SIGINT


# Export


def test_export_says_what_it_wrote(folder, monkeypatch):
    asked = []

    def export_run(run, file, step, *, shard_nbytes):
        asked.append((run, file, step, shard_nbytes))
        return 7

    module = SimpleNamespace(export_run=export_run)
    monkeypatch.setitem(sys.modules, "hyperslab.train.export", module)
    arguments = ["export", str(folder), "w.safetensors", "--step", "7", "--shard-size", "2GiB"]
    result = CliRunner().invoke(main, arguments)
    assert result.output == "Wrote the weights of step 7 to w.safetensors\n"
    assert asked == [(folder, Path("w.safetensors"), 7, 2 << 30)]
    assert os.fspath(folder) in CliRunner().invoke(main, ["export", f"{folder}/no", "x"]).output


def test_the_folder_of_the_command_line_comes_before_that_of_the_configuration():
    assert _config("hepcnn", ["run.folder=there"], "here").run.folder == "here"
    assert _config("hepcnn", ["run.folder=there"], None).run.folder == "there"
    assert _config("hepcnn", [], None).run.folder == "runs/hepcnn"
