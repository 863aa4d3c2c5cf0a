"""The folder of a run: taken by one run at a time, and never written over."""

import json
import logging
import os
import signal

import pytest

import hyperslab as hs
from hyperslab.errors import CommError, ConfigError, FormatError, HyperslabError
from hyperslab.testing import Team
from hyperslab.train.run_folder import FolderLock, RunFolder, describe_environment

CONFIG = '[model]\nname = "CosmoFlow"\n\n[train]\nepochs = 10\n'


def begin(path, config=CONFIG, *, resume=False, **axes):
    mesh = hs.init(device="cpu", **axes)
    folder = RunFolder.begin(path, mesh, resume=resume)
    folder.note_start(config, mesh)
    return folder


def leave_checkpoint(path, step):
    (path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)


def test_a_new_folder_holds_settings_and_environment(tmp_path):
    with begin(tmp_path / "runs" / "x") as folder:
        assert folder.config.read_text() == CONFIG
        found = json.loads(folder.environment.read_text())
        assert found["versions"]["hyperslab"] == hs.__version__
        assert found["mesh"] == "one rank"
        assert (folder.checkpoints.name, folder.figures.name) == ("checkpoints", "figures")
        assert (folder.log.name, folder.tensorboard.name) == ("log.jsonl", "tensorboard")
        assert (folder.weights.name, folder.summary.name) == ("model.safetensors", "summary.json")
        folder.write_summary({"r2": float("nan"), "path": folder.path})
        assert json.loads(folder.summary.read_text()) == {"r2": None, "path": str(folder.path)}


def test_a_run_that_left_checkpoints_is_continued_or_left_alone(tmp_path):
    begin(tmp_path).close()
    leave_checkpoint(tmp_path, 200)
    leave_checkpoint(tmp_path, 500)
    (tmp_path / "checkpoints" / "step_00000600.part").mkdir()
    words = f"{tmp_path} holds a run that reached step 500: continue it with --resume, or choose"
    with pytest.raises(ConfigError, match=words):
        begin(tmp_path, "[train]\nepochs = 99\n")
    assert (tmp_path / "config.toml").read_text() == CONFIG
    with begin(tmp_path, resume=True) as folder:
        assert folder.last_step() == 500
        assert len(json.loads(folder.environment.read_text())["earlier"]) == 1


def test_a_run_that_left_no_checkpoint_begins_anew(tmp_path):
    begin(tmp_path).close()
    with begin(tmp_path, "[train]\nepochs = 5\n", resume=True) as folder:
        assert "epochs = 5" in folder.config.read_text()
        assert json.loads(folder.environment.read_text())["earlier"] == []


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors"])
def test_results_whose_checkpoints_are_gone_stay(tmp_path, name):
    begin(tmp_path).close()
    (tmp_path / name).write_text("result")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=rf"holds {name}, and no checkpoint to go on from"):
            begin(tmp_path, resume=resume)
    assert (tmp_path / name).read_text() == "result"


def test_other_settings_are_told_and_both_are_kept(tmp_path, caplog):
    begin(tmp_path).close()
    leave_checkpoint(tmp_path, 5)
    later = CONFIG.replace("10", "20") + "patience = 3\n"
    for _ in range(2):
        with caplog.at_level(logging.WARNING), begin(tmp_path, later, resume=True) as folder:
            assert folder.config.read_text() == later
    assert caplog.text.count("train.epochs = 20 (was 10), train.patience = 3 (was not set)") == 1
    assert (tmp_path / "config.1.toml").read_text() == CONFIG
    assert not (tmp_path / "config.2.toml").exists()


def test_files_that_no_run_has_written_stay(tmp_path):
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"holds config\.toml, and no checkpoint to go on from: choose"
    ):
        begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_one_run_at_a_time(tmp_path):
    first = begin(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"another run writes into .* \(process {os.getpid()} on"
    ):
        begin(tmp_path, resume=True)
    first.close()
    begin(tmp_path).close()


held = []


def hold(path):
    held.append(FolderLock.take(path))
    return os.getpid()


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    with Team(1) as team:
        [pid] = team.run(hold, tmp_path)
        with pytest.raises(ConfigError, match=f"process {pid} on"):
            begin(tmp_path)
        team.run(be_killed, may_die=[0])
    begin(tmp_path).close()


def test_without_locks_the_name_of_the_holder_decides(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps(["elsewhere", 1]))
    with pytest.raises(ConfigError, match=f"on elsewhere.*if it is gone, remove {lock}"):
        begin(tmp_path)
    lock.write_text(json.dumps([os.uname().nodename, 2**30]))
    begin(tmp_path).close()
    lock.write_text("torn")
    begin(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r"file/x cannot be written: Not a directory"):
        begin(tmp_path / "file" / "x")


def test_damaged_files_of_an_earlier_start_do_no_harm(tmp_path):
    begin(tmp_path).close()
    leave_checkpoint(tmp_path, 5)
    (tmp_path / "config.toml").write_text("[[[")
    (tmp_path / "environment.json").write_text("{")
    with begin(tmp_path, resume=True) as folder:
        assert json.loads(folder.environment.read_text())["earlier"] == []
    assert (tmp_path / "config.1.toml").read_text() == "[[["


@pytest.mark.ranks(2)
def test_all_ranks_stop_together(tmp_path):
    with begin(tmp_path / "x", depth=2) as folder:
        assert folder.config.exists()
    mesh = hs.init(depth=2, device="cpu")
    if mesh.rank == 0:
        leave_checkpoint(tmp_path / "x", 7)
    kind = ConfigError if mesh.rank == 0 else CommError
    with pytest.raises(kind, match="holds a run that reached step 7"):
        begin(tmp_path / "x", depth=2)


@pytest.mark.ranks(2)
def test_a_folder_that_another_node_does_not_see_is_refused(tmp_path):
    mesh = hs.init(depth=2, device="cpu")
    patch = pytest.MonkeyPatch()
    patch.setattr("hyperslab.train.run_folder.SHARED_SECONDS", 0.2)
    try:
        with pytest.raises(HyperslabError, match=r"rank 1 on .* does not see .* nodes share"):
            RunFolder.begin(tmp_path / str(mesh.rank), mesh, resume=False)
    finally:
        patch.undo()


def test_the_environment_can_be_told_in_json():
    found = describe_environment(hs.init(device="cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["launcher"] == "alone"
    assert found["gpu"] is None
