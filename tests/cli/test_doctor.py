import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from click.testing import CliRunner

from hyperslab.cli import doctor
from hyperslab.cli.main import main
from hyperslab.cli.selftest import Check
from hyperslab.kernels import conv_check
from hyperslab.kernels.conv_check import Verdict

PASSED = Check("cpu: conv3d", True, "2 ranks agree")
FAILED = Check("cpu: conv3d", False, "no answer within 60 s")


@pytest.fixture
def selftest(monkeypatch):
    """The checks that the self-test is made to return; the machine has no GPU."""
    checks = [PASSED]
    monkeypatch.setattr(doctor, "run_selftest", lambda device: checks)
    monkeypatch.setattr(doctor, "check_gpus", list)
    return checks


def run_doctor(*options, **environ):
    return CliRunner(env=environ).invoke(main, ["doctor", *options])


def test_a_healthy_machine_exits_with_0(selftest):
    result = run_doctor()
    assert result.exit_code == 0
    for words in ("torch", "CPU cores", "gloo", "alone", "CPUs only", "ok  2 ranks agree"):
        assert words in result.stdout


def test_json_is_one_object_with_the_same_content(selftest):
    report = json.loads(run_doctor("--json").stdout)
    assert report["ok"] is True
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["cpu_cores"] > 0
    assert report["machine"]["gpus"] == []
    assert report["backends"]["gloo"] is True
    assert report["launch"]["launcher"] == "alone"
    assert report["notes"] != []
    assert report["checks"][-1] == {"name": "cpu: conv3d", "ok": True, "detail": "2 ranks agree"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failed_check_exits_with_1_and_its_reason(selftest, options):
    selftest[:] = [FAILED]
    result = run_doctor(*options)
    assert result.exit_code == 1
    assert result.stderr == ("Error: 1 of 2 checks failed: cpu: conv3d: no answer within 60 s\n")
    assert ("FAILED" in result.stdout) or json.loads(result.stdout)["ok"] is False


def test_torch_without_gloo_is_broken(selftest, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "gloo: this torch was built without gloo" in run_doctor().stderr


def test_variables_that_make_no_sense_are_a_failed_check(selftest):
    result = run_doctor(RANK="3", WORLD_SIZE="2")
    assert "launcher: RANK=3 WORLD_SIZE=2: RANK must be below" in result.stderr


def test_the_launcher_is_shown_by_rank_0_alone(selftest):
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    assert "torchrun: rank 0 of 2" in run_doctor(RANK="0", **launcher).stdout
    quiet = run_doctor(RANK="1", **launcher)
    assert (quiet.exit_code, quiet.output) == (0, "")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "is not installed: pip install 'torch>=2.11'"),
        ("2.9.1", "2.9.1 is too old: pip install --upgrade 'torch>=2.11'"),
        ("2.10.0+cu128", "2.10.0+cu128 is too old"),
    ],
)
def test_a_torch_that_will_not_do_is_named_with_what_to_do(version, words):
    check = doctor.check_torch(version)
    assert not check.ok
    assert words in check.detail


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0a0+git1234", "3.0"])
def test_newer_torch_versions_will_do(version):
    assert doctor.check_torch(version).ok


def test_without_a_usable_torch_the_rest_is_left_out(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "1.0")
    result = run_doctor()
    assert result.exit_code == 1
    assert "Error: 1 of 1 checks failed: torch: 1.0 is too old" in result.stderr
    assert "FAILED" in result.stdout


def test_a_gpu_that_torch_cannot_use_is_a_failure(monkeypatch):
    def warn_and_refuse():
        warnings.warn("the driver is too old\n (found 11.4)", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn_and_refuse)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(doctor, "_has_nvidia_device", lambda: True)
    assert doctor.check_gpus() == [Check("GPU", False, "the driver is too old (found 11.4)")]


@pytest.fixture
def one_gpu(selftest, monkeypatch):
    """The machine has a GPU."""
    monkeypatch.setattr(doctor, "check_gpus", lambda: [Check("GPU 0", True, "eight ones")])
    monkeypatch.setattr(doctor, "find_gpus", lambda: [{"name": "H", "memory_nbytes": 2**30}])


@pytest.mark.parametrize("reach", [True, False])
def test_gpus_that_do_not_reach_each_other_are_noted(reach, monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach or not one)
    words = "ranks on GPUs 1 and 2 cannot reach each other's memory and use NCCL"
    assert doctor._find_unreachable(3) == ([] if reach else [words])


def test_convolutions_of_the_gpu_are_checked(one_gpu, monkeypatch):
    found = Verdict({"bf16 contiguous forward": 0.001, "fp16 contiguous forward": 0.0}, 0.7)
    monkeypatch.setattr(conv_check, "check", lambda device: found)
    result = run_doctor()
    assert result.exit_code == 0
    words = "2 ways to compute in bf16, fp16, TF32 and float32 agree (0.7 s)"
    assert words in " ".join(result.stdout.split())


def test_convolutions_that_cannot_be_computed_are_a_failed_check(one_gpu, monkeypatch):
    monkeypatch.setattr(conv_check, "check", lambda device: Verdict({}, 0.0))
    assert "GPU 0: conv3d: none could be computed" in run_doctor().stderr


def test_a_wrong_convolution_of_the_gpu_is_a_failed_check(one_gpu, monkeypatch):
    found = Verdict({"bf16 contiguous forward": 0.3, "fp16 contiguous forward": 0.0}, 0.7)
    monkeypatch.setattr(conv_check, "check", lambda device: found)
    result = run_doctor()
    assert result.exit_code == 1
    assert "GPU 0: conv3d: bf16 contiguous forward: wrong in this cuDNN" in result.stderr


@pytest.mark.slow
def test_the_real_doctor_under_a_launcher_ignores_its_ranks():
    environ = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "64",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host.invalid",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "hyperslab", "doctor", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["launch"]["num_ranks"] == 64
    for what in ("all_reduce", "conv3d"):
        check = {"name": f"cpu: {what}", "ok": True, "detail": "2 ranks agree"}
        assert check in report["checks"]
    exchange = report["checks"][-1]
    assert exchange["name"] == "cpu: exchange"
    assert exchange["detail"].startswith("by gloo, small ones within a node by sockets: ")
    assert list(exchange["figures"]["exchanges"]) == ["64 KiB", "1 MiB"]
