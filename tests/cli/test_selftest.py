import os
from pathlib import Path

import pytest
import torch

from hyperslab.cli.selftest import Check, rank_environ, run_selftest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_ranks_on_gpus_agree_with_one_process():
    assert [check.ok for check in run_selftest("cuda")] == [True, True]


def test_a_step_that_raises_is_a_failed_check_with_its_reason():
    [check] = run_selftest("no-such-device")
    assert check.name == "no-such-device: all_reduce"
    assert not check.ok
    assert "RuntimeError: " in check.detail


def test_ranks_that_take_too_long_are_ended():
    before = children()
    [check] = run_selftest("cpu", timeout_seconds=0.1)
    assert check == Check("cpu: all_reduce", False, "no answer within 0.1 s")
    assert children() == before


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_an_outer_launcher_does_not_reach_the_ranks():
    outer = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "3",
        "SLURM_PROCID": "7",
        "SLURMD_NODENAME": "node01",
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMI_RANK": "7",
        "PMIX_NAMESPACE": "job",
        "MPI_LOCALNRANKS": "8",
        "PALS_RANKID": "7",
        "RANK": "7",
        "MASTER_ADDR": "node01",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    inner = rank_environ(outer, rank=1, port=29400)
    assert outer.keys() & inner.keys() == {"RANK", "MASTER_ADDR", "PATH", "CUDA_VISIBLE_DEVICES"}
    assert (inner["RANK"], inner["WORLD_SIZE"]) == ("1", "2")
    assert (inner["MASTER_ADDR"], inner["MASTER_PORT"]) == ("127.0.0.1", "29400")
